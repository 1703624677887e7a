# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: int4 linear layers of a vLLM engine on a CPU run on the kernels of this package.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``). It puts a kernel class at
the head of the table from which vLLM chooses for every AWQ, GPTQ and compressed-tensors layer. vLLM itself reads the
checkpoint, splits it between workers and turns AWQ's words into standard ones; the class takes over from there.

Nothing of vLLM is imported before :func:`register` is called, and none of its code is changed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from awqjit import (
    jit,
    ops,  # noqa: F401  (registers torch.ops.awqjit)
    select,
)
from awqjit.errors import AwqJitError
from awqjit.integrations import vllm_layers
from awqjit.layout import pack
from awqjit.spec import Problem

NAME = "AwqJitLinearKernel"
"""What vLLM's log and ``VLLM_DISABLED_KERNELS`` call the kernel class."""

_PERM = "awqjit_perm"  # of an act-order layer, beside the parameters that vLLM named
_LAYER_FIELDS = (
    "full_weight_shape", "partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points",
)  # fmt: skip
_NAME_ARGUMENTS = ("w_q_param_name", "w_s_param_name", "w_zp_param_name")

# Below vLLM's own logger, whose handler and level are the only ones that a worker process has.
_log = logging.getLogger("vllm.awqjit")


class UnfitError(AwqJitError):
    """The installed vLLM is not built as this plugin needs it; the text says what differs."""


def register() -> None:
    """Put the kernel class first in vLLM's table for this process's device. Harmless when called again.

    Does nothing where vLLM runs on a device that no row of the selection table is for. A vLLM that is built in another
    way is left as it is, with a warning in its log.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type not in {row.device for row in select.ROWS}:
        return
    try:
        table = _table(current_platform._enum)
        kernel = kernel_class()
    except (UnfitError, ImportError, AttributeError, TypeError) as error:
        _log.warning("awqjit does not serve int4 layers, for this vLLM is not built as its plugin expects: %s", error)
        return
    table[:] = [kernel, *(other for other in table if other is not kernel)]


def _table(platform: Any) -> list[type]:
    """The list, best kernel first, that vLLM chooses from on a platform."""
    from vllm.model_executor.kernels import linear

    tables = getattr(linear, "_POSSIBLE_KERNELS", None)
    if not isinstance(tables, dict) or not isinstance(tables.get(platform), list):
        raise UnfitError(f"{linear.__name__} has no list of kernels for {platform}")
    found: list[type] = tables[platform]
    return found


@functools.cache
def kernel_class() -> type:
    """The class that vLLM instantiates for each layer: :class:`Int4Methods` as one of vLLM's mixed-precision kernels.

    Raises:
        UnfitError: vLLM's base class asks for more, or tells less, than is known here.
        ImportError: vLLM has no such base class.
    """
    from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig

    told = {field.name for field in dataclasses.fields(MPLinearLayerConfig)}
    if unknown := [name for name in _LAYER_FIELDS if name not in told]:
        raise UnfitError(f"{MPLinearLayerConfig.__name__} has no {', '.join(unknown)}")
    arguments = inspect.signature(MPLinearKernel.__init__).parameters
    if unknown := [name for name in _NAME_ARGUMENTS if name not in arguments]:
        raise UnfitError(f"{MPLinearKernel.__name__} takes no {', '.join(unknown)}")
    if asked := sorted(name for name in MPLinearKernel.__abstractmethods__ if not hasattr(Int4Methods, name)):
        raise UnfitError(f"{MPLinearKernel.__name__} asks for {', '.join(asked)}")
    return type(NAME, (Int4Methods, MPLinearKernel), {"__module__": __name__, "__doc__": Int4Methods.__doc__})


class Int4Methods:
    """One int4 layer of a vLLM model, or of one worker's share of it. :func:`kernel_class` adds vLLM's base class.

    Attributes:
        config: what vLLM tells of the layer (``MPLinearLayerConfig``).
        w_q_name, w_s_name, w_zp_name: the layer's parameters with q, the scales and the zero points.
        problem: what runs, decided when the weights have been loaded and not again.
    """

    config: Any
    w_q_name: str
    w_s_name: str
    w_zp_name: str | None
    w_gidx_name: str | None  # of versions that know act-order
    problem: Problem
    layout: int

    @classmethod
    def get_min_capability(cls) -> int:
        """The lowest capability of a CUDA device; -1, for there is none."""
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Whether a layer can be served by a compiled kernel, and if not, why.

        Raises:
            KernelRefusedError: ``AWQJIT_KERNEL`` names a row that does not exist or refuses the layer.
        """
        from vllm.scalar_type import scalar_types

        if c.weight_type not in (scalar_types.uint4, scalar_types.uint4b8):
            return False, f"weights are {c.weight_type}, not 4-bit integers"  # nothing to warn of: not ours
        reason = vllm_layers.refusal(c, stores_zeros=c.weight_type == scalar_types.uint4)
        if reason is not None:
            _warn_once(f"awqjit leaves an int4 layer of {c.partition_weight_shape} to vLLM: {reason}")
        return reason is None, reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the loaded weight in place of vLLM's parameters, and make its kernel ready.

        Raises:
            ArgumentError: the parameters do not lie as their attributes and the config say.
        """
        c = self.config
        g_idx_name = self.w_gidx_name if getattr(c, "has_g_idx", False) else None
        packed = pack(vllm_layers.read(c, layer, self.w_q_name, self.w_s_name, self.w_zp_name, g_idx_name))
        self.problem = vllm_layers.problem_of(c, bias=vllm_layers.adds_bias(c, layer))
        self.layout = packed.layout
        parts = {self.w_q_name: packed.weight, self.w_s_name: packed.scales, _PERM: packed.perm}
        if self.w_zp_name is not None:
            parts[self.w_zp_name] = packed.zeros  # vLLM may have made one for a symmetric layer too
        for name, part in parts.items():
            if part is not None:
                layer.register_parameter(name, nn.Parameter(part, requires_grad=False))
            elif hasattr(layer, name):
                setattr(layer, name, None)
        # One call, so that the first request does not wait for what is compiled on first use.
        x = packed.weight.new_zeros(1, self.problem.k, dtype=c.act_type)
        self.apply_weights(layer, x, x.new_zeros(self.problem.n) if self.problem.bias else None)
        row = jit.choose(self.problem).kernel.name
        _say_once(f"awqjit: int4 layers with {c.act_type} activations run as {self.problem.compute} on the row {row}")

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] to y [..., N] of the same dtype."""
        problem = self.problem
        return torch.ops.awqjit.int4_mm.default(
            x,
            getattr(layer, self.w_q_name),
            getattr(layer, self.w_s_name),
            None if problem.symmetric or self.w_zp_name is None else getattr(layer, self.w_zp_name),
            bias,
            problem.k,
            problem.n,
            problem.group_size,
            problem.act_bits,
            getattr(layer, _PERM, None),
            self.layout,
        )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


@functools.cache
def _say_once(text: str) -> None:
    _log.info(text)
