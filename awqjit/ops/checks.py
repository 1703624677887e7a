# SPDX-License-Identifier: Apache-2.0
"""What operators check before a pointer is taken: every dimension, dtype and device, each with its own message."""

from __future__ import annotations

import torch
from torch import Tensor

from awqjit import jit
from awqjit.errors import ArgumentError
from awqjit.layout import PackedWeight
from awqjit.spec import Problem


def none_if_empty(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or tensor.numel() == 0 else tensor


def refuse_none(**tensors: Tensor | None) -> None:
    """torch lets None through to an operator where the schema says Tensor."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise ArgumentError(name, None, "a tensor")


def resolve(group_size: int, in_features: int) -> int:
    return in_features if group_size == -1 else group_size


def packed_weight(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    layout: int,
) -> PackedWeight:
    """The packed weight, checked in every dimension, dtype and device."""
    refuse_none(weight=weight, scales=scales)
    group_size = resolve(group_size, in_features)
    zeros, perm = none_if_empty(zeros), none_if_empty(perm)
    return PackedWeight(weight, scales, zeros, perm, in_features, out_features, group_size, layout)


def check_perm_values(perm: Tensor | None) -> None:
    """Check that ``perm`` holds each of 0 to K - 1 once. Takes about as long as a sort: not for every call."""
    if perm is None:
        return
    k = perm.numel()
    if not torch.equal(perm.sort().values, torch.arange(k, dtype=perm.dtype, device=perm.device)):
        what = f"values {int(perm.min())} to {int(perm.max())}, {perm.unique().numel()} of them distinct"
        raise ArgumentError("perm", what, f"each of 0 to {k - 1} once")


def check_x(name: str, x: Tensor, features: int, features_name: str, weight: Tensor) -> None:
    refuse_none(**{name: x})
    if x.dtype not in jit.DTYPE_NAMES:
        raise ArgumentError(name, x.dtype, "dtype " + " or ".join(map(str, jit.DTYPE_NAMES)))
    if x.dim() < 1 or x.shape[-1] != features:
        raise ArgumentError(name, f"shape {list(x.shape)}", f"[..., {features}] ({features_name})")
    if x.device != weight.device:
        raise ArgumentError(name, f"device {x.device}", f"weight's device {weight.device}")


def check_bias(bias: Tensor | None, out_features: int, weight: Tensor) -> None:
    if bias is None:
        return
    if bias.dtype not in jit.DTYPE_NAMES:
        raise ArgumentError("bias", bias.dtype, "dtype " + " or ".join(map(str, jit.DTYPE_NAMES)))
    if tuple(bias.shape) != (out_features,):
        raise ArgumentError("bias", f"shape {list(bias.shape)}", f"shape [{out_features}] (out_features)")
    if bias.device != weight.device:
        raise ArgumentError("bias", f"device {bias.device}", f"weight's device {weight.device}")


def check_int4_mm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    act_bits: int,
    perm: Tensor | None,
    layout: int,
) -> Problem:
    packed = packed_weight(weight, scales, zeros, perm, in_features, out_features, group_size, layout)
    if act_bits not in (16, 8):
        raise ArgumentError("act_bits", act_bits, "16 (w4a16) or 8 (w4a8)")
    check_x("x", x, in_features, "in_features", weight)
    check_bias(bias, out_features, weight)
    return Problem(
        k=in_features,
        n=out_features,
        group_size=packed.group_size,
        x_dtype=jit.DTYPE_NAMES[x.dtype],
        scale_dtype=jit.DTYPE_NAMES[scales.dtype],
        symmetric=packed.zeros is None,
        bias=bias is not None,
        act_bits=act_bits,
    )
