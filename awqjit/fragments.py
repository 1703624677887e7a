# SPDX-License-Identifier: Apache-2.0
"""The packed form that GPU kernels read: fragments of 16 columns by 32 rows of W, 256 bytes each.

A fragment is what a sub-group of 16 lanes holds, and one operand of the matrix unit (DPAS, 4-bit operand). Lane l has
column 16 nb + l; its four words are 32 consecutive k of that column in their natural order::

    word          0                1                 2                 3
    k - 32 kb     0 1 2 ... 7      8 9 10 ... 15     16 17 ... 23      24 25 ... 31
    nibble        0 1 2 ... 7      0 1  2 ...  7      0  1 ...  7       0  1 ...  7       (bits 4p to 4p + 3)

A device whose matrix unit gives 8 columns reads half a fragment, 128 contiguous bytes. Rows are padded to a multiple
of 32 with nibbles of 0, and groups are not: one of fewer than 32 rows, or of no multiple of 32, shares fragments with
its neighbours, and kernels look up each k's group. Kernels read x as 0 beyond K, whatever lies there in memory.

Scales and zero points are [G, Npad], where Npad is N up to a multiple of 16: neighbouring lanes read neighbouring
values. Columns are padded with scale 0 and zero point 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from awqjit.weight import ceil_div, clear_padding

FRAGMENT = 32
"""Rows of a fragment."""

LANES = 16
"""Columns of a fragment."""

_WORDS = 4  # of 8 rows each


def shape(k: int, n: int) -> tuple[int, int, int, int]:
    """[column blocks, row fragments, 16 lanes, 4 words] of a weight W [k, n]."""
    return ceil_div(n, LANES), ceil_div(k, FRAGMENT), LANES, _WORDS


def padded(n: int) -> int:
    """Columns that scales and zero points have."""
    return LANES * ceil_div(n, LANES)


def from_words(words: Tensor, k: int) -> Tensor:
    """Canonical words to fragments.

    Args:
        words: int32 [ceil(k / 8), N]; nibbles of the last word beyond row k - 1 may hold anything.
        k: rows of W.

    Returns:
        int32 of :func:`shape`, contiguous, in memory of its own.
    """
    blocks, fragments, _, _ = shape(k, words.shape[1])
    out = torch.empty(shape(k, words.shape[1]), dtype=torch.int32, device=words.device)
    whole = F.pad(clear_padding(words, k), (0, blocks * LANES - words.shape[1], 0, fragments * _WORDS - words.shape[0]))
    out.copy_(whole.reshape(fragments, _WORDS, blocks, LANES).permute(2, 0, 3, 1))
    return out


def to_words(weight: Tensor, k: int, n: int) -> Tensor:
    """The inverse of :func:`from_words`: int32 [ceil(k / 8), n], in memory of its own."""
    words = weight.permute(1, 3, 0, 2).reshape(-1, weight.shape[0] * LANES)
    return words[: ceil_div(k, 8), :n].clone(memory_format=torch.contiguous_format)


def pad_columns(rows: Tensor) -> Tensor:
    """[R, N] to a fresh, contiguous [R, Npad], padded with 0."""
    out = rows.new_zeros(rows.shape[0], padded(rows.shape[1]))
    out[:, : rows.shape[1]] = rows
    return out


def cut_columns(rows: Tensor, n: int) -> Tensor:
    """[R, Npad] to a fresh, contiguous [R, n]."""
    return rows[:, :n].clone(memory_format=torch.contiguous_format)
