# SPDX-License-Identifier: Apache-2.0
"""Words that hold 8 neighbouring columns of one row, as both AWQ and GPTQ store their zero points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_columns(words: Tensor, order: Sequence[int]) -> Tensor:
    """One value per byte from words of 8 columns.

    Args:
        words: int32 [R, C]; nibble i of word c holds column 8c + order[i].
        order: a permutation of 0 to 7.

    Returns:
        uint8 [R, 8 C].
    """
    out = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for i, column in enumerate(order):
        out[:, :, column] = (words >> (4 * i)) & 15  # the mask drops the sign that the shift drags in
    return out.reshape(words.shape[0], -1)


def pack_columns(values: Tensor, order: Sequence[int]) -> Tensor:
    """The inverse of :func:`unpack_columns`.

    Args:
        values: uint8 [R, 8 C], values 0 to 15.
        order: a permutation of 0 to 7.

    Returns:
        int32 [R, C].
    """
    lanes = values.reshape(values.shape[0], -1, 8)
    words = torch.zeros(lanes.shape[:2], dtype=torch.int32, device=values.device)
    for i, column in enumerate(order):
        words |= lanes[:, :, column].to(torch.int32) << (4 * i)
    return words
