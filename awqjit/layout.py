# SPDX-License-Identifier: Apache-2.0
"""Packed weights, and the form of them that CPU kernels read: 16 columns by 8 rows of W in each run of 64 bytes.

Layout 1 is described here, layout 2, which GPU kernels read, in :mod:`awqjit.fragments`.

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

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from awqjit import fragments, pages
from awqjit.errors import ArgumentError, FormatError
from awqjit.weight import (
    SCALE_DTYPES,
    QuantizedWeight,
    ceil_div,
    check_tensor,
    pack_nibbles,
    unpack_nibbles,
)

LAYOUT_CPU = 1
"""The number of the layout described above, as operators and serialised models carry it."""

LAYOUT_GPU = 2
"""The number of the layout of :mod:`awqjit.fragments`."""

BLOCK = 16
"""Columns of one block."""

NIBBLE_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The row, counted from the word's first, that each nibble of a packed word holds."""

# A weight is packed a piece at a time: the temporaries stay in a core's cache and cost no memory to speak of, and torch
# does not split so small an operation over threads, so that several layers can be packed at once.
_CHUNK = 32_767
_BLOCKS = 32  # of columns in a piece


def padded_group_rows(k: int, group_size: int) -> int:
    """Rows that a whole group takes when packed: group_size (k at most) up to a multiple of 8."""
    return 8 * ceil_div(min(k, group_size), 8)


def packed_rows(k: int, group_size: int) -> int:
    """Rows that all of W takes when packed: every group padded to a multiple of 8, the short last one to its own."""
    whole = ceil_div(k, group_size) - 1
    return whole * padded_group_rows(k, group_size) + 8 * ceil_div(k - whole * group_size, 8)


def layout_for(device: torch.device) -> int:
    """The number of the layout that kernels for a device read."""
    return LAYOUT_CPU if device.type in ("cpu", "meta") else LAYOUT_GPU


