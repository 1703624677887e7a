# SPDX-License-Identifier: Apache-2.0
"""``pack``, ``pack_awq`` and ``unpack``: canonical weights, AWQ tensors and packed weights as operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from awqjit import jit
from awqjit import layout as layouts
from awqjit.errors import ArgumentError
from awqjit.formats.awq import awq_to_standard
from awqjit.layout import LAYOUT_CPU
from awqjit.ops.checks import check_perm_values, none_if_empty, packed_weight, refuse_none, resolve
from awqjit.weight import QuantizedWeight, ceil_div
from awqjit.xpu import device as xpu_device


def _or_empty(tensor: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(0, dtype=dtype) if tensor is None else tensor


def _on_one_device(qweight: Tensor, scales: Tensor, **optional: Tensor | None) -> None:
    refuse_none(qweight=qweight, scales=scales)
    for name, tensor in {"scales": scales, **optional}.items():
        if tensor is not None and tensor.device != qweight.device:
            raise ArgumentError(name, f"device {tensor.device}", f"qweight's device {qweight.device}")


def _meta(tensor: Tensor | None) -> Any:
    """The tensor without its data: that arguments fit together has to be found out before there is data too."""
    return None if tensor is None else tensor.to("meta")


def _canonical(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, group_size: int, in_features: int
) -> QuantizedWeight:
    refuse_none(qweight=qweight, scales=scales)
    if scales.dim() != 2:
        raise ArgumentError("scales", f"shape {list(scales.shape)}", "shape [groups, out_features]")
    return QuantizedWeight(
        qweight, scales, zeros, resolve(group_size, in_features), in_features, scales.shape[1], g_idx
    )


def _prepared(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight, once its device's kernels have shown that they compute right."""
    if weight.device.type != "cpu":
        jit.prepare(xpu_device.name_of(weight.device))
    return weight


def pack(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, group_size: int, in_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = _canonical(qweight, scales, none_if_empty(zeros), none_if_empty(g_idx), group_size, in_features)
    packed = layouts.pack(_prepared(weight))
    return (
        packed.weight,
        packed.scales,
        _or_empty(packed.zeros, qweight, torch.uint8),
        _or_empty(packed.perm, qweight, torch.int32),
    )


def pack_fake(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, group_size: int, in_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    zeros, g_idx = none_if_empty(zeros), none_if_empty(g_idx)
    _on_one_device(qweight, scales=scales, zeros=zeros, g_idx=g_idx)
    _canonical(_meta(qweight), _meta(scales), _meta(zeros), _meta(g_idx), group_size, in_features)
    group_size = resolve(group_size, in_features)
    words, rows = layouts.packed_shapes(layouts.layout_for(qweight.device), in_features, scales.shape[1], group_size)
    # Whether g_idx is in order is in its data: the shape of perm is known only when it is absent.
    perm = 0 if g_idx is None else torch.library.get_ctx().new_dynamic_size()
    return (
        qweight.new_empty(words),
        scales.new_empty(rows),
        qweight.new_empty(0 if zeros is None else rows, dtype=torch.uint8),
        qweight.new_empty(perm, dtype=torch.int32),
    )


def _has_elements(qweight: Tensor) -> None:
    refuse_none(qweight=qweight)
    if qweight.numel() == 0:
        raise ArgumentError("qweight", f"shape {list(qweight.shape)}", "[K, N / 8] with K and N of at least 1")


def pack_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor | None, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    _has_elements(qweight)
    refuse_none(scales=scales)
    packed = layouts.pack(_prepared(awq_to_standard(qweight, scales, none_if_empty(qzeros), group_size)))
    return packed.weight, packed.scales, _or_empty(packed.zeros, qweight, torch.uint8)


def pack_awq_fake(
    qweight: Tensor, scales: Tensor, qzeros: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    qzeros = none_if_empty(qzeros)
    _has_elements(qweight)
    _on_one_device(qweight, scales=scales, qzeros=qzeros)
    awq_to_standard(_meta(qweight), _meta(scales), _meta(qzeros), group_size)
    in_features = qweight.shape[0]
    group_size = resolve(group_size, in_features)
    words, rows = layouts.packed_shapes(layouts.layout_for(qweight.device), in_features, scales.shape[1], group_size)
    return (
        qweight.new_empty(words),
        scales.new_empty(rows),
        qweight.new_empty(0 if qzeros is None else rows, dtype=torch.uint8),
    )


def unpack(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    layout: int = LAYOUT_CPU,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packed = packed_weight(weight, scales, zeros, perm, in_features, out_features, group_size, layout)
    check_perm_values(packed.perm)
    canonical = layouts.unpack(packed)
    return (
        canonical.qweight,
        canonical.scales,
        _or_empty(canonical.zeros, weight, torch.uint8),
        _or_empty(canonical.g_idx, weight, torch.int32),
    )


def unpack_fake(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    layout: int = LAYOUT_CPU,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packed_weight(weight, scales, zeros, perm, in_features, out_features, group_size, layout)
    groups = ceil_div(in_features, resolve(group_size, in_features))
    return (
        weight.new_empty(ceil_div(in_features, 8), out_features),
        scales.new_empty(groups, out_features),
        weight.new_empty(0 if none_if_empty(zeros) is None else (groups, out_features), dtype=torch.uint8),
        weight.new_empty(0 if none_if_empty(perm) is None else in_features, dtype=torch.int32),
    )
