# SPDX-License-Identifier: Apache-2.0
"""An independent packer and unpacker of AWQ and GPTQ tensors: one nibble at a time, in plain Python over NumPy arrays.

It shares no code with the library, on purpose: a packer and an unpacker with the same mistake agree with each other.
Both formats are written here from their producers' arithmetic (AutoAWQ's GEMM linear, AutoGPTQ's and GPTQModel's).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

# AutoAWQ walks the nibbles of a word from the lowest: its i-th holds the column at this offset.
AWQ_COLUMN_OF_NIBBLE = {0: 0, 1: 2, 2: 4, 3: 6, 4: 1, 5: 3, 6: 5, 7: 7}


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _nibble(word: int, i: int) -> int:
    return ((int(word) % (1 << 32)) // 16**i) % 16


def _pack_along_columns(values: NDArray[np.integer], offset_of_nibble: dict[int, int]) -> IntArray:
    rows, columns = values.shape
    assert columns % 8 == 0
    words = np.zeros((rows, columns // 8), dtype=np.int32)
    for row in range(rows):
        for c in range(columns // 8):
            word = 0
            for i in range(8):
                word += int(values[row, 8 * c + offset_of_nibble[i]]) * 16**i
            words[row, c] = _signed(word)
    return words


def _unpack_along_columns(words: IntArray, offset_of_nibble: dict[int, int]) -> IntArray:
    values = np.zeros((words.shape[0], 8 * words.shape[1]), dtype=np.int32)
    for row in range(words.shape[0]):
        for c in range(words.shape[1]):
            for i in range(8):
                values[row, 8 * c + offset_of_nibble[i]] = _nibble(words[row, c], i)
    return values


_STRAIGHT = {i: i for i in range(8)}


def pack_awq(q: NDArray[np.integer], z: NDArray[np.integer]) -> tuple[IntArray, IntArray]:
    """q [K, N] and z [G, N] -> AWQ gemm qweight [K, N / 8] and qzeros [G, N / 8]."""
    return _pack_along_columns(q, AWQ_COLUMN_OF_NIBBLE), _pack_along_columns(z, AWQ_COLUMN_OF_NIBBLE)


def unpack_awq(qweight: IntArray, qzeros: IntArray) -> tuple[IntArray, IntArray]:
    """AWQ gemm qweight and qzeros -> q [K, N] and z [G, N]."""
    return _unpack_along_columns(qweight, AWQ_COLUMN_OF_NIBBLE), _unpack_along_columns(qzeros, AWQ_COLUMN_OF_NIBBLE)


def pack_gptq(q: NDArray[np.integer], z: NDArray[np.integer], *, v2: bool) -> tuple[IntArray, IntArray]:
    """q [K, N] and z [G, N] -> GPTQ qweight [K / 8, N] and qzeros [G, N / 8]."""
    rows, columns = q.shape
    assert rows % 8 == 0
    qweight = np.zeros((rows // 8, columns), dtype=np.int32)
    for r in range(rows // 8):
        for column in range(columns):
            word = 0
            for i in range(8):
                word += int(q[8 * r + i, column]) * 16**i
            qweight[r, column] = _signed(word)
    stored = np.array([[int(value) if v2 else (int(value) + 15) % 16 for value in row] for row in z]).reshape(z.shape)
    return qweight, _pack_along_columns(stored, _STRAIGHT)


def unpack_gptq(qweight: IntArray, qzeros: IntArray, *, v2: bool) -> tuple[IntArray, IntArray]:
    """GPTQ qweight and qzeros -> q [K, N] and z [G, N]."""
    q = np.zeros((8 * qweight.shape[0], qweight.shape[1]), dtype=np.int32)
    for r in range(qweight.shape[0]):
        for column in range(qweight.shape[1]):
            for i in range(8):
                q[8 * r + i, column] = _nibble(qweight[r, column], i)
    z = _unpack_along_columns(qzeros, _STRAIGHT)
    return q, z if v2 else (z + 1) % 16


def dequantize(
    q: NDArray[np.integer], z: NDArray[np.integer], s: NDArray[np.floating], group: int
) -> NDArray[np.float64]:
    """(q - z) * s in float64, one weight at a time."""
    out = np.zeros(q.shape, dtype=np.float64)
    for k in range(q.shape[0]):
        for n in range(q.shape[1]):
            g = k // group
            out[k, n] = (int(q[k, n]) - int(z[g, n])) * float(s[g, n])
    return out
