# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels: one that rounds x to int8, one that multiplies, one that adds up slices of K.

Import this module only where Triton is wanted: it imports Triton. Shapes and tiles come from
:mod:`awqjit.backends.triton_plan`, calls from :mod:`awqjit.backends.triton`.

The weight is the operand with many rows: W^T [columns, K] times x^T [K, rows]. So a matrix unit's tall side always has
work, with one row of x too, and a word of the packed weight unpacks along K, where both operands are contiguous.

Multiply-adds are written as ``fma``, and the compiler is told not to form others: ``x * inverse`` has to be rounded
before it is rounded to an integer. ``INTERPRETED`` is true in Triton's interpreter, which keeps bf16 numbers as 16-bit
integers, multiplies these, and loses subnormal ones when it converts them. On a GPU it is false and costs nothing.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # the module can be imported; awqjit.backends.triton refuses to run it
    triton = None


def kernel(function):
    """Compiled once, whatever the number of rows, and before the first call for any of them."""
    return triton.jit(function, do_not_specialize=("rows", "size", "bucket")) if triton else function


def part(function):
    """A function that kernels call."""
    return triton.jit(function) if triton else function


@part
def widened(value, INTERPRETED: tl.constexpr):
    """fp16, bf16 or fp32 to fp32, exactly."""
    if INTERPRETED and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@kernel
