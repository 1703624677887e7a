# SPDX-License-Identifier: Apache-2.0
"""GPTQ checkpoints, versions 1 ("gptq") and 2 ("gptq_v2"), without act-order.

For an in_features K, an out_features N and G groups a layer has qweight int32 [K / 8, N], qzeros int32 [G, N / 8],
scales [G, N] and often g_idx int32 [K]. Nibble i (bits 4i to 4i+3) of word r of qweight is row 8r + i; nibble i of word
c of qzeros is column 8c + i::

    bits               31-28  27-24  23-20  19-16  15-12  11-8    7-4    3-0
    qweight: row - 8r    7      6      5      4      3      2      1      0
    qzeros: column - 8c  7      6      5      4      3      2      1      0

Version 2 stores a zero point z as it is. Version 1 stores (z - 1) & 15, nibble by nibble: a stored 15 means z = 0.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from awqjit.errors import ArgumentError, AwqJitWarning, FormatError
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

ORDER = tuple(range(8))
"""Column, counted from the word's first, that each nibble of a word of qzeros holds."""


def gptq_to_standard(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None,
    group_size: int,
    *,
    v2: bool,
    sym: bool,
    g_idx: Tensor | None = None,
    act_order: bool = False,
) -> QuantizedWeight:
    """One GPTQ layer as a canonical weight. No value changes; qweight is taken as it is, without a copy.

    A symmetric layer's zero points are all 8, so its qzeros say which version wrote them (7 everywhere: version 1, 8
    everywhere: version 2). They are believed over the label ``v2``, with a warning: mislabelled checkpoints exist.

    Args:
        qweight: int32 [K / 8, N], words as drawn at the head of this module.
        scales: fp16, bf16 or fp32 [G, N], G = ceil(K / group_size).
        qzeros: int32 [G, N / 8]; may be None if ``sym``.
        group_size: rows that share a scale; -1, or more than K, for all K.
        v2: whether the checkpoint is labelled version 2.
        sym: whether the checkpoint is labelled symmetric.
        g_idx: int32 or int64 [K], the group of each row; must be k // group_size unless ``act_order``.
        act_order: keep a g_idx in another order.

    Returns:
        The canonical weight; ``zeros`` is None only if ``qzeros`` is.

    Raises:
        ArgumentError: a tensor has another dtype or shape, or group_size is not -1 or at least 1.
        FormatError: K or N is not a multiple of 8, g_idx says act-order, or qzeros is missing and not ``sym``.
    """
    if not isinstance(qweight, Tensor) or qweight.dim() != 2:
        raise ArgumentError("qweight", getattr(qweight, "shape", type(qweight).__name__), "a 2-D tensor [K / 8, N]")
    rows, n = qweight.shape
    k = 8 * rows
    if g_idx is not None and g_idx.dim() == 1 and g_idx.shape[0] % 8:
        raise _k_error(g_idx.shape[0])
    group_size = resolve_group_size(group_size, k)
    groups = ceil_div(k, group_size)
    check_tensor("qweight", qweight, (rows, n), torch.int32)
    check_tensor("scales", scales, (groups, n), *SCALE_DTYPES)
    if g_idx is not None:
        check_tensor("g_idx", g_idx, (k,), torch.int32, torch.int64)
        if torch.equal(g_idx.long(), torch.arange(k, device=g_idx.device) // group_size):
            g_idx = None
        elif not act_order:
            raise FormatError(
                "the rows are in act-order (desc_act, a g_idx other than k // group_size), which is not supported",
                "Use a checkpoint made with desc_act=false.",
            )
    if qzeros is None and not sym:
        raise FormatError("qzeros is missing and the checkpoint is not labelled symmetric", "Check the checkpoint.")
    if qzeros is not None:
        if n % 8:
            raise _n_error(n)
        check_tensor("qzeros", qzeros, (groups, n // 8), torch.int32)
    return QuantizedWeight(
        qweight=qweight,
        scales=scales,
        zeros=None if qzeros is None else _zero_points(unpack_columns(qzeros, ORDER), v2=v2, sym=sym),
        group_size=group_size,
        in_features=k,
        out_features=n,
        g_idx=None if g_idx is None else g_idx.to(torch.int32),
    )


def standard_to_gptq(weight: QuantizedWeight, *, v2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The GPTQ tensors of a canonical weight; the inverse of :func:`gptq_to_standard`.

    Args:
        weight: a canonical weight; one without zero points gets a qzeros that says 8 everywhere.
        v2: write version 2 (z as it is) instead of version 1 ((z - 1) & 15).

    Returns:
        qweight int32 [K / 8, N] and scales [G, N] (the weight's own tensors), qzeros int32 [G, N / 8], g_idx int32 [K].

    Raises:
        FormatError: K or N is not a multiple of 8.
    """
    if weight.in_features % 8:
        raise _k_error(weight.in_features)
    if weight.out_features % 8:
        raise _n_error(weight.out_features)
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full(weight.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=weight.device)
    stored = zeros if v2 else (zeros + 15) & 15
    qweight = clear_padding(weight.qweight, weight.in_features)
    return qweight, weight.scales, pack_columns(stored, ORDER), weight.row_groups().to(torch.int32)


def _zero_points(stored: Tensor, *, v2: bool, sym: bool) -> Tensor:
    """uint8 [G, N]: z of each stored nibble."""
    if sym:
        seen = {7: False, 8: True}.get(int(stored.flatten()[0])) if bool((stored == stored[0, 0]).all()) else None
        if seen is None:
            warnings.warn(
                "a GPTQ layer is labelled symmetric, but its zero points are not all 8: they are used as stored, read "
                f"as checkpoint_format {'gptq_v2' if v2 else 'gptq'}",
                AwqJitWarning,
                stacklevel=3,
            )
        elif seen != v2:
            names = {True: "gptq_v2 (zero points as they are)", False: "gptq (zero points minus one)"}
            warnings.warn(
                f"a symmetric GPTQ layer is labelled {names[v2]}, but stores {8 if seen else 7} everywhere, as "
                f"{names[seen]} does: the data is believed",
                AwqJitWarning,
                stacklevel=3,
            )
            v2 = seen
    return stored if v2 else (stored + 1) & 15


def _k_error(k: int) -> FormatError:
    return FormatError(
        f"GPTQ packs 8 rows into a word, and in_features {k} is not a multiple of 8",
        "Store this layer as float or in the AWQ form.",
    )


def _n_error(n: int) -> FormatError:
    return FormatError(
        f"GPTQ packs the zero points of 8 columns into a word, and out_features {n} is not a multiple of 8",
        "Store this layer as float.",
    )
