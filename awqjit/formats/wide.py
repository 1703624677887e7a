# SPDX-License-Identifier: Apache-2.0
"""Layers with 8 bits, as mixed-precision checkpoints have them among those with 4: read as float weights.

They are packed as those with 4 bits are, 4 values to a word: byte i (bits 8i to 8i+7) where those have nibble i. The
zero point of a symmetric layer is 128; version 1 of GPTQ stores each word of zero points minus 0x01010101.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from awqjit.errors import ArgumentError, FormatError
from awqjit.formats.gptq import zeros_version
from awqjit.formats.whole import whole_numbers
from awqjit.weight import SCALE_DTYPES, ceil_div, check_tensor, resolve_group_size

MIDDLE = 128
"""The zero point of a symmetric layer."""


def _bytes(words: Tensor, rows: int) -> Tensor:
    """int16 [rows, N] of int32 [ceil(rows / 4), N]: byte i of word r is row 4r + i."""
    parts = [(words >> (8 * i)) & 255 for i in range(4)]  # the mask drops the sign that the shift drags in
    return torch.stack(parts, dim=1).reshape(-1, words.shape[1])[:rows].to(torch.int16)


def dequantize_gptq(
    tensors: Mapping[str, Tensor], group_size: int, k: int, n: int, *, v2: bool, sym: bool, notes: list[str]
) -> Tensor:
    """fp32 [K, N] of a GPTQ layer with 8 bits.

    Args:
        tensors: qweight int32 [K / 4, N], scales [G, N], perhaps qzeros int32 [G, N / 4] (or unpacked, [G, N]) and
            g_idx [K].
        group_size: rows that share a scale; -1 for all K.
        k: in_features.
        n: out_features.
        v2: whether the checkpoint is labelled version 2.
        sym: whether it is labelled symmetric.
        notes: gets a sentence where the data contradicts a label.

    Raises:
        ArgumentError: a tensor has another dtype or shape.
        FormatError: the zero points are missing and the layer is not labelled symmetric.
    """
    for name in ("qweight", "scales"):
        if name not in tensors:
            raise ArgumentError(name, "nothing", "a tensor")
    groups = ceil_div(k, resolve_group_size(group_size, k))
    check_tensor("qweight", tensors["qweight"], (ceil_div(k, 4), n), torch.int32)
    check_tensor("scales", tensors["scales"], (groups, n), *SCALE_DTYPES)
    qzeros = tensors.get("qzeros")
    if qzeros is None and not sym:
        raise FormatError("qzeros is missing and the checkpoint is not labelled symmetric", "Check the checkpoint.")
    if qzeros is None:
        zeros = torch.full((groups, n), MIDDLE, dtype=torch.int16)
    elif qzeros.dtype != torch.int32:
        zeros = whole_numbers("qzeros", qzeros, (groups, n), 0, 255)
    else:
        check_tensor("qzeros", qzeros, (groups, ceil_div(n, 4)), torch.int32)
        zeros = _bytes(qzeros.t(), n).t()
        version_2, note = zeros_version(zeros, MIDDLE, v2=v2, sym=sym)
        if not version_2:
            zeros = _bytes((qzeros + 0x01010101).t(), n).t()
        if note:
            notes.append(note)
    return _product(_bytes(tensors["qweight"], k), zeros, tensors["scales"], tensors.get("g_idx"), group_size)


def dequantize_pack_quantized(tensors: Mapping[str, Tensor], group_size: int, k: int, n: int) -> Tensor:
    """fp32 [K, N] of a pack-quantized layer with 8 bits.

    Args:
        tensors: weight_packed int32 [N, ceil(K / 4)], weight_scale [N, G], perhaps weight_zero_point int32
            [ceil(N / 4), G] (or unpacked and signed, [N, G]) and weight_g_idx [K].
        group_size: rows that share a scale; -1 for all K.
        k: in_features.
        n: out_features.

    Raises:
        ArgumentError: a tensor has another dtype or shape.
    """
    for name in ("weight_packed", "weight_scale"):
        if name not in tensors:
            raise ArgumentError(name, "nothing", "a tensor")
    groups = ceil_div(k, resolve_group_size(group_size, k))
    check_tensor("weight_packed", tensors["weight_packed"], (n, ceil_div(k, 4)), torch.int32)
    check_tensor("weight_scale", tensors["weight_scale"], (n, groups), *SCALE_DTYPES)
    stored, g_idx = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
    if stored is None:
        zeros = torch.full((groups, n), MIDDLE, dtype=torch.int16)
    elif stored.dtype == torch.int32:
        check_tensor("weight_zero_point", stored, (ceil_div(n, 4), groups), torch.int32)
        zeros = _bytes(stored, n).t()
    else:
        zeros = (whole_numbers("weight_zero_point", stored, (n, groups), -128, 127) + MIDDLE).t()
    if g_idx is not None and g_idx.shape == (k,) and bool((g_idx < 0).any()):
        g_idx = None
    return _product(_bytes(tensors["weight_packed"].t(), k), zeros, tensors["weight_scale"].t(), g_idx, group_size)


def _product(q: Tensor, z: Tensor, s: Tensor, g_idx: Tensor | None, group_size: int) -> Tensor:
    """fp32 [K, N]: (q - z) * s."""
    k, groups = q.shape[0], s.shape[0]
    if not bool(torch.isfinite(s).all()):
        raise FormatError("a scale is NaN or infinite", "The checkpoint is damaged: fetch or quantize it again.")
    if g_idx is None or not bool(g_idx.any()):  # zeros alone say nothing
        group = torch.arange(k) // resolve_group_size(group_size, k)
    else:
        check_tensor("g_idx", g_idx, (k,), torch.int32, torch.int64)
        group = g_idx.long()
        if int(group.min()) < 0 or int(group.max()) >= groups:
            raise ArgumentError("g_idx", f"groups {int(group.min())} to {int(group.max())}", f"0 to {groups - 1}")
    return (q - z[group]).float() * s[group].float()
