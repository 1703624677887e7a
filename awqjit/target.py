# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU rows: which instructions each needs, the compiler flags that allow them, its tiles.

A feature is spelled as the ``flags`` line of ``/proc/cpuinfo`` spells it, which lists what the CPU has *and* the
operating system has switched on.
"""

from __future__ import annotations

from dataclasses import dataclass

from awqjit.errors import ArgumentError

DTYPES: tuple[str, ...] = ("bf16", "fp16", "fp32")

EVERY_ROWS = 1 << 30
"""More rows than any x has: as ``Tile.split_rows`` it leaves the prefill path out of a kernel."""


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut into register tiles.

    Attributes:
        rows: rows of x one prefill tile holds in registers, 32 where these are matrix tiles.
        blocks: 16-column blocks one prefill tile holds in registers.
        decode_rows: rows of x that one pass over the weights takes, splitting them in registers (the decode path).
        split_rows: largest M that runs in several such passes; 0 for one pass at most, EVERY_ROWS for any M. More rows
            share unpacked weights (the prefill path).
        row_chunk: rows of x a prefill job keeps in cache while it walks over the groups.
        prefetch: bytes ahead of the weight stream that decode prefetches into the L1 cache for one or two rows; for
            more it prefetches twice as far, into the L2 cache. 0 for none.
    """

    rows: int = 8
    blocks: int = 2
    decode_rows: int = 8
    row_chunk: int = 128
    prefetch: int = 4096
    split_rows: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("rows", 1, 32),
            ("blocks", 1, 8),
            ("decode_rows", 1, 16),
            ("row_chunk", 1, 4096),
            ("prefetch", 0, 1 << 20),
            ("split_rows", 0, EVERY_ROWS),
        ):
            if not low <= getattr(self, name) <= high:
                raise ArgumentError(f"Tile.{name}", getattr(self, name), f"{low} to {high}")

    @property
    def slug(self) -> str:
        split = f"s{self.split_rows}" if self.split_rows else ""
        return f"t{self.rows}x{self.blocks}d{self.decode_rows}c{self.row_chunk}p{self.prefetch}{split}"

    @property
    def decode_limit(self) -> int:
        """Largest M that runs the decode path."""
        return max(self.decode_rows, self.split_rows)

    @property
    def has_prefill(self) -> bool:
        """Whether some M runs the prefill path."""
        return self.split_rows < EVERY_ROWS


@dataclass(frozen=True)
class Vocabulary:
    """A file below ``templates/cpu/isa`` that spells the vector operations of one kind of dot product.

    Attributes:
        name: the file's name without its ending.
        steps: operands a word of 8 rows is split into, that is dot products per word.
        chains: independent accumulators that keep the dot product units busy, over all rows of a tile together
            (latency times instructions a cycle, over the registers of an accumulator).
        tile: register tiles that its accumulators and operands fit, whichever compiler builds them.
        tiled: prefill multiplies matrix tiles (``templates/cpu/amx``); only decode is written over the vocabulary.
        narrow_words: words whose products may be added in its narrow sums before these have to be widened into
            accumulators; 0 where dot products go into accumulators at once.
    """

    name: str
    steps: int
    chains: int
    tile: Tile = Tile()
    narrow_words: int = 0
    tiled: bool = False

    def chains_for(self, rows: int) -> int:
        """Accumulators each of ``rows`` rows gets: a power of two, so that unrolled words share them evenly."""
        chains = 1
        while chains * 2 * rows <= self.chains:
            chains *= 2
        return chains


VOCABULARIES: dict[str, Vocabulary] = {
    vocabulary.name: vocabulary
    for vocabulary in (
        # Splitting a word costs these so little that unpacked weights save nothing, however many rows there are.
        Vocabulary("avx512_vnni", steps=2, chains=8, tile=Tile(decode_rows=12, split_rows=EVERY_ROWS)),
        Vocabulary("avx512_bf16", steps=4, chains=8, tile=Tile(decode_rows=16, split_rows=EVERY_ROWS)),
        Vocabulary("avx512_int16", steps=2, chains=1, tile=Tile(split_rows=EVERY_ROWS), narrow_words=4),
        Vocabulary("avx512_fp32", steps=8, chains=8, tile=Tile(decode_rows=16, split_rows=EVERY_ROWS)),
        # Two tiles of 16 rows times two column blocks. A tile costs the same with one row as with 16.
        Vocabulary("amx_int8", steps=2, chains=8, tile=Tile(rows=32), tiled=True),
        Vocabulary("amx_bf16", steps=4, chains=8, tile=Tile(rows=32), tiled=True),
        # 16 registers of 8 columns: 5 rows of 16 columns and the operands; unpacked ones take less room, for 6 rows.
        Vocabulary("avx_vnni", steps=2, chains=4, tile=Tile(decode_rows=5, split_rows=EVERY_ROWS)),
        Vocabulary(
            "avx2_int16",
            steps=2,
            chains=1,
            tile=Tile(rows=6, blocks=1, decode_rows=4, split_rows=32),
            narrow_words=4,
        ),
        Vocabulary("avx2_fp32", steps=8, chains=2, tile=Tile(rows=6, blocks=1, decode_rows=4, split_rows=8)),
        # 32 registers of 4 columns. clang keeps all x of a tile in registers: 6 rows of int8 are too many for it.
        # Splitting into fp32 takes most registers and most of the time: one row, one chain.
        Vocabulary("neon_dot", steps=2, chains=4, tile=Tile(rows=5, blocks=1, decode_rows=4)),
        Vocabulary("neon_fp32", steps=8, chains=1, tile=Tile(rows=6, blocks=1, decode_rows=1)),
        Vocabulary("portable", steps=8, chains=1, tile=Tile(rows=2, blocks=1, decode_rows=2)),
    )
}


