# SPDX-License-Identifier: Apache-2.0
"""Vectors of 16 columns for functions that numba compiles: LLVM's own vector types, which fit any CPU's registers.

Written as loops over arrays the same code keeps its sums in memory, because LLVM vectorises innermost loops only.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from awqjit.layout import BLOCK

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a packed word that holds its row 0, 1, ... 7."""

_TWO_23 = 0x4B000000  # the bits of 2^23: or-ing a small whole number into them gives the number 2^23 + it


@dataclass(frozen=True)
class Tile:
    """What a tile of some rows and 16 columns does; sums are tuples of rows * chains vectors.

    Attributes:
        start: ``start() -> sums``: zeros.
        dot: ``dot(sums, words, zeros, x) -> sums``: adds 8 rows of W, words at an address, times x at an address,
            fp32 [8, rows].
        carry: ``carry(sums, totals) -> totals``: adds whole numbers to int32 ones, exactly.
        totals: ``totals() -> totals``: zeros.
        finish16: ``finish16(sums, scales, y, stride)``: y += sums * scales, y fp32 [rows, 16] at an address, ``stride``
            bytes from row to row.
        finish8: ``finish8(sums, totals, scales, units, y, stride)``: y = fma(fp32(sums + totals), units * scales, y),
            units fp32 [rows] at an address.
        clear: ``clear(y, stride)``: y = 0.
        add: ``add(y, stride, bias)``: y += bias, fp32 [16] at an address.
    """

    start: Callable[..., Any]
    dot: Callable[..., Any]
    carry: Callable[..., Any]
    totals: Callable[..., Any]
    finish16: Callable[..., Any]
    finish8: Callable[..., Any]
    clear: Callable[..., Any]
    add: Callable[..., Any]


@dataclass(frozen=True)
class Vocabulary:
    """Addresses are int64 numbers of bytes.

    Attributes:
        load_float, load_bits: 4 bytes at an address, as fp32 and as int32.
        store_float: ``store_float(address, value)``.
        load_scales: dtype of the scales -> ``load(address)``: 16 of them as fp32.
        load_zeros: 16 bytes as a tile's dot product takes zero points; of the address 0 all are 8.
        set_mode: ``set_mode(mode) -> mode before``: the calling thread's floating-point mode; see :data:`DEFINED`.
    """

    load_float: Callable[..., Any]
    load_bits: Callable[..., Any]
    store_float: Callable[..., Any]
    load_scales: dict[str, Callable[..., Any]]
    load_zeros: Callable[..., Any]
    set_mode: Callable[..., Any]
    tile: Callable[[int, int], Tile]


