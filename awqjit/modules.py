# SPDX-License-Identifier: Apache-2.0
"""`Int4Linear`: a drop-in for ``nn.Linear`` that holds a packed int4 weight and speaks the checkpoint's own form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from awqjit import (
    jit,
    ops,  # noqa: F401  (registers torch.ops.awqjit)
)
from awqjit.errors import ArgumentError, FormatError
from awqjit.formats import FormatConfig, LayerFormat
from awqjit.jit import DTYPE_NAMES
from awqjit.layout import LAYOUT_CPU, PackedWeight, layout_for, pack, unpack
from awqjit.spec import COMPUTE, Problem, act_bits_of
from awqjit.weight import QuantizedWeight, check_tensor
from awqjit.xpu import device as xpu_device

AWQ_GEMM = FormatConfig(method="awq", bits=4, group_size=-1, zero_point=True, version="gemm")
"""The form in which a layer made from a bare QuantizedWeight speaks."""

_PACKED = ("packed_weight", "packed_scales", "packed_zeros", "packed_perm")


def to_checkpoint(weight: QuantizedWeight, format: LayerFormat) -> dict[str, Tensor]:
    """A canonical weight as the tensors that a checkpoint of ``format`` holds for one layer, by their last names.

    Raises:
        FormatError: the format cannot express the weight.
    """
    return format.write(weight)


def from_checkpoint(
    tensors: dict[str, Tensor], format: LayerFormat, group_size: int, *, act_order: bool = False
) -> QuantizedWeight:
    """The canonical weight of one layer's checkpoint tensors, by their last names.

    Raises:
        ArgumentError, FormatError: the tensors do not fit together, are in a form that is not read, or hold scales
            that are NaN or infinite.
    """
    weight = dataclasses.replace(format.one(), group_size=group_size).read(tensors)
    if not act_order and not weight.in_group_order():
        raise FormatError(
            "the rows are in act-order (desc_act, a g_idx other than k // group_size), which is not supported",
            "Use a checkpoint made with desc_act=false.",
        )
    return weight


class Int4Linear(nn.Module):
    """``y = x W + bias`` with an int4 weight. Make one with :meth:`from_quantized`.

    The packed tensors are buffers that are not saved: ``state_dict`` holds what the layer's checkpoint holds (qweight,
    qzeros, scales and the like, bit for bit), so that a saved model does not depend on this machine. Moving the module
    moves its tensors; changing its dtype (``.half()``) leaves them alone, for y always has the dtype of x.

    Attributes:
        in_features: K.
        out_features: N.
        group_size: rows of W that share a scale.
        act_bits: 16 (w4a16) or 8 (w4a8).
        format: the form in which ``state_dict`` speaks.
        bias: Parameter [N], or None.
    """

    packed_weight: Tensor
    packed_scales: Tensor
    packed_zeros: Tensor | None
    packed_perm: Tensor | None

    def __init__(
        self,
        packed: PackedWeight,
        bias: Tensor | None = None,
        *,
        compute: str = "w4a16",
        format: LayerFormat = AWQ_GEMM,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.group_size = packed.group_size
        self.act_bits = act_bits_of(compute)
        self.format = format
        if bias is not None:
            check_tensor("bias", bias, (self.out_features,), *DTYPE_NAMES)
            bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)
        self._set(packed)

    @classmethod
    def from_quantized(
        cls,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        compute: str = "w4a16",
        format: LayerFormat = AWQ_GEMM,
    ) -> Int4Linear:
        """Pack a canonical weight into a layer.

        Args:
            weight: the weight; zero points that are 8 everywhere are not stored.
            bias: fp16, bf16 or fp32 [N], or None.
            compute: "w4a16" (exact weights times x) or "w4a8" (x rounded to int8 per row and group; faster).
            format: the form in which ``state_dict`` is to speak.

        Raises:
            ArgumentError: ``compute`` or ``bias`` is not as above.
        """
        return cls(pack(weight.symmetric_if_possible()), bias, compute=compute, format=format)

    def _set(self, packed: PackedWeight) -> None:
        self.layout = packed.layout
        values = (packed.weight, packed.scales, packed.zeros, packed.perm)
        for name, tensor in zip(_PACKED, values, strict=True):
            self.register_buffer(name, tensor, persistent=False)

    @property
    def compute(self) -> str:
        """ "w4a16" or "w4a8"."""
        return next(name for name, bits in COMPUTE.items() if bits == self.act_bits)

    @property
    def qweight(self) -> Tensor:
        """The packed weight, by the name under which PEFT and others look for a quantized layer's device."""
        return self.packed_weight

    def packed(self) -> PackedWeight:
        """The layer's packed weight; shares memory with it."""
        return PackedWeight(
            self.packed_weight,
            self.packed_scales,
            self.packed_zeros,
            self.packed_perm,
            self.in_features,
            self.out_features,
            self.group_size,
            self.layout,
        )

    def quantized(self) -> QuantizedWeight:
        """The canonical weight, in memory of its own."""
        return unpack(self.packed())

    def problem(self, dtype: torch.dtype) -> Problem:
        """What a kernel is compiled for when x has ``dtype``.

        Raises:
            ArgumentError: ``dtype`` is not bf16, fp16 or fp32.
        """
        if dtype not in DTYPE_NAMES:
            raise ArgumentError("dtype", dtype, " or ".join(map(str, DTYPE_NAMES)))
        return Problem(
            k=self.in_features,
            n=self.out_features,
            group_size=self.group_size,
            x_dtype=DTYPE_NAMES[dtype],
            scale_dtype=DTYPE_NAMES[self.packed_scales.dtype],
            symmetric=self.packed_zeros is None,
            bias=self.bias is not None,
            act_bits=self.act_bits,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] of fp16, bf16 or fp32 to y [..., N] of the same dtype."""
        packed = self._buffers  # nn.Module's attribute lookup costs more than the call of a small kernel
        bias = self._parameters["bias"]
        # `is True`: torch.fx traces with a stand-in for x, whose attributes have no truth value. It gets inference.
        trains = torch.is_grad_enabled() and (x.requires_grad is True or (bias is not None and bias.requires_grad))
        op = torch.ops.awqjit.int4_linear.default if trains else torch.ops.awqjit.int4_mm.default
        return op(
            x,
            packed["packed_weight"],
            packed["packed_scales"],
            packed["packed_zeros"],
            bias,
            self.in_features,
            self.out_features,
            self.group_size,
            self.act_bits,
            packed["packed_perm"],
            self.layout,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}, "
            f"bias={self.bias is not None}, compute={self.compute}, format={self.format.method}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4Linear:
        def keep_dtype(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)

        before = self.packed()
        self._repack(fn(before.weight.new_empty(0)).device)
        try:
            super()._apply(keep_dtype, recurse)
        except BaseException:
            self._set(before)
            raise
        return self

    def _repack(self, device: torch.device) -> None:
        """Bring the weight, where it is now, into the layout that kernels for ``device`` read."""
        layout = layout_for(device)
        if layout == self.layout or device.type == "meta" or self.packed_weight.device.type == "meta":
            return
        if device.type != "cpu":
            jit.prepare(xpu_device.name_of(device))
        self._set(pack(self.quantized(), layout))

    @property
    def computes_on(self) -> str:
        """The device that computes the layer, "cpu" or for example "xpu:0"."""
        return "cpu" if self.layout == LAYOUT_CPU else xpu_device.name_of(self.packed_weight.device)

    def _written_form(self) -> str:
        return f"{self.format.method} ({self.format.version}) with group_size {self.group_size}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["awqjit"] = self._written_form()
        for name, tensor in to_checkpoint(self.quantized(), self.format).items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = self.format.saved_names
        tensors = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in names}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # The tensors of two versions, or of two group sizes, may have the same names and shapes.
        written = local_metadata.get("awqjit", self._written_form())
        if written != self._written_form():
            error_msgs.append(f"{prefix.removesuffix('.')}: the state is of {written}, wanted {self._written_form()}")
            return
        wanted = self.format.shapes(self.in_features, self.out_features)
        absent = [name for name, shapes in wanted.items() if shapes.required and name not in tensors]
        if absent:
            missing_keys.extend(prefix + name for name in absent)
            return
        device = self.packed_weight.device
        if device.type != "meta":  # a layer without memory takes the checkpoint's device, any other one keeps its own
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        try:
            format = dataclasses.replace(self.format.one(), group_size=self.group_size)
            weight = format.read(tensors, self.in_features, self.out_features)
            self._set(pack(weight.symmetric_if_possible()))
        except ValueError as error:  # ArgumentError and FormatError
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}")
