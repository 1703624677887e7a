# SPDX-License-Identifier: Apache-2.0
"""AWQ checkpoints of version "gemm": 8 columns of one row in each word, interleaved.

For an in_features K, an out_features N and G groups a layer has qweight int32 [K, N / 8], qzeros int32 [G, N / 8] and
scales [G, N]. A word of qweight or qzeros holds 8 columns, even ones in its low half and odd ones in its high half::

    bits        31-28  27-24  23-20  19-16  15-12  11-8    7-4    3-0
    nibble        7      6      5      4      3      2      1      0
    column - 8c   7      5      3      1      6      4      2      0

so nibble i of word c holds column 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]. A zero point is stored as it is (no "minus one").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from awqjit.errors import ArgumentError, FormatError
from awqjit.formats.columns import pack_columns, unpack_columns
from awqjit.weight import (
    SCALE_DTYPES,
    SYMMETRIC_ZERO,
    QuantizedWeight,
    ceil_div,
    check_tensor,
    clear_padding,
    resolve_group_size,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, counted from the word's first, that each nibble of a word holds."""


@dataclass(frozen=True, eq=False)
class AwqWeight:
    """One AWQ gemm layer as its checkpoint holds it; K and N are told by its tensors.

    Attributes:
        qweight: int32 [K, N / 8], words as drawn at the head of this module.
        scales: fp16, bf16 or fp32 [G, N], G = ceil(K / group_size).
        qzeros: int32 [G, N / 8], words as qweight's; None when every zero point is 8.
        group_size: rows that share a scale, 1 to K; given as -1, or more than K, for all K.

    Raises:
        ArgumentError: a tensor has another dtype or shape, or group_size is not -1 or at least 1.
    """

    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None
    group_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.qweight, Tensor) or self.qweight.dim() != 2:
            got = getattr(self.qweight, "shape", type(self.qweight).__name__)
            raise ArgumentError("qweight", got, "a 2-D tensor [K, N / 8]")
        k, words = self.qweight.shape
        object.__setattr__(self, "group_size", resolve_group_size(self.group_size, k))
        check_tensor("qweight", self.qweight, (k, words), torch.int32)
        check_tensor("scales", self.scales, (self.groups, 8 * words), *SCALE_DTYPES)
        if self.qzeros is not None:
            check_tensor("qzeros", self.qzeros, (self.groups, words), torch.int32)

    @property
    def in_features(self) -> int:
        """K."""
        return self.qweight.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return 8 * self.qweight.shape[1]

    @property
    def groups(self) -> int:
        """G."""
        return ceil_div(self.in_features, self.group_size)

    def standard(self) -> QuantizedWeight:
        """The canonical weight: words of 8 rows of one column. No value changes.

        ``zeros`` is None only if ``qzeros`` is. It shares no memory with qweight and qzeros.
        """
        return QuantizedWeight(
            qweight=_standard_words(self.qweight),
            scales=self.scales,
            zeros=None if self.qzeros is None else unpack_columns(self.qzeros, ORDER),
            group_size=self.group_size,
            in_features=self.in_features,
            out_features=self.out_features,
        )


def awq_to_standard(qweight: Tensor, scales: Tensor, qzeros: Tensor | None, group_size: int) -> QuantizedWeight:
    """One AWQ gemm layer in the standard (GPTQ) orientation: words of 8 rows of one column. No value changes.

    Args:
        qweight: int32 [K, N / 8], words as drawn at the head of this module.
        scales: fp16, bf16 or fp32 [G, N], G = ceil(K / group_size).
        qzeros: int32 [G, N / 8], words as qweight's; None when every zero point is 8.
        group_size: rows that share a scale; -1, or more than K, for all K.

    Returns:
        The canonical weight; ``zeros`` is None only if ``qzeros`` is. It shares no memory with qweight and qzeros.

    Raises:
        ArgumentError: a tensor has another dtype or shape, or group_size is not -1 or at least 1.
    """
    return AwqWeight(qweight, scales, qzeros, group_size).standard()


def standard_to_awq(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """The AWQ gemm tensors of a canonical weight; the inverse of :func:`awq_to_standard`.

    Args:
        weight: a canonical weight; one without zero points gets a qzeros that says 8 everywhere.

    Returns:
        qweight int32 [K, N / 8], scales [G, N] (the weight's own tensor), qzeros int32 [G, N / 8].

    Raises:
        FormatError: N is not a multiple of 8, or the rows are in act-order: AWQ can express neither.
    """
    k, n = weight.in_features, weight.out_features
    if n % 8:
        raise FormatError(
            f"AWQ packs 8 columns into a word, and out_features {n} is not a multiple of 8",
            "Store this layer as float.",
        )
    if not weight.in_group_order():
        raise FormatError("AWQ has no act-order (g_idx)", "Store this layer in the GPTQ form.")
    lanes = clear_padding(weight.qweight, k).reshape(-1, n // 8, 8)
    rows = torch.stack([lanes[:, :, column] for column in ORDER])
    _transpose_nibbles(rows)
    qweight = rows.transpose(0, 1).reshape(-1, n // 8)[:k].contiguous()
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full(weight.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=weight.device)
    return qweight, weight.scales, pack_columns(zeros, ORDER)


_CHUNK = 32_767
"""Words handled at a time: temporaries stay in a cache, and torch starts no threads for so small an operation."""


def _standard_words(qweight: Tensor) -> Tensor:
    """AWQ's qweight int32 [K, N / 8] as standard words, int32 [ceil(K / 8), N]; rows beyond K are 0."""
    k, words = qweight.shape
    standard = torch.empty(ceil_div(k, 8), words, 8, dtype=torch.int32, device=qweight.device)
    columns = min(words, _CHUNK // 8)
    tiles = max(1, _CHUNK // (8 * columns))
    for start in range(0, k, 8 * tiles):
        rows = qweight[start : start + 8 * tiles]
        rows = F.pad(rows, (0, 0, 0, -rows.shape[0] % 8))
        for left in range(0, words, columns):
            tile = rows[:, left : left + columns].unflatten(0, (-1, 8)).transpose(0, 1).contiguous()
            _transpose_nibbles(tile)
            part = standard[start // 8 : start // 8 + tile.shape[1], left : left + columns]
            for i, column in enumerate(ORDER):
                part[:, :, column] = tile[i]
    return standard.reshape(-1, 8 * words)


def _transpose_nibbles(words: Tensor) -> None:
    """Take words [8, ...] as 8 by 8 matrices of nibbles and transpose them, in place.

    Blocks of 1, 2, then 4 nibbles swap across the diagonal.
    """
    for step, mask in ((1, 0x0F0F0F0F), (2, 0x00FF00FF), (4, 0x0000FFFF)):
        pairs = words.view(4 // step, 2, step, -1)
        low, high = pairs[:, 0], pairs[:, 1]
        # What >> drags in from the sign lies outside the mask.
        moved = low >> (4 * step)
        moved ^= high
        moved &= mask
        high ^= moved
        moved <<= 4 * step
        low ^= moved
