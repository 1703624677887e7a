# SPDX-License-Identifier: Apache-2.0
"""The two loops of a numba kernel, compiled once per process and mode: shapes and dtypes are run-time arguments.

Both have the C signature of torch's thread pool, ``void (int64 begin, int64 end, void *argument)``. The argument points
to int64 numbers, named in :data:`FIELDS`.

x is made ready in tiles of 8 (where the CPU has the registers), 4, 2 or 1 rows: tile after tile, in each the packed
rows of W in order (padding is zero), for each of them one number a row of x. So the multiplication reads it front to
back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from awqjit.backends.numba_vectors import DEFINED, vocabulary

FIELDS: tuple[str, ...] = (
    "x",  # fp32 [rows, K]
    "x_stride",  # elements
    "rows",
    "k",
    "group",  # rows of W that share a scale
    "groups",
    "group_padded",  # a multiple of 8
    "packed",  # packed rows of W, all groups
    "weight",  # int32 [blocks, packed / 8, 16]
    "scales",  # [blocks, groups, 16]
    "scale_kind",  # place in SCALE_KINDS
    "zeros",  # uint8 [blocks, groups, 16], or 0
    "bias",  # fp32 [blocks * 16], or 0
    "ready",  # fp32 [rows, packed], in tiles
    "units",  # w4a8: fp32 [rows, groups], in the same tiles: what one step of x is worth
    "y",  # fp32 [rows, blocks * 16]
    "blocks",
    "row_chunk",  # rows of x that one job multiplies; a multiple of 8
)
"""What the argument of both bodies points to, in order. All int64; pointers are addresses."""

SCALE_KINDS: tuple[str, ...] = ("fp32", "bf16", "fp16")

_EXACT_ROWS = 8192  # 127 * 15 * 8192 is below 2^24: a sum of so many products of whole numbers is exact in fp32


@dataclass(frozen=True)
class Bodies:
    """Addresses of the compiled functions, and what keeps them alive.

    Attributes:
        prepare: units begin..end-1; unit u is group u % groups of row u // groups.
        multiply: jobs begin..end-1; job j is block j % blocks of row chunk j // blocks.
        functions: numba's objects.
    """

    prepare: int
    multiply: int
    functions: tuple[Any, ...]


@lru_cache(maxsize=2)
def compiled(act_bits: int) -> Bodies:
    """Compile both bodies of a mode. Hold :data:`lock` around it.

    Raises:
        ImportError: numba is not installed, or refuses this Python or NumPy.
    """
    from numba import cfunc, types

    signature = types.void(types.int64, types.int64, types.voidptr)
    # As in C, a division does not look for a zero first: nothing in a body can raise.
    compile_: Any = cfunc(signature, error_model="numpy")
    prepare, multiply = compile_(_prepare(act_bits)), compile_(_multiply(act_bits))
    return Bodies(prepare.address, multiply.address, (prepare, multiply))


lock = threading.RLock()
"""Held while numba compiles. A fork waits for it: in the child, numba's own locks would stay locked for ever."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def _prepare(act_bits: int) -> Callable[..., None]:
    """The body that copies a group of a row, or rounds it to int8 values."""
    import numpy as np
    from numba import carray, njit

    words = vocabulary()
    load_float, load_bits, store_float, set_mode = words.load_float, words.load_bits, words.store_float, words.set_mode
    int8, fields = act_bits == 8, len(FIELDS)
    # Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded half to even.
    one, whole, zero, nan = (np.float32(value) for value in (127.0, 12582912.0, 0.0, np.nan))
    tile_of = _tile_of()

    @njit(error_model="numpy")
    def units(begin: int, end: int, a: Any) -> None:
        x, stride, rows, k, group, groups, padded, packed = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        ready, unit = a[13], a[14]
        for u in range(begin, end):
            m, g = u // groups, u % groups
            first, height = tile_of(m, rows)
            source = x + 4 * (m * stride + g * group)
            count = min(group, k - g * group)
            target = ready + 4 * (first * packed + g * padded * height + m - first)
            inverse = zero
            if int8:
                largest = np.int32(0)  # magnitudes compared as bits: a NaN is larger than everything and is not lost
                amax, step = zero, zero
                for i in range(count):
                    magnitude = load_bits(source + 4 * i) & np.int32(0x7FFFFFFF)
                    if magnitude > largest:
                        largest, amax = magnitude, abs(load_float(source + 4 * i))
                if largest >= np.int32(0x7F800000):
                    step = nan  # inf or NaN: the row becomes NaN
                elif largest >= np.int32(0x04000000):  # 2^-119, below which a group is taken for zero
                    inverse, step = one / amax, amax / one
                store_float(unit + 4 * (first * groups + g * height + m - first), step)
            for i in range(count):
                value = load_float(source + 4 * i)
                if int8:
                    value = zero if inverse == zero else value * inverse + whole - whole
                store_float(target + 4 * i * height, value)
            for i in range(count, (count + 7) // 8 * 8):
                store_float(target + 4 * i * height, zero)

    def prepare(begin: int, end: int, argument: Any) -> None:
        before = set_mode(np.int32(DEFINED))
        units(begin, end, carray(argument, (fields,), np.int64))
        set_mode(before)

    return prepare


def _multiply(act_bits: int) -> Callable[..., None]:
    """The body that multiplies a chunk of rows with a block of columns."""
    import numpy as np
    from numba import carray, njit

    set_mode, fields = vocabulary().set_mode, len(FIELDS)
    # The fewer rows, the more sums a row: enough of them to hide how long one takes.
    tile4, tile2, tile1 = (_tile(act_bits, rows, chains) for rows, chains in ((4, 2), (2, 4), (1, 4)))
    tile8 = _tile(act_bits, 8, 1) if _highest_tile() == 8 else tile4
    tile_of = _tile_of()

    @njit(error_model="numpy")
    def jobs(begin: int, end: int, a: Any) -> None:
        rows, blocks, chunk = a[2], a[16], a[17]
        for job in range(begin, end):
            block = job % blocks
            m = job // blocks * chunk
            last = min(rows, m + chunk)
            while m < last:
                _, height = tile_of(m, rows)
                if height == 8:
                    tile8(m, block, a)
                elif height == 4:
                    tile4(m, block, a)
                elif height == 2:
                    tile2(m, block, a)
                else:
                    tile1(m, block, a)
                m += height

    def multiply(begin: int, end: int, argument: Any) -> None:
        before = set_mode(np.int32(DEFINED))
        jobs(begin, end, carray(argument, (fields,), np.int64))
        set_mode(before)

    return multiply


@lru_cache(maxsize=1)
def _tile_of() -> Any:
    from numba import njit

    highest = _highest_tile()

    @njit(error_model="numpy")
    def tile_of(m: int, rows: int) -> tuple[int, int]:
        """First row and number of rows of the tile that row m is in."""
        first, height = m // highest * highest, highest
        while rows - first < height or m >= first + height:
            if rows - first >= height:
                first += height
            height //= 2
        return first, height

    return tile_of


def _highest_tile() -> int:
    """Rows of the highest tile whose sums stay in registers."""
    from llvmlite import binding

    return 8 if binding.get_host_cpu_features().get("avx512f") else 4


def _tile(act_bits: int, rows: int, chains: int) -> Any:
    """``tile(first row, block, fields)``: ``rows`` rows of y in one block of 16 columns."""
    from numba import njit

    words = vocabulary()
    load_zeros = words.load_zeros
    load_fp32, load_bf16, load_fp16 = (words.load_scales[kind] for kind in SCALE_KINDS)
    tile = words.tile(rows, chains)
    start, dot, carry, no_totals = tile.start, tile.dot, tile.carry, tile.totals
    finish8, finish16, clear, add = tile.finish8, tile.finish16, tile.clear, tile.add
    int8, most = act_bits == 8, _EXACT_ROWS

    @njit(error_model="numpy")
    def multiply_tile(m: int, block: int, a: Any) -> None:
        k, group, groups, packed = a[3], a[4], a[5], a[7]
        scale_kind, zeros, bias, blocks = a[10], a[11], a[12], a[16]
        word, stride = a[8] + block * packed * 8, blocks * 64
        x, unit, y = a[13] + 4 * m * packed, a[14] + 4 * m * groups, a[15] + m * stride + block * 64
        clear(y, stride)
        for g in range(groups):
            at = (block * groups + g) * 16
            zero = load_zeros(zeros + at if zeros else 0)
            left = (min(group, k - g * group) + 7) // 8
            sums, totals = start(), no_totals()
            while left > 0:
                count = min(left, most // 8) if int8 else left
                for _ in range(count):
                    sums = dot(sums, word, zero, x)
                    word += 64
                    x += 32 * rows
                left -= count
                if int8 and left > 0:
                    totals = carry(sums, totals)
                    sums = start()
            if scale_kind == 0:
                scale = load_fp32(a[9] + 4 * at)
            elif scale_kind == 1:
                scale = load_bf16(a[9] + 2 * at)
            else:
                scale = load_fp16(a[9] + 2 * at)
            if int8:
                finish8(sums, totals, scale, unit + 4 * g * rows, y, stride)
            else:
                finish16(sums, scale, y, stride)
        if bias:
            add(y, stride, bias + block * 64)

    return multiply_tile
