# SPDX-License-Identifier: Apache-2.0
"""GPTQ checkpoints, versions 1 ("gptq") and 2 ("gptq_v2"), with act-order or without.

For an in_features K, an out_features N and G groups a layer has qweight int32 [ceil(K / 8), N], qzeros int32
[G, ceil(N / 8)], scales [G, N] and often g_idx int32 [K]. Nibble i (bits 4i to 4i+3) of word r of qweight is row
8r + i; nibble i of word c of qzeros is column 8c + i::

    bits               31-28  27-24  23-20  19-16  15-12  11-8    7-4    3-0
    qweight: row - 8r    7      6      5      4      3      2      1      0
    qzeros: column - 8c  7      6      5      4      3      2      1      0

Version 2 stores zero points z as they are. Version 1 stores each word of them minus 0x11111111, modulo 2**32: that is
z - 1 in every nibble, except that a z of 0 borrows from the nibble above it. Packers subtract the whole word, or add up
shifted z - 1, which comes to the same; so adding 0x11111111 gives back what they had, z of 0 and 15 included.

Some converters store qzeros unpacked, [G, N], as integers or whole floats: those are z itself under either label.
g_idx is the group of each row. It is k // group_size unless the model was quantized in act-order (desc_act); one of
zeros alone says nothing.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from awqjit.errors import ArgumentError, AwqJitWarning, FormatError
from awqjit.formats.columns import pack_columns, unpack_columns
from awqjit.formats.whole import whole_numbers
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

_ONES = 0x11111111
"""What version 1 takes from each word of zero points."""


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
    in_features: int | None = None,
    notes: list[str] | None = None,
) -> QuantizedWeight:
    """One GPTQ layer as a canonical weight. No value changes; qweight is taken as it is, without a copy.

    A symmetric layer's zero points are all 8, so its qzeros say which version wrote them (7 everywhere: version 1, 8
    everywhere: version 2). They are believed over the label ``v2``, with a warning: mislabelled checkpoints exist.

    Args:
        qweight: int32 [ceil(K / 8), N], words as drawn at the head of this module.
        scales: fp16, bf16 or fp32 [G, N], G = ceil(K / group_size).
        qzeros: int32 [G, ceil(N / 8)]; or, unpacked, integers or floats [G, N]; may be None if ``sym``.
        group_size: rows that share a scale; -1, or more than K, for all K.
        v2: whether the checkpoint is labelled version 2.
        sym: whether the checkpoint is labelled symmetric.
        g_idx: int32 or int64 [K], the group of each row; must be k // group_size unless ``act_order``.
        act_order: keep a g_idx in another order.
        in_features: K; None for the length of g_idx, or 8 rows for each of qweight's.
        notes: gets a sentence for each contradiction of data and label, instead of a warning.

    Returns:
        The canonical weight; ``zeros`` is None only if ``qzeros`` is.

    Raises:
        ArgumentError: a tensor has another dtype or shape, or group_size is not -1 or at least 1.
        FormatError: g_idx says act-order, qzeros is missing and not ``sym``, or an unpacked zero point is not a whole
            number from 0 to 15.
    """
    if not isinstance(qweight, Tensor) or qweight.dim() != 2:
        raise ArgumentError("qweight", getattr(qweight, "shape", type(qweight).__name__), "a 2-D tensor [K / 8, N]")
    n, k = qweight.shape[1], in_features
    if k is None:
        k = 8 * qweight.shape[0]
        if g_idx is not None and g_idx.dim() == 1 and k - 8 < g_idx.shape[0] < k:
            k = g_idx.shape[0]
    group_size = resolve_group_size(group_size, k)
    groups = ceil_div(k, group_size)
    check_tensor("qweight", qweight, (ceil_div(k, 8), n), torch.int32)
    check_tensor("scales", scales, (groups, n), *SCALE_DTYPES)
    if g_idx is not None:
        check_tensor("g_idx", g_idx, (k,), torch.int32, torch.int64)
        in_order = torch.arange(k, device=g_idx.device) // group_size
        # All zeros is what packers leave that never filled g_idx in: no model puts every row into one of many groups.
        if torch.equal(g_idx.long(), in_order) or not bool(g_idx.any()):
            g_idx = None
        elif not act_order:
            raise FormatError(
                "the rows are in act-order (desc_act, a g_idx other than k // group_size), which is not supported",
                "Use a checkpoint made with desc_act=false.",
            )
    if qzeros is None and not sym:
        raise FormatError("qzeros is missing and the checkpoint is not labelled symmetric", "Check the checkpoint.")
    zeros = None
    if isinstance(qzeros, Tensor) and qzeros.dtype != torch.int32:
        zeros = whole_numbers("qzeros", qzeros, (groups, n), 0, 15).to(torch.uint8)
    elif qzeros is not None:
        check_tensor("qzeros", qzeros, (groups, ceil_div(n, 8)), torch.int32)
        zeros = unpack_columns(qzeros, ORDER)[:, :n]
        version_2, note = zeros_version(zeros, SYMMETRIC_ZERO, v2=v2, sym=sym)
        if not version_2:
            zeros = unpack_columns(qzeros + _ONES, ORDER)[:, :n]
        if note and notes is not None:
            notes.append(note)
        elif note:
            warnings.warn(note, AwqJitWarning, stacklevel=2)
    return QuantizedWeight(
        qweight=qweight,
        scales=scales,
        zeros=None if zeros is None else zeros.contiguous(),
        group_size=group_size,
        in_features=k,
        out_features=n,
        g_idx=None if g_idx is None else g_idx.to(torch.int32),
    )


def standard_to_gptq(weight: QuantizedWeight, *, v2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The GPTQ tensors of a canonical weight; the inverse of :func:`gptq_to_standard`.

    Args:
        weight: a canonical weight; one without zero points gets a qzeros that says 8 everywhere.
        v2: write version 2 (z as it is) instead of version 1 (each word minus 0x11111111).

    Returns:
        qweight int32 [ceil(K / 8), N] and scales [G, N] (the weight's own tensors, but that padding is 0), qzeros
        int32 [G, ceil(N / 8)], g_idx int32 [K].
    """
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full(weight.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=weight.device)
    qzeros = pack_columns(F.pad(zeros, (0, -weight.out_features % 8)), ORDER)
    qweight = clear_padding(weight.qweight, weight.in_features)
    return qweight, weight.scales, qzeros if v2 else qzeros - _ONES, weight.row_groups().to(torch.int32)


def zeros_version(stored: Tensor, middle: int, *, v2: bool, sym: bool) -> tuple[bool, str | None]:
    """Whether zero points are stored as version 2 does, and a sentence if that, or ``sym``, contradicts the label.

    Args:
        stored: [G, N], the unpacked values as stored; not empty.
        middle: the zero point of a symmetric layer: 8 for 4 bits.
        v2: the label.
        sym: the label.
    """
    if not sym:
        return v2, None
    first = int(stored.flatten()[0])
    seen = {middle - 1: False, middle: True}.get(first) if bool((stored == stored[0, 0]).all()) else None
    if seen is None:
        return v2, (
            f"a GPTQ layer is labelled symmetric, but its zero points are not all {middle}: they are used as stored, "
            f"read as checkpoint_format {'gptq_v2' if v2 else 'gptq'}"
        )
    if seen == v2:
        return v2, None
    versions = {True: "gptq_v2 (zero points as they are)", False: "gptq (zero points minus one)"}
    return seen, (
        f"a symmetric GPTQ layer is labelled {versions[v2]}, but stores {first} everywhere, as {versions[seen]} does: "
        "the data is believed"
    )