def quantize(
    x,  # fp16, bf16 or fp32 [rows, K]
    x_stride,  # elements from one row to the next
    xq,  # int8 [rows, xq_stride], written up to K
    xq_stride,
    units,  # fp32 [groups, rows], written: amax / 127; 0 where a group counts as zero, NaN where it is not finite
    rows,
    depth,  # K
    groups,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # elements taken at a time: a power of two
    TAKEN: tl.constexpr,  # groups of one program: a power of two
    INTERPRETED: tl.constexpr,
):
    """Round x to int8, per row and group of K. Program (m, i): groups i * TAKEN and on, of row m."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TAKEN + tl.arange(0, TAKEN)
    start = group * GROUP
    stop = tl.minimum(start + GROUP, depth)
    # The largest magnitude, of the bits: NaN is above infinity, and infinity above every number.
    bits = tl.zeros([TAKEN], dtype=tl.int32)
    for offset in range(0, GROUP, BLOCK):
        k = start[:, None] + offset + tl.arange(0, BLOCK)[None, :]
        value = widened(tl.load(x + row * x_stride + k, mask=k < stop[:, None], other=0.0), INTERPRETED)
        magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits = tl.maximum(bits, tl.max(magnitude, axis=1))
    finite = bits < 0x7F800000
    used = finite & (bits >= 0x04000000)  # 2^-119
    full = tl.full([TAKEN], 127.0, dtype=tl.float32)
    amax = tl.where(used, bits.to(tl.float32, bitcast=True), full)
    inverse = tl.div_rn(full, amax)
    unit = tl.where(used, tl.div_rn(amax, full), tl.where(finite, 0.0, float("nan")))
    tl.store(units + tl.cast(group, tl.int64) * rows + row, unit, mask=group < groups)
    for offset in range(0, GROUP, BLOCK):
        k = start[:, None] + offset + tl.arange(0, BLOCK)[None, :]
        value = widened(tl.load(x + row * x_stride + k, mask=k < stop[:, None], other=0.0), INTERPRETED)
        value = tl.where(used[:, None], value, 0.0)
        # Adding 1.5 * 2^23 leaves no bits for a fraction: the sum is rounded half to even.
        whole = (value * inverse[:, None] + 12582912.0) - 12582912.0
        tl.store(xq + row * xq_stride + k, whole.to(tl.int8), mask=k < stop[:, None])


@part
def centred_tile(weight, zeros, column, column_words, first_word, words, group, padded, TILE: tl.constexpr):
    """int32 [columns, TILE]: q - z, of words first_word and on of each column; q is 0 past the last word."""
    word = first_word + tl.arange(0, TILE // 8)
    address = weight + column_words[:, None] + ((word // 4) * 64 + word % 4)[None, :]
    packed = tl.load(address, mask=(column < padded)[:, None] & (word < words)[None, :], other=0)
    nibbles = (packed[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    q = tl.reshape(nibbles, [column.shape[0], TILE])
    if zeros is None:
        return q - 8
    else:
        z = tl.load(zeros + tl.cast(group, tl.int64) * padded + column, mask=column < padded, other=0)
        return q - z.to(tl.int32)[:, None]


@part
def x_tile(x, address, k, row, rows, low, high, MASK_K: tl.constexpr):
    """[TILE, rows] of x^T; 0 outside of rows low to high - 1 of W and past the last row of x."""
    mask = (row < rows)[None, :]
    if MASK_K:
        mask = mask & ((k >= low) & (k < high))[:, None]
    return tl.load(x + address[None, :] + k[:, None], mask=mask, other=0)


@kernel
def multiply(
    x,  # w4a16: fp16, bf16 or fp32 [rows, K]; w4a8: int8 [rows, K]
    x_stride,  # elements from one row to the next
    units,  # w4a8: fp32 [groups, rows], what one step of x is worth; w4a16: None
    weight,  # int32 [padded / 16, blocks, 16, 4]: word j of a run of four holds k = 8 j to 8 j + 7 of 32, in order
    scales,  # fp16, bf16 or fp32 [groups, padded]
    zeros,  # uint8 [groups, padded], or None for 8
    bias,  # fp32 [columns], or None
    y,  # [rows, columns], or with slices of K fp32 [slices, rows, columns]
    rows,
    columns,  # N
    padded,  # N rounded up to a multiple of 16
    depth,  # K
    blocks,  # K / 32 rounded up
    steps,  # of the loop, in all slices together: tiles (w4a16) or groups (w4a8)
    slice_steps,  # of one slice
    bucket,  # what the tuner tells calls apart by; not used here
    GROUP: tl.constexpr,
    TILE: tl.constexpr,  # rows of W taken at a time: a power of two
    TILES: tl.constexpr,  # that hold a group
    ALIGNED: tl.constexpr,  # every group starts at a multiple of 8
    MASK_K: tl.constexpr,  # some tile reaches out of its group, or past K
    INT8: tl.constexpr,  # w4a8
    SLICED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of x of one program
    BLOCK_N: tl.constexpr,  # columns of W of one program
):
    """y = x W + bias, or the part of x W that one slice of K gives. Program (i, s): block i, slice s."""
    # Eight blocks of rows go with one block of columns before the next: what is read stays in the cache.
    row_blocks = tl.cdiv(rows, BLOCK_M)
    band = 8 * tl.cdiv(columns, BLOCK_N)
    first = tl.program_id(0) // band * 8
    height = tl.minimum(row_blocks - first, 8)
    row = (first + tl.program_id(0) % band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % band // height) * BLOCK_N + tl.arange(0, BLOCK_N)

    words = blocks * 4
    column_words = (column // 16).to(tl.int64) * blocks * 64 + column % 16 * 4
    address = row.to(tl.int64) * x_stride
    inside = column < padded
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    start = tl.program_id(1) * slice_steps
    stop = tl.minimum(start + slice_steps, steps)
    if INT8:
        for group in range(start, stop):
            low = group * GROUP
            high = tl.minimum(low + GROUP, depth)
            origin = low if ALIGNED else low // 8 * 8
            part = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
            for tile in range(TILES):
                k = origin + tile * TILE
                w = centred_tile(weight, zeros, column, column_words, k // 8, words, group, padded, TILE)
                v = x_tile(x, address, k + tl.arange(0, TILE), row, rows, low, high, MASK_K)
                part = tl.dot(w.to(tl.int8), v, part, out_dtype=tl.int32)
            s = tl.load(scales + tl.cast(group, tl.int64) * padded + column, mask=inside, other=0)
            d = tl.load(units + tl.cast(group, tl.int64) * rows + row, mask=row < rows, other=0)
            total = tl.fma(part.to(tl.float32), widened(s, INTERPRETED)[:, None] * d[None, :], total)
    else:
        for step in range(start, stop):
            group = step // TILES
            low = group * GROUP
            high = tl.minimum(low + GROUP, depth)
            k = (low if ALIGNED else low // 8 * 8) + step % TILES * TILE
            w = centred_tile(weight, zeros, column, column_words, k // 8, words, group, padded, TILE)
            v = x_tile(x, address, k + tl.arange(0, TILE), row, rows, low, high, MASK_K)
            if INTERPRETED:
                v = widened(v, INTERPRETED)
            # q - z is exact in every dtype of x. "ieee": fp32 is not to be shortened.
            part = tl.dot(w.to(v.dtype), v, input_precision="ieee", out_dtype=tl.float32)
            s = tl.load(scales + tl.cast(group, tl.int64) * padded + column, mask=inside, other=0)
            total = tl.fma(part, tl.broadcast_to(widened(s, INTERPRETED)[:, None], [BLOCK_N, BLOCK_M]), total)

    out = y + row.to(tl.int64)[None, :] * columns + column[:, None]
    if SLICED:
        out += tl.program_id(1).to(tl.int64) * rows * columns
    elif bias is not None:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[:, None]
    tl.store(out, total.to(y.dtype.element_ty), mask=(row < rows)[None, :] & (column < columns)[:, None])


@kernel
def add_slices(
    parts,  # fp32 [slices, rows, columns]
    bias,  # fp32 [columns], or None
    y,  # [rows, columns], written
    size,  # rows * columns
    columns,
    slices,
    BLOCK: tl.constexpr,
):
    """y = the slices' sum, in order, plus bias. Program i: elements i * BLOCK and on."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(slices):
        total += tl.load(parts + tl.cast(index, tl.int64) * size + at, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % columns, mask=inside, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
