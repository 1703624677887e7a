# SPDX-License-Identifier: Apache-2.0
"""What the vLLM plugin asks of one layer: whether it can be served, which problem it is, what its parameters hold.

``c`` is vLLM's ``MPLinearLayerConfig`` throughout. Of the layer's shapes those of this worker's share are meant.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from awqjit import cache, config, jit, machine, select, toolchain
from awqjit.errors import ArgumentError, AwqJitError, NoCompilerError
from awqjit.formats.columns import unpack_columns
from awqjit.render import render
from awqjit.spec import MAX_W4A8_GROUP, Problem
from awqjit.weight import QuantizedWeight, resolve_group_size

_STANDARD = tuple(range(8))  # vLLM hands over words whose lowest nibble is the first of eight


def refusal(c: Any, stores_zeros: bool) -> str | None:
    """Why a layer with 4-bit weights cannot be served, or None.

    Args:
        c: vLLM's ``MPLinearLayerConfig``.
        stores_zeros: its weights are of the type whose zero points are stored, and not 8 everywhere.

    Raises:
        KernelRefusedError: ``AWQJIT_KERNEL`` names a row that does not exist or refuses the layer.
    """
    k, _ = c.partition_weight_shape
    if stores_zeros != c.zero_points:
        return "unsigned weights without zero points do not say what their zero is"
    if c.act_type not in jit.DTYPE_NAMES:
        return f"activations are {c.act_type}, not {' or '.join(map(str, jit.DTYPE_NAMES))}"
    if getattr(c, "out_type", None) not in (None, c.act_type):
        return f"the output is to be {c.out_type}, the activations are {c.act_type}"
    if k % 8:
        return f"the input size {k} is not a multiple of 8: vLLM stores 8 rows in a word"
    if c.group_size != -1 and (c.group_size < 1 or k % c.group_size):
        return f"the input size {k} is not a multiple of the group size {c.group_size}"
    if getattr(c, "has_g_idx", False) and k != c.full_weight_shape[0]:
        return "its rows are in act-order and split between workers, so that a worker's groups are not of equal size"
    return _no_kernel(problem_of(c))


def _no_kernel(problem: Problem) -> str | None:
    """Why no compiled kernel can be had, or None. A row that was forced is what is asked for, compiled or not."""
    forced = config.KERNEL.read()
    row = select.choose(problem, machine.detect(), _device(), forced)
    if forced is not None:
        return None
    if row.target is None:
        verdicts = select.explain(problem, machine.detect(), _device())
        return "; ".join(f"{verdict.row.name}: {verdict.reason}" for verdict in verdicts if verdict.reason)
    try:
        if config.JIT.read():
            toolchain.find_compiler()
            return None
        reason = f"{config.JIT.name}=0 forbids compiling, and no cache has its kernel"
    except NoCompilerError as error:
        reason = str(error)
    for bias in (False, True):  # vLLM has not said yet whether there is one; a kernel that is there needs no compiler
        spec = row.spec(dataclasses.replace(problem, bias=bias))
        assert spec is not None
        with suppress(AwqJitError):
            cache.fetch(cache.Request(spec.slug, render(spec), spec.target.flags))
            return None
    return reason


def _device() -> str:
    from vllm.platforms import current_platform

    device: str = current_platform.device_type
    return device


def problem_of(c: Any, bias: bool = False) -> Problem:
    """A layer's problem as the environment is now. vLLM loads scales as the activations' dtype."""
    k, n = c.partition_weight_shape
    group_size, dtype = resolve_group_size(c.group_size, k), jit.DTYPE_NAMES[c.act_type]
    return Problem(
        k=k,
        n=n,
        group_size=group_size,
        x_dtype=dtype,
        scale_dtype=dtype,
        symmetric=not c.zero_points,
        bias=bias,
        act_bits=8 if _wants_w4a8() and c.act_type == torch.bfloat16 and group_size <= MAX_W4A8_GROUP else 16,
    )


def _wants_w4a8() -> bool:
    """``VLLM_CPU_INT4_W4A8``, which vLLM sets by default and applies to bf16 only; False where vLLM lacks it."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_CPU_INT4_W4A8", False))


def adds_bias(c: Any, layer: nn.Module) -> bool:
    """Whether vLLM will pass a bias: the kernel for the other case would be compiled at the first call."""
    split = c.partition_weight_shape[0] != c.full_weight_shape[0]  # by rows: the first worker adds the bias
    passes = not getattr(layer, "skip_bias_add", False) and not (split and getattr(layer, "tp_rank", 0) > 0)
    return passes and getattr(layer, "bias", None) is not None


def read(
    c: Any, layer: nn.Module, q_name: str, scales_name: str, zeros_name: str | None, g_idx_name: str | None = None
) -> QuantizedWeight:
    """The loaded weight in canonical form; shares memory with vLLM's parameters where it can.

    Raises:
        ArgumentError: the parameters do not lie as their attributes and the config say.
    """
    k, n = c.partition_weight_shape
    # Some of vLLM's loaders fill up the last word of columns: what is beyond N is left out.
    zeros = None
    if c.zero_points:
        assert zeros_name is not None  # vLLM's base class checks it
        zeros = unpack_columns(_rows(layer, zeros_name, packed="output_dim"), _STANDARD)[:, :n]
    return QuantizedWeight(
        qweight=_rows(layer, q_name, packed="input_dim")[:, :n],
        scales=_rows(layer, scales_name)[:, :n],
        zeros=zeros,
        group_size=resolve_group_size(c.group_size, k),
        in_features=k,
        out_features=n,
        g_idx=None if g_idx_name is None else getattr(layer, g_idx_name).data.to(torch.int32),
    )


def _rows(layer: nn.Module, name: str, packed: str | None = None) -> Tensor:
    """A parameter with the input's dimension first, as its attributes tell: shapes do not, for K may be N.

    Args:
        layer: the layer.
        name: the parameter's name.
        packed: the dimension, by the attribute that tells it, along which 8 values have to be in a word.

    Returns:
        A view of it, [input, output].
    """
    parameter = getattr(layer, name)
    output = getattr(parameter, "output_dim", None)
    if output not in (0, 1) or parameter.dim() != 2:
        raise ArgumentError(name, f"output_dim {output} and {parameter.dim()} dimensions", "0 or 1 of two dimensions")
    # Scales that every worker holds whole have no input_dim.
    if getattr(parameter, "input_dim", None) not in (None, 1 - output):
        raise ArgumentError(name, f"input_dim {parameter.input_dim} beside output_dim {output}", "the other one")
    wanted = {"input_dim": 1 - output, "output_dim": output, None: None}[packed]
    if packed and getattr(parameter, "packed_dim", None) != wanted:
        raise ArgumentError(name, f"packed_dim {getattr(parameter, 'packed_dim', None)}", f"{wanted}, its {packed}")
    tensor: Tensor = parameter.data
    return tensor if output == 1 else tensor.t()