@dataclass(frozen=True)
class Target:
    """One compiled row.

    Attributes:
        name: the row's name in the selection table, in slugs and in ``AWQJIT_KERNEL``.
        features: CPU features without which its code must not be loaded; empty for any CPU.
        flags: compiler flags that allow exactly those instructions.
        vocabularies: (act_bits, dtype of x) -> name in :data:`VOCABULARIES`, every dtype of each mode it serves.
        machines: ``platform.machine()`` values it can run on; empty for any.
    """

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]
    vocabularies: dict[tuple[int, str], str]
    machines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ((bits, dtype) for bits in self.act_bits for dtype in DTYPES):
            if self.vocabularies.get(key) not in VOCABULARIES:
                raise ArgumentError(f"Target.vocabularies[{key}]", self.vocabularies.get(key), ", ".join(VOCABULARIES))

    @property
    def act_bits(self) -> tuple[int, ...]:
        """Compute modes it serves: 8 (w4a8), 16 (w4a16)."""
        return tuple(sorted({bits for bits, _ in self.vocabularies}))

    def vocabulary(self, act_bits: int, x_dtype: str) -> Vocabulary:
        return VOCABULARIES[self.vocabularies[act_bits, x_dtype]]

    def tile(self, act_bits: int, x_dtype: str) -> Tile:
        """The register tiles it is built with unless a spec says otherwise."""
        return self.vocabulary(act_bits, x_dtype).tile


_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")
# Before it hands out registers gcc moves loads up, and then spills them; clang has no such flag and would say so.
# (And -mcpu, as zig reads it and not -march.)
_ARM_FLAGS = ("-fno-schedule-insns", "-Wno-ignored-optimization-argument")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})


def _each(vocabulary: str, *act_bits: int) -> dict[tuple[int, str], str]:
    """One vocabulary for every dtype of x, in these modes."""
    return {(bits, dtype): vocabulary for bits in act_bits for dtype in DTYPES}


TARGETS: tuple[Target, ...] = (
    Target(
        name="amx_int8",
        features=_AVX512 | {"avx512_vnni", "amx_tile", "amx_int8"},
        flags=(*_AVX512_FLAGS, "-mavx512vnni", "-mamx-tile", "-mamx-int8"),
        vocabularies=_each("amx_int8", 8),
        machines=_X86,
    ),
    Target(
        name="avx512_vnni",
        features=_AVX512 | {"avx512_vnni"},
        flags=(*_AVX512_FLAGS, "-mavx512vnni"),
        vocabularies=_each("avx512_vnni", 8),
        machines=_X86,
    ),
    Target(
        name="avx_vnni",
        features=_AVX2 | {"avx_vnni"},
        flags=(*_AVX2_FLAGS, "-mavxvnni"),
        vocabularies=_each("avx_vnni", 8),
        machines=_X86,
    ),
    Target(
        name="avx512bw",
        features=_AVX512,
        flags=_AVX512_FLAGS,
        vocabularies=_each("avx512_int16", 8),
        machines=_X86,
    ),
    Target(
        name="amx_bf16",
        features=_AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
        flags=(*_AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        # fp16 and fp32 activations have more bits than a bf16 tile takes: they run on fp32 FMA.
        vocabularies={**_each("avx512_fp32", 16), (16, "bf16"): "amx_bf16"},
        machines=_X86,
    ),
    Target(
        name="avx512_bf16",
        features=_AVX512 | {"avx512_bf16"},
        flags=(*_AVX512_FLAGS, "-mavx512bf16"),
        # fp16 and fp32 activations have more bits than a bf16 dot product takes: they run on fp32 FMA.
        vocabularies={**_each("avx512_fp32", 16), (16, "bf16"): "avx512_bf16"},
        machines=_X86,
    ),
    Target(
        name="avx512",
        features=_AVX512,
        flags=_AVX512_FLAGS,
        vocabularies=_each("avx512_fp32", 16),
        machines=_X86,
    ),
    Target(
        name="avx2",
        features=_AVX2,
        flags=_AVX2_FLAGS,
        vocabularies={**_each("avx2_int16", 8), **_each("avx2_fp32", 16)},
        machines=_X86,
    ),
    Target(
        name="neon_dot",
        features=frozenset({"asimd", "asimddp"}),
        flags=("-mcpu=generic+dotprod", *_ARM_FLAGS),
        vocabularies=_each("neon_dot", 8),
        machines=_ARM,
    ),
    Target(
        name="neon",
        features=frozenset({"asimd"}),
        flags=("-mcpu=generic", *_ARM_FLAGS),
        vocabularies=_each("neon_fp32", 16),
        machines=_ARM,
    ),
    Target(
        name="portable",
        features=frozenset(),
        # Vectors wider than the CPU's are passed to inlined functions only: the ABI gcc warns about is never used.
        flags=("-Wno-psabi",),
        vocabularies=_each("portable", 8, 16),
    ),
)


def target(name: str) -> Target:
    """The row of that name.

    Raises:
        ArgumentError: there is no such row.
    """
    for row in TARGETS:
        if row.name == name:
            return row
    raise ArgumentError("target", name, f"one of {', '.join(row.name for row in TARGETS)}")
