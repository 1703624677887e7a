# SPDX-License-Identifier: Apache-2.0
"""An independent packer and unpacker of checkpoint tensors: one value at a time, in plain Python over NumPy arrays.

It shares no code with the library, on purpose: a packer and an unpacker with the same mistake agree with each other.
The formats are written here from their producers' arithmetic (AutoAWQ's GEMM and GEMV linears, GPTQModel's and
AutoRound's packers, compressed-tensors' pack-quantized compressor).
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


def _pack_rows(values: NDArray[np.integer], bits: int = 4) -> IntArray:
    """[R, C] -> words [ceil(R / per), C], per = 32 / bits values of one column in each, the first one lowest."""
    per = 32 // bits
    rows, columns = values.shape
    words = np.zeros((-(-rows // per), columns), dtype=np.int32)
    for r in range(words.shape[0]):
        for column in range(columns):
            word = 0
            for i in range(per):
                if per * r + i < rows:
                    word += int(values[per * r + i, column]) * (1 << bits) ** i
            words[r, column] = _signed(word)
    return words


def _unpack_rows(words: IntArray, rows: int, bits: int = 4) -> IntArray:
    per = 32 // bits
    values = np.zeros((rows, words.shape[1]), dtype=np.int32)
    for row in range(rows):
        for column in range(words.shape[1]):
            word = int(words[row // per, column]) % (1 << 32)
            values[row, column] = word // (1 << bits) ** (row % per) % (1 << bits)
    return values


def _add_to_words(words: IntArray, amount: int) -> IntArray:
    flat = [_signed((int(word) + amount) % (1 << 32)) for word in words.reshape(-1)]
    return np.array(flat, dtype=np.int32).reshape(words.shape)


def pack_gptq(q: NDArray[np.integer], z: NDArray[np.integer], *, v2: bool, bits: int = 4) -> tuple[IntArray, IntArray]:
    """q [K, N] and z [G, N] -> GPTQ qweight [ceil(K bits / 32), N] and qzeros [G, ceil(N bits / 32)].

    Version 1 is made from version 2 as its packers do it: whole words minus 1 in every field, with borrows.
    """
    qzeros = _pack_rows(z.T, bits).T.copy()
    ones = sum((1 << bits) ** i for i in range(32 // bits))
    return _pack_rows(q, bits), qzeros if v2 else _add_to_words(qzeros, -ones)


def unpack_gptq(qweight: IntArray, qzeros: IntArray, *, v2: bool, k: int = 0, n: int = 0) -> tuple[IntArray, IntArray]:
    """GPTQ qweight and qzeros -> q [K, N] and z [G, N]; k and n only where they do not fill their words."""
    words = qzeros if v2 else _add_to_words(qzeros, 0x11111111)
    z = _unpack_rows(words.T.copy(), n or qweight.shape[1]).T
    return _unpack_rows(qweight, k or 8 * qweight.shape[0]), z


def pack_gemv(
    q: NDArray[np.integer], z: NDArray[np.integer], s: NDArray[np.floating], group: int
) -> tuple[IntArray, IntArray, NDArray[np.floating]]:
    """q [K, N], z [G, N], s [G, N] -> AWQ gemv qweight [N, K / 8], qzeros [N, Z], scales [N, 8 Z]."""
    (k, n), groups = q.shape, z.shape[0]
    assert k % 8 == 0
    width = -(-groups // 8)
    if group == 64:
        width += width % 2
    elif group == 32:
        width += -width % 4
    qweight, qzeros = np.zeros((n, k // 8), dtype=np.int32), np.zeros((n, width), dtype=np.int32)
    scales = np.zeros((n, 8 * width), dtype=s.dtype)
    for column in range(n):
        for c in range(k // 8):
            qweight[column, c] = _signed(sum(int(q[8 * c + i, column]) * 16**i for i in range(8)))
        for c in range(width):
            nibbles = [int(z[8 * c + i, column]) if 8 * c + i < groups else 0 for i in range(8)]
            qzeros[column, c] = _signed(sum(nibble * 16**i for i, nibble in enumerate(nibbles)))
        for g in range(groups):
            scales[column, g] = s[g, column]
    return qweight, qzeros, scales


def pack_quantized(
    q: NDArray[np.integer], z: NDArray[np.integer] | None, *, bits: int = 4
) -> tuple[IntArray, IntArray | None]:
    """q [K, N] and z [G, N] -> compressed-tensors weight_packed [N, ceil(K bits / 32)] and weight_zero_point.

    Its producer has signed values and adds half the range to them when it packs: here they go that way and back.
    """
    half = 1 << (bits - 1)
    signed = q.T.astype(np.int32) - half
    packed = _pack_rows((signed + half).T, bits).T.copy()
    return packed, None if z is None else _pack_rows((z.T.astype(np.int32) - half) + half, bits)


def dequantize(
    q: NDArray[np.integer],
    z: NDArray[np.integer],
    s: NDArray[np.floating],
    group: int,
    g_idx: NDArray[np.integer] | None = None,
) -> NDArray[np.float64]:
    """(q - z) * s in float64, one weight at a time."""
    out = np.zeros(q.shape, dtype=np.float64)
    for k in range(q.shape[0]):
        for n in range(q.shape[1]):
            g = k // group if g_idx is None else int(g_idx[k])
            out[k, n] = (int(q[k, n]) - int(z[g, n])) * float(s[g, n])
    return out
