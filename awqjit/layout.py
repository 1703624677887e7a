# SPDX-License-Identifier: Apache-2.0
"""The packed form that CPU kernels read: 16 columns by 8 rows of W in each run of 64 bytes.

One 32-bit word holds 8 consecutive k of one column, even k in the low half and odd k in the high half::

    bits    31-28  27-24  23-20  19-16  15-12  11-8    7-4    3-0
    nibble    7      6      5      4      3      2      1      0
    k - 8kb   7      5      3      1      6      4      2      0

so nibble i holds k = 8 kb + [0, 2, 4, 6, 1, 3, 5, 7][i]. ``(w >> 4i) & 0x000F000F`` is then a pair (k even, k odd) for
16-bit arithmetic; ``w & 0x0F0F0F0F`` and ``(w >> 4) & 0x0F0F0F0F`` are bytes of k order [0, 4, 1, 5] and [2, 6, 3, 7].

Each group of rows is padded to a multiple of 8 rows with nibbles of 0 (a short last group to its own multiple of 8), so
no word belongs to two groups. Columns are padded to a multiple of 16 with scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from awqjit.errors import ArgumentError, FormatError
from awqjit.weight import (
    SCALE_DTYPES,
    QuantizedWeight,
    ceil_div,
    check_tensor,
    clear_padding,
    pack_nibbles,
    unpack_nibbles,
)

LAYOUT_CPU = 1
"""The number of the layout described above, as operators and serialised models carry it."""

BLOCK = 16
"""Columns of one block."""


def padded_group_rows(k: int, group_size: int) -> int:
    """Rows that a whole group takes when packed: group_size (k at most) up to a multiple of 8."""
    return 8 * ceil_div(min(k, group_size), 8)


def packed_rows(k: int, group_size: int) -> int:
    """Rows that all of W takes when packed: every group padded to a multiple of 8, the short last one to its own."""
    whole = ceil_div(k, group_size) - 1
    return whole * padded_group_rows(k, group_size) + 8 * ceil_div(k - whole * group_size, 8)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """An int4 weight as CPU kernels read it. Let B = ceil(N / 16) and G = ceil(K / group_size).

    Attributes:
        weight: int32 [B, packed_rows(K, group_size) / 8, 16], words as drawn above.
        scales: fp16, bf16 or fp32 [B, G, 16]; 0 in padding columns.
        zeros: uint8 [B, G, 16], or None when every zero point is 8.
        perm: int32 [K] for act-order, or None. Row j of the packed weight multiplies ``x[..., perm[j]]``.
        in_features: K.
        out_features: N.
        group_size: rows that share a scale, 1 to K.
        layout: the layout's number.

    Raises:
        ArgumentError: any of that does not hold.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    in_features: int
    out_features: int
    group_size: int
    layout: int = LAYOUT_CPU

    def __post_init__(self) -> None:
        if self.layout != LAYOUT_CPU:
            raise ArgumentError("layout", self.layout, f"{LAYOUT_CPU}: this version reads no other layout")
        for name in ("in_features", "out_features"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "at least 1")
        if not 1 <= self.group_size <= self.in_features:
            raise ArgumentError("group_size", self.group_size, f"1 to in_features={self.in_features}")
        blocks, groups = ceil_div(self.out_features, BLOCK), ceil_div(self.in_features, self.group_size)
        words = packed_rows(self.in_features, self.group_size) // 8
        check_tensor("weight", self.weight, (blocks, words, BLOCK), torch.int32)
        check_tensor("scales", self.scales, (blocks, groups, BLOCK), *SCALE_DTYPES)
        if self.zeros is not None:
            check_tensor("zeros", self.zeros, (blocks, groups, BLOCK), torch.uint8)
        if self.perm is not None:
            check_tensor("perm", self.perm, (self.in_features,), torch.int32)
        for name in ("weight", "scales", "zeros", "perm"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not tensor.is_contiguous():
                raise ArgumentError(name, f"strides {list(tensor.stride())}", "a contiguous tensor")
            if tensor.device != self.weight.device:
                raise ArgumentError(name, f"device {tensor.device}", f"weight's device {self.weight.device}")


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Rearrange a canonical weight for CPU kernels. No value changes; the source's tensors are not modified.

    Args:
        weight: any canonical weight, on any device; the result is on the same device.

    Returns:
        The packed weight, in memory of its own.

    Raises:
        FormatError: an act-order weight whose groups do not have group_size rows each.
    """
    k, n, g = weight.in_features, weight.out_features, weight.group_size
    perm = _act_order(weight)
    if perm is None and (g % 8 == 0 or g == k):
        words = clear_padding(weight.qweight, k)  # every group starts at a word already
    else:
        values = weight.values()
        padded = torch.zeros(packed_rows(k, g), n, dtype=torch.uint8, device=weight.device)
        padded[_packed_row(k, g, weight.device)] = values if perm is None else values[perm]
        words = pack_nibbles(padded)
    return PackedWeight(
        weight=_evens_then_odds(_to_blocks(words)),
        scales=_to_blocks(weight.scales),
        zeros=None if weight.zeros is None else _to_blocks(weight.zeros),
        perm=None if perm is None else perm.to(torch.int32),
        in_features=k,
        out_features=n,
        group_size=g,
    )


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """The canonical weight that :func:`pack` was given (a g_idx that only says k // group_size comes back as None).

    Args:
        packed: a packed weight.

    Returns:
        The canonical weight, in memory of its own; nibbles beyond row K - 1 are 0.
    """
    k, n, g = packed.in_features, packed.out_features, packed.group_size
    words = _from_blocks(_interleave(packed.weight), n)
    g_idx = None
    if packed.perm is not None or not (g % 8 == 0 or g == k):
        values = unpack_nibbles(words, packed_rows(k, g))[_packed_row(k, g, words.device)]
        if packed.perm is not None:
            perm = packed.perm.long()
            sorted_values, values = values, torch.empty_like(values)
            values[perm] = sorted_values
            g_idx = torch.empty_like(packed.perm)
            g_idx[perm] = torch.arange(k, dtype=torch.int32, device=words.device) // g
        words = pack_nibbles(values)
    return QuantizedWeight(
        qweight=words,
        scales=_from_blocks(packed.scales, n),
        zeros=None if packed.zeros is None else _from_blocks(packed.zeros, n),
        group_size=g,
        in_features=k,
        out_features=n,
        g_idx=g_idx,
    )


def _act_order(weight: QuantizedWeight) -> Tensor | None:
    """int64 [K]: the rows of W sorted by group (stable); None when they are sorted already."""
    if weight.g_idx is None or weight.in_group_order():
        return None
    k, g = weight.in_features, weight.group_size
    in_order = torch.arange(k, device=weight.device) // g
    if not torch.equal(torch.sort(weight.g_idx.long()).values, in_order):
        sizes = sorted(set(torch.bincount(weight.g_idx, minlength=weight.groups).tolist()))
        raise FormatError(
            f"g_idx puts {' or '.join(map(str, sizes))} rows into a group, where group_size is {g} and in_features {k}",
            "Quantize the model again with groups of equal size.",
        )
    return torch.argsort(weight.g_idx, stable=True)


def _packed_row(k: int, g: int, device: torch.device) -> Tensor:
    """int64 [K]: the packed row of each row of W in group order."""
    rows = torch.arange(k, device=device)
    return rows // g * padded_group_rows(k, g) + rows % g


def _to_blocks(rows: Tensor) -> Tensor:
    """[R, N] to a fresh, contiguous [ceil(N / 16), R, 16], padded with 0."""
    r, n = rows.shape
    blocks = ceil_div(n, BLOCK)
    source = F.pad(rows, (0, blocks * BLOCK - n)) if n % BLOCK else rows
    return source.reshape(r, blocks, BLOCK).permute(1, 0, 2).clone(memory_format=torch.contiguous_format)


def _from_blocks(blocked: Tensor, n: int) -> Tensor:
    """[B, R, 16] to a fresh, contiguous [R, n]."""
    rows = blocked.permute(1, 0, 2).reshape(blocked.shape[1], -1)
    return rows[:, :n].clone(memory_format=torch.contiguous_format)


def _swap(words: Tensor, mask: int, shift: int) -> None:
    """In each word, swap the bits under ``mask`` with those ``shift`` to their left, in place."""
    # The sign that >> drags in lies outside every mask used here, and mask << shift leaves the sign bit alone.
    moved = words >> shift
    moved ^= words
    moved &= mask
    words ^= moved
    moved <<= shift
    words ^= moved


def _evens_then_odds(words: Tensor) -> Tensor:
    """Nibbles 0 1 2 3 4 5 6 7 of each word to 0 2 4 6 1 3 5 7, in place."""
    _swap(words, 0x00F000F0, 4)  # 0 2 1 3  4 6 5 7
    _swap(words, 0x0000FF00, 8)  # 0 2 4 6  1 3 5 7
    return words


def _interleave(words: Tensor) -> Tensor:
    """The inverse of :func:`_evens_then_odds`, in new memory."""
    words = words.clone()
    _swap(words, 0x0000FF00, 8)
    _swap(words, 0x00F000F0, 4)
    return words