DEFINED = 0x1F80
"""The mode that arithmetic is defined in: subnormal numbers are numbers, rounding is to the nearest, nothing traps."""


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """The vocabulary. Imports numba.

    Raises:
        ImportError: numba is not installed, or refuses this Python or NumPy.
    """
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic, models, register_model

    i8, i16, i32, f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
    wide = {element: ir.VectorType(element, BLOCK) for element in (i8, i16, i32, f32)}

    class FloatsType(types.Type):
        """16 fp32 numbers in registers."""

    class IntsType(types.Type):
        """16 int32 numbers in registers."""

    for kind, element in ((FloatsType, f32), (IntsType, i32)):

        def model(manager: Any, fe_type: Any, element: Any = element) -> Any:
            return models.PrimitiveModel(manager, fe_type, wide[element])

        register_model(kind)(model)
    floats, ints, address = FloatsType("awqjit.Floats"), IntsType("awqjit.Ints"), types.int64

    def define(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
        """An intrinsic: ``emit(builder, *arguments)`` gives the LLVM value of the result."""

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result is types.void else value

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope: dict[str, Any] = {"signature": result(*arguments), "codegen": codegen}
        # numba checks the number of arguments against the function's own.
        exec(f"def typer(context{', ' if names else ''}{names}):\n    return signature, codegen", scope)
        return intrinsic(scope["typer"])

    def splat(builder: Any, value: Any) -> Any:
        vector = builder.insert_element(ir.Constant(wide[value.type], ir.Undefined), value, ir.Constant(i32, 0))
        return builder.shuffle_vector(vector, vector, ir.Constant(wide[i32], None))

    def same(element: Any, value: float) -> Any:
        return ir.Constant(wide[element], [value] * BLOCK)

    def load(builder: Any, place: Any, kind: Any, align: int, offset: int = 0) -> Any:
        at = builder.add(place, ir.Constant(place.type, offset)) if offset else place
        return builder.load(builder.inttoptr(at, kind.as_pointer()), align=align)

    def store(builder: Any, value: Any, place: Any, align: int = 4) -> None:
        builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=align)

    def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        """One of LLVM's own functions."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding."""
        return call(builder, f"llvm.fma.v{BLOCK}f32", wide[f32], a, b, c)

    # Scales.

    def load_fp32(builder: Any, place: Any) -> Any:
        return load(builder, place, wide[f32], 4)

    def load_bf16(builder: Any, place: Any) -> Any:
        bits = builder.zext(load(builder, place, wide[i16], 2), wide[i32])
        return builder.bitcast(builder.shl(bits, same(i32, 16)), wide[f32])

    def load_fp16(builder: Any, place: Any) -> Any:
        # By hand: without F16C LLVM would call a function of a run-time library that is not there.
        bits = builder.zext(load(builder, place, wide[i16], 2), wide[i32])
        magnitude = builder.and_(bits, same(i32, 0x7FFF))
        # The exponent's bias is 15 there and 127 here. The product is exact, of subnormal numbers too.
        moved = builder.bitcast(builder.shl(magnitude, same(i32, 13)), wide[f32])
        number = builder.bitcast(builder.fmul(moved, same(f32, 2.0**112)), wide[i32])
        special = builder.icmp_unsigned(">=", magnitude, same(i32, 0x7C00))  # infinity and NaN keep an exponent of ones
        number = builder.or_(number, builder.select(special, same(i32, 0x7F800000), same(i32, 0)))
        sign = builder.shl(builder.and_(bits, same(i32, 0x8000)), same(i32, 16))
        return builder.bitcast(builder.or_(number, sign), wide[f32])

    def load_zeros(builder: Any, place: Any) -> Any:
        none = builder.icmp_signed("==", place, ir.Constant(place.type, 0))
        result = cgutils.alloca_once_value(builder, same(i32, 8))
        with builder.if_then(builder.not_(none)):
            builder.store(builder.zext(load(builder, place, wide[i8], 1), wide[i32]), result)
        return builder.bitcast(builder.or_(builder.load(result), same(i32, _TWO_23)), wide[f32])

    # The thread's mode.

    def set_mode(builder: Any, mode: Any) -> Any:
        if platform.machine() not in ("x86_64", "AMD64"):
            return mode
        cells = cgutils.alloca_once(builder, i32), cgutils.alloca_once(builder, i32)
        before, after = (builder.bitcast(cell, i8.as_pointer()) for cell in cells)
        call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), before)
        builder.store(mode, cells[1])
        call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), after)
        return builder.load(cells[0])

    def tile(rows: int, chains: int) -> Tile:
        sums_type = types.UniTuple(floats, rows * chains)
        totals_type = types.UniTuple(ints, rows)

        def parts(builder: Any, value: Any) -> list[Any]:
            return [builder.extract_value(value, i) for i in range(value.type.count)]

        def whole(builder: Any, values: Sequence[Any]) -> Any:
            result = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
            for i, value in enumerate(values):
                result = builder.insert_value(result, value, i)
            return result

        def dot(builder: Any, sums: Any, words: Any, zeros: Any, x: Any) -> Any:
            values, word = parts(builder, sums), load(builder, words, wide[i32], 4)
            for row, nibble in enumerate(NIBBLES):
                bits = builder.and_(builder.lshr(word, same(i32, 4 * nibble)), same(i32, 15))
                bits = builder.or_(bits, same(i32, _TWO_23))
                # (2^23 + q) - (2^23 + z): exact.
                centred = builder.fsub(builder.bitcast(bits, wide[f32]), zeros)
                for m in range(rows):
                    at = m * chains + row % chains
                    factor = splat(builder, load(builder, x, f32, 4, 4 * (row * rows + m)))
                    # One instruction where the CPU has it. Both forms are right: whole numbers add exactly, and w4a16
                    # has no fixed order of sums either.
                    product = builder.fmul(centred, factor, flags=("contract",))
                    values[at] = builder.fadd(values[at], product, flags=("contract",))
            return whole(builder, values)

        def joined(builder: Any, sums: Any) -> list[Any]:
            """One sum a row."""
            values, result = parts(builder, sums), []
            for m in range(rows):
                own = values[m * chains : (m + 1) * chains]
                while len(own) > 1:
                    own = [builder.fadd(own[i], own[i + 1]) for i in range(0, len(own), 2)]
                result += own
            return result

        def each_row(builder: Any, y: Any, stride: Any) -> Any:
            for m in range(rows):
                yield builder.add(y, builder.mul(stride, ir.Constant(stride.type, m)))

        def carry(builder: Any, sums: Any, totals: Any) -> Any:
            pairs = zip(joined(builder, sums), parts(builder, totals), strict=True)
            return whole(builder, [builder.add(builder.fptosi(value, wide[i32]), total) for value, total in pairs])

        def finish16(builder: Any, sums: Any, scales: Any, y: Any, stride: Any) -> None:
            for value, place in zip(joined(builder, sums), each_row(builder, y, stride), strict=True):
                product = builder.fmul(value, scales)
                store(builder, builder.fadd(load(builder, place, wide[f32], 4), product), place)

        def finish8(builder: Any, sums: Any, totals: Any, scales: Any, units: Any, y: Any, stride: Any) -> None:
            values = parts(builder, carry(builder, sums, totals))
            for m, (value, place) in enumerate(zip(values, each_row(builder, y, stride), strict=True)):
                step = builder.fmul(splat(builder, load(builder, units, f32, 4, 4 * m)), scales)
                product = builder.sitofp(value, wide[f32])
                store(builder, fused(builder, product, step, load(builder, place, wide[f32], 4)), place)

        def clear(builder: Any, y: Any, stride: Any) -> None:
            for place in each_row(builder, y, stride):
                store(builder, ir.Constant(wide[f32], None), place)

        def add(builder: Any, y: Any, stride: Any, bias: Any) -> None:
            for place in each_row(builder, y, stride):
                sum_ = builder.fadd(load(builder, place, wide[f32], 4), load(builder, bias, wide[f32], 4))
                store(builder, sum_, place)

        no_sums, no_totals = (
            ir.Constant(ir.ArrayType(wide[element], count), None)
            for element, count in ((f32, rows * chains), (i32, rows))
        )
        return Tile(
            start=define(sums_type, (), lambda builder: no_sums),
            dot=define(sums_type, (sums_type, address, floats, address), dot),
            carry=define(totals_type, (sums_type, totals_type), carry),
            totals=define(totals_type, (), lambda builder: no_totals),
            finish16=define(types.void, (sums_type, floats, address, address), finish16),
            finish8=define(types.void, (sums_type, totals_type, floats, address, address, address), finish8),
            clear=define(types.void, (address, address), clear),
            add=define(types.void, (address, address, address), add),
        )

    return Vocabulary(
        load_float=define(types.float32, (address,), lambda builder, place: load(builder, place, f32, 4)),
        load_bits=define(types.int32, (address,), lambda builder, place: load(builder, place, i32, 4)),
        store_float=define(
            types.void, (address, types.float32), lambda builder, place, value: store(builder, value, place)
        ),
        load_scales={
            "fp32": define(floats, (address,), load_fp32),
            "bf16": define(floats, (address,), load_bf16),
            "fp16": define(floats, (address,), load_fp16),
        },
        load_zeros=define(floats, (address,), load_zeros),
        set_mode=define(types.int32, (types.int32,), set_mode),
        tile=tile,
    )
