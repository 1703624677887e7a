# SPDX-License-Identifier: Apache-2.0
"""AWQ checkpoints of version "gemv": 8 rows of one column in each word, columns first.

For an in_features K, an out_features N and G groups a layer has qweight int32 [N, K / 8], qzeros int32 [N, Z] and
scales [N, 8 Z]. Nibble i of word c of qweight is row (k) 8c + i; nibble i of word c of qzeros is the zero point of
group 8c + i, as it is (no "minus one")::

    bits               31-28  27-24  23-20  19-16  15-12  11-8    7-4    3-0
    qweight: k - 8c      7      6      5      4      3      2      1      0
    qzeros: group - 8c   7      6      5      4      3      2      1      0

Z is ceil(G / 8), rounded up to a multiple of 2 at group size 64 and of 4 at group size 32, as the kernels of AutoAWQ
want it; groups beyond G are zero.
"""

from __future__ import annotations

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
    resolve_group_size,
)

ORDER = tuple(range(8))
"""Group, counted from the word's first, that each nibble of a word of qzeros holds."""


def zeros_width(groups: int, group_size: int) -> int:
    """Z, the words that the zero points of one column take."""
    multiple = {64: 2, 32: 4}.get(group_size, 1)
    return multiple * ceil_div(ceil_div(groups, 8), multiple)


def gemv_to_standard(qweight: Tensor, scales: Tensor, qzeros: Tensor | None, group_size: int) -> QuantizedWeight:
    """One AWQ gemv layer as a canonical weight. No value changes.

    Args:
        qweight: int32 [N, K / 8], words as drawn at the head of this module.
        scales: fp16, bf16 or fp32 [N, 8 Z] (or [N, 8 ceil(G / 8)], without the padding of small groups).
        qzeros: int32 [N, Z]; None when every zero point is 8.
        group_size: rows that share a scale; -1, or more than K, for all K.

    Returns:
        The canonical weight, in memory of its own; ``zeros`` is None only if ``qzeros`` is.

    Raises:
        ArgumentError: a tensor has another dtype or shape, or group_size is not -1 or at least 1.
    """
    if not isinstance(qweight, Tensor) or qweight.dim() != 2:
        raise ArgumentError("qweight", getattr(qweight, "shape", type(qweight).__name__), "a 2-D tensor [N, K / 8]")
    n, words = qweight.shape
    k = 8 * words
    group_size = resolve_group_size(group_size, k)
    groups = ceil_div(k, group_size)
    check_tensor("qweight", qweight, (n, words), torch.int32)
    width = zeros_width(groups, group_size)
    if isinstance(scales, Tensor) and tuple(scales.shape) == (n, 8 * ceil_div(groups, 8)):
        width = ceil_div(groups, 8)
    check_tensor("scales", scales, (n, 8 * width), *SCALE_DTYPES)
    zeros = None
    if qzeros is not None:
        check_tensor("qzeros", qzeros, (n, width), torch.int32)
        zeros = unpack_columns(qzeros, ORDER)[:, :groups].t().contiguous()
    return QuantizedWeight(
        qweight=qweight.t().contiguous(),
        scales=scales[:, :groups].t().contiguous(),
        zeros=zeros,
        group_size=group_size,
        in_features=k,
        out_features=n,
    )


def standard_to_gemv(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """The AWQ gemv tensors of a canonical weight; the inverse of :func:`gemv_to_standard`.

    Args:
        weight: a canonical weight; one without zero points gets a qzeros that says 8 for every group.

    Returns:
        qweight int32 [N, K / 8], scales [N, 8 Z], qzeros int32 [N, Z].

    Raises:
        FormatError: K is not a multiple of 8, or the rows are in act-order.
    """
    if weight.in_features % 8:
        raise FormatError(
            f"AWQ gemv packs 8 rows into a word, and in_features {weight.in_features} is not a multiple of 8",
            "Store this layer as float or in the gemm form.",
        )
    if not weight.in_group_order():
        raise FormatError("AWQ has no act-order (g_idx)", "Store this layer in the GPTQ form.")
    padding = (0, 8 * zeros_width(weight.groups, weight.group_size) - weight.groups)
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full(weight.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=weight.device)
    return (
        weight.qweight.t().contiguous(),
        F.pad(weight.scales.t(), padding).contiguous(),
        pack_columns(F.pad(zeros.t(), padding), ORDER),
    )