def packed_shapes(layout: int, k: int, n: int, group_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the packed weight and of its scales."""
    blocks, groups = ceil_div(n, BLOCK), ceil_div(k, group_size)
    if layout == LAYOUT_CPU:
        return (blocks, packed_rows(k, group_size) // 8, BLOCK), (blocks, groups, BLOCK)
    return fragments.shape(k, n), (groups, fragments.padded(n))


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """An int4 weight as kernels read it. Let B = ceil(N / 16) and G = ceil(K / group_size).

    Attributes:
        weight: int32 [B, packed_rows(K, group_size) / 8, 16], words as drawn above; in layout 2 int32
            [B, ceil(K / 32), 16, 4].
        scales: fp16, bf16 or fp32 [B, G, 16], in layout 2 [G, 16 B]; 0 in padding columns.
        zeros: uint8 of the scales' shape, or None when every zero point is 8.
        perm: int32 [K] for act-order, or None. Row j of the packed weight multiplies ``x[..., perm[j]]``.
        in_features: K.
        out_features: N.
        group_size: rows that share a scale, 1 to K.
        layout: the layout's number: 1 or 2.

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
        if self.layout not in (LAYOUT_CPU, LAYOUT_GPU):
            wanted = f"{LAYOUT_CPU} or {LAYOUT_GPU}: this version reads no other layout"
            raise ArgumentError("layout", self.layout, wanted)
        for name in ("in_features", "out_features"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "at least 1")
        if not 1 <= self.group_size <= self.in_features:
            raise ArgumentError("group_size", self.group_size, f"1 to in_features={self.in_features}")
        words, scales = packed_shapes(self.layout, self.in_features, self.out_features, self.group_size)
        check_tensor("weight", self.weight, words, torch.int32)
        check_tensor("scales", self.scales, scales, *SCALE_DTYPES)
        if self.zeros is not None:
            check_tensor("zeros", self.zeros, scales, torch.uint8)
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

    def columns(self, first: int, last: int) -> PackedWeight:
        """Columns 16 first to 16 last - 1 of W (fewer at the end), as a packed weight; shares memory where it can."""
        blocks, some = slice(first, last), slice(BLOCK * first, BLOCK * last)

        def cut(rows: Tensor) -> Tensor:
            return rows[blocks] if self.layout == LAYOUT_CPU else rows[:, some].contiguous()

        return PackedWeight(
            weight=self.weight[blocks],
            scales=cut(self.scales),
            zeros=None if self.zeros is None else cut(self.zeros),
            perm=self.perm,
            in_features=self.in_features,
            out_features=min(BLOCK * last, self.out_features) - BLOCK * first,
            group_size=self.group_size,
            layout=self.layout,
        )


def pack(weight: QuantizedWeight, layout: int | None = None) -> PackedWeight:
    """Rearrange a canonical weight for kernels. No value changes; the source's tensors are not modified.

    Args:
        weight: any canonical weight, on any device; the result is on the same device.
        layout: the layout's number; None takes the one that kernels for the weight's device read.

    Returns:
        The packed weight, in memory of its own.

    Raises:
        FormatError: an act-order weight whose groups do not have group_size rows each.
    """
    k, n, g = weight.in_features, weight.out_features, weight.group_size
    perm = act_order(weight)
    layout = layout_for(weight.device) if layout is None else layout
    if layout == LAYOUT_CPU:
        pad, words = _blocks_of, pages.empty(packed_shapes(layout, k, n, g)[0], torch.int32, weight.device)
        rows = source_rows(k, g, perm, weight.device)
        if rows is None:
            _to_blocks(weight.qweight, words, _evens_then_odds)
        else:
            _gather_rows(weight.qweight, rows.view(-1, 8)[:, NIBBLE_ROWS].flatten(), words)
    else:
        pad, words = fragments.pad_columns, weight.qweight
        words = fragments.from_words(words if perm is None else pack_nibbles(weight.values()[perm]), k)
    return PackedWeight(
        weight=words,
        scales=pad(weight.scales),
        zeros=None if weight.zeros is None else pad(weight.zeros),
        perm=None if perm is None else perm.to(torch.int32),
        in_features=k,
        out_features=n,
        group_size=g,
        layout=layout,
    )


def unpack(packed: PackedWeight) -> QuantizedWeight:
    """The canonical weight that :func:`pack` was given (a g_idx that only says k // group_size comes back as None).

    Args:
        packed: a packed weight.

    Returns:
        The canonical weight, in memory of its own; nibbles beyond row K - 1 are 0.
    """
    k, n, g = packed.in_features, packed.out_features, packed.group_size
    in_blocks = packed.layout == LAYOUT_CPU
    cut = _from_blocks if in_blocks else fragments.cut_columns
    words = _from_blocks(_interleave(packed.weight), n) if in_blocks else fragments.to_words(packed.weight, k, n)
    g_idx = None
    if packed.perm is not None or (in_blocks and not (g % 8 == 0 or g == k)):
        values = unpack_nibbles(words, packed_rows(k, g) if in_blocks else k)
        values = values[_packed_row(k, g, words.device)] if in_blocks else values
        if packed.perm is not None:
            perm = packed.perm.long()
            sorted_values, values = values, torch.empty_like(values)
            values[perm] = sorted_values
            g_idx = torch.empty_like(packed.perm)
            g_idx[perm] = torch.arange(k, dtype=torch.int32, device=words.device) // g
        words = pack_nibbles(values)
    return QuantizedWeight(
        qweight=words,
        scales=cut(packed.scales, n),
        zeros=None if packed.zeros is None else cut(packed.zeros, n),
        group_size=g,
        in_features=k,
        out_features=n,
        g_idx=g_idx,
    )


def act_order(weight: QuantizedWeight) -> Tensor | None:
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


def source_rows(k: int, g: int, perm: Tensor | None, device: torch.device) -> Tensor | None:
    """int64 [packed_rows]: the row of W that each packed row holds, -1 for padding; None if each holds its own."""
    if perm is None and k % 8 == 0 and (g % 8 == 0 or g == k):  # every packed word holds 8 neighbouring rows
        return None
    rows = torch.full((packed_rows(k, g),), -1, device=device)
    rows[_packed_row(k, g, device)] = torch.arange(k, device=device) if perm is None else perm
    return rows


def _tiles(rows: int, blocks: int) -> Iterator[tuple[slice, slice]]:
    """Rows and blocks of columns of one piece of a weight after another."""
    top = max(1, _CHUNK // (_BLOCKS * BLOCK))
    for block in range(0, blocks, _BLOCKS):
        for row in range(0, rows, top):
            yield slice(row, row + top), slice(block, block + _BLOCKS)


def _gather_rows(words: Tensor, rows: Tensor, out: Tensor) -> None:
    """Packed words from any rows of canonical ones.

    Args:
        words: int32 [ceil(K / 8), N].
        rows: int64 [8 R]: the row that nibble i of word r takes, at 8 r + i; -1 for 0.
        out: int32 [B, R, 16], written.
    """
    word, shift = rows.clamp(min=0) >> 3, ((rows & 7) << 2).to(torch.int32)
    mask = torch.where(rows < 0, 0, 15).to(torch.int32)
    for top, block in _tiles(out.shape[1], out.shape[0]):
        columns = words[:, block.start * BLOCK : block.stop * BLOCK]
        part = columns.new_zeros(out[0, top].shape[0], columns.shape[1])
        for i in range(8):
            of = slice(8 * top.start + i, 8 * top.stop, 8)
            # What >> drags in from the sign lies outside the mask.
            nibbles = columns.index_select(0, word[of])
            nibbles >>= shift[of, None]
            nibbles &= mask[of, None]
            nibbles <<= 4 * i
            part |= nibbles
        out[block, top] = _split_columns(part)


def _to_blocks(rows: Tensor, out: Tensor, change: Callable[[Tensor], object] | None = None) -> None:
    """[R, N] to [ceil(N / 16), R, 16], padded with 0, piece by piece; ``change`` then works on each piece in place."""
    for top, block in _tiles(out.shape[1], out.shape[0]):
        piece = out[block, top]
        piece.copy_(_split_columns(rows[top, block.start * BLOCK : block.stop * BLOCK]))
        if change is not None:
            change(piece)


def _split_columns(rows: Tensor) -> Tensor:
    """[R, N] to [ceil(N / 16), R, 16], padded with 0; a view where nothing is padded."""
    padded = F.pad(rows, (0, -rows.shape[1] % BLOCK)) if rows.shape[1] % BLOCK else rows
    return padded.unflatten(1, (-1, BLOCK)).transpose(0, 1)


def _blocks_of(rows: Tensor) -> Tensor:
    """[R, N] to a fresh, contiguous [ceil(N / 16), R, 16], padded with 0."""
    out = rows.new_empty(ceil_div(rows.shape[1], BLOCK), rows.shape[0], BLOCK)
    _to_blocks(rows, out)
    return out


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


def _evens_then_odds(words: Tensor) -> None:
    """Nibbles 0 1 2 3 4 5 6 7 of each word to 0 2 4 6 1 3 5 7, in place."""
    _swap(words, 0x00F000F0, 4)  # 0 2 1 3  4 6 5 7
    _swap(words, 0x0000FF00, 8)  # 0 2 4 6  1 3 5 7


def _interleave(words: Tensor) -> Tensor:
    """The inverse of :func:`_evens_then_odds`, in new memory."""
    words = words.clone()
    _swap(words, 0x0000FF00, 8)
    _swap(words, 0x00F000F0, 4)
    return words
