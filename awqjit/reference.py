# SPDX-License-Identifier: Apache-2.0
"""Both compute modes in plain torch: the definition that every kernel is held to, and the last row of the selection.

It runs on any device, never holds more than a slice of the weight in float, and is not fast.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from awqjit.errors import ArgumentError
from awqjit.weight import SCALE_DTYPES, SYMMETRIC_ZERO, QuantizedWeight, check_tensor

TINY = 2.0**-119
"""w4a8: a group of x whose largest magnitude is below this counts as zero (amax / 127 stays a normal fp32 number)."""

_SLICE = 1024
"""Rows of W taken at a time. 127 * 15 * 1024 is below 2**24: an integer dot product over a slice is exact in fp32."""


def int4_mm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, act_bits: int = 16) -> Tensor:
    """``y = x W + bias`` with ``W[k, n] = (q[k, n] - z[g(k), n]) * s[g(k), n]``.

    ``act_bits=16`` (w4a16): for each group in order, the dot products of x and q - z, both exact, accumulated in at
    least fp32 and rounded to fp32; times s in fp32; added to y in fp32.

    ``act_bits=8`` (w4a8): x is rounded to int8 per row and group. With amax = max |x| over the row's group, and each
    line one correctly rounded fp32 operation::

        inv = 127 / amax        d = amax / 127
        xq  = int8(round_half_even(x * inv))
        t   = fp32(sum of xq * (q - z))             an exact integer before it is rounded to fp32
        y   = y + t * (d * s)                       groups in order

    A group with amax < 2**-119 adds nothing; a NaN or infinity in a row makes the whole row of y NaN. Compiled kernels
    fuse the last line's multiply and add; here t * (d * s) is rounded first, so that a result may differ from theirs
    by one fp32 rounding per group.

    In both modes the bias is added last, in fp32, and y is rounded once to the dtype of x.

    Args:
        x: fp16, bf16 or fp32 [..., K], any strides, on the weight's device.
        weight: the canonical weight [K, N].
        bias: fp16, bf16 or fp32 [N], or None.
        act_bits: 16 or 8.

    Returns:
        [..., N] of x's dtype, contiguous.

    Raises:
        ArgumentError: x, bias or act_bits is not as above.
    """
    k, n = weight.in_features, weight.out_features
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise ArgumentError("x", getattr(x, "shape", type(x).__name__), "a tensor of at least one dimension")
    check_tensor("x", x, (*x.shape[:-1], k), *SCALE_DTYPES)
    if bias is not None:
        check_tensor("bias", bias, (n,), *SCALE_DTYPES)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.device != weight.device:
            raise ArgumentError(name, f"device {tensor.device}", f"the weight's device {weight.device}")
    if act_bits not in (16, 8):
        raise ArgumentError("act_bits", act_bits, "16 or 8")
    rows = x.reshape(-1, k)
    y = _w4a16(rows, weight) if act_bits == 16 else _w4a8(rows, weight)
    if bias is not None:
        y += bias.to(torch.float32)
    return y.to(x.dtype).reshape(*x.shape[:-1], n)


def _w4a16(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """fp32 [M, N] of x [M, K], without bias."""
    # torch can be told to round fp32 operands of a matmul to bf16. bf16 operands lose nothing by that; the others are
    # multiplied in fp64, which no setting touches. Other devices may lack fp64 and do not round unless asked to.
    wide = x.device.type == "cpu" and x.dtype != torch.bfloat16
    exact = torch.float64 if wide else torch.float32
    y = torch.zeros(x.shape[0], weight.out_features, dtype=torch.float32, device=x.device)
    for group, slices in _groups(weight):
        dot = torch.zeros(y.shape, dtype=exact, device=x.device)
        for rows in slices:
            dot += x[:, rows].to(exact) @ _centred(weight, group, rows).to(exact)
        y += dot.to(torch.float32) * weight.scales[group].to(torch.float32)
    return y


def _w4a8(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """fp32 [M, N] of x [M, K], without bias."""
    y = torch.zeros(x.shape[0], weight.out_features, dtype=torch.float32, device=x.device)
    lost = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    for group, slices in _groups(weight):
        taken = [x[:, rows].to(torch.float32) for rows in slices]
        # amax keeps a NaN, as a maximum of the magnitudes' bits would.
        amax = torch.stack([part.abs().amax(dim=1, keepdim=True) for part in taken]).amax(dim=0)
        finite = torch.isfinite(amax)
        lost |= ~finite[:, 0]
        used = finite & (amax >= TINY)
        amax = amax.where(used, 127.0)
        # Tensor by tensor: a division with a Python number may be done as a product with a reciprocal.
        full = torch.full_like(amax, 127.0)
        inv, d = full / amax, (amax / full).where(used, 0.0)
        dot = torch.zeros(y.shape, dtype=torch.int64, device=x.device)
        for rows, part in zip(slices, taken, strict=True):
            xq = torch.round(part.where(used, 0.0) * inv)
            dot += (xq @ _centred(weight, group, rows).to(torch.float32)).long()
        y += dot.to(torch.float32) * (d * weight.scales[group].to(torch.float32))
    y[lost] = torch.nan
    return y


def _groups(weight: QuantizedWeight) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Each group with the rows of W in it, int64, in slices."""
    if weight.g_idx is None:
        order = torch.arange(weight.in_features, device=weight.device)
        sizes = [weight.group_size] * (weight.groups - 1)
        sizes.append(weight.in_features - sum(sizes))
    else:
        order = torch.argsort(weight.g_idx, stable=True)
        sizes = torch.bincount(weight.g_idx, minlength=weight.groups).tolist()
    for group, rows in enumerate(order.split(sizes)):
        if len(rows):
            yield group, rows.split(_SLICE)


def _centred(weight: QuantizedWeight, group: int, rows: Tensor) -> Tensor:
    """int32 [rows, N]: q - z of rows of one group."""
    q = (weight.qweight[rows // 8] >> (4 * (rows % 8)).to(torch.int32)[:, None]) & 15
    return q - (SYMMETRIC_ZERO if weight.zeros is None else weight.zeros[group].to(torch.int32))
