# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU rows: which instructions each needs, the compiler flags that allow them, its tiles.

A feature is spelled as the ``flags`` line of ``/proc/cpuinfo`` spells it, which lists what the CPU has *and* the
operating system has switched on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from awqjit.errors import ArgumentError

DTYPES: tuple[str, ...] = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut into register tiles.

    Attributes:
        rows: rows of x one prefill tile holds in registers.
        blocks: 16-column blocks one prefill tile holds in registers.
        decode_rows: largest M that runs the decode path (weights split in registers, one pass).
        row_chunk: rows of x a prefill job keeps in cache while it walks over the groups.
        prefetch: bytes ahead of the weight stream that decode prefetches.
    """

    rows: int = 8
    blocks: int = 2
    decode_rows: int = 8
    row_chunk: int = 128
    prefetch: int = 8192

    def __post_init__(self) -> None:
        for name, low, high in (
            ("rows", 1, 16),
            ("blocks", 1, 8),
            ("decode_rows", 1, 16),
            ("row_chunk", 1, 4096),
            ("prefetch", 0, 1 << 20),
        ):
            if not low <= getattr(self, name) <= high:
                raise ArgumentError(f"Tile.{name}", getattr(self, name), f"{low} to {high}")

    @property
    def slug(self) -> str:
        return f"t{self.rows}x{self.blocks}d{self.decode_rows}c{self.row_chunk}p{self.prefetch}"


@dataclass(frozen=True)
class Vocabulary:
    """A file below ``templates/cpu/isa`` that spells the vector operations of one kind of dot product.

    Attributes:
        name: the file's name without its ending.
        steps: operands a word of 8 rows is split into, that is dot products per word.
        chains: independent accumulators that keep the dot product units busy, over all rows of a tile together
            (latency times instructions a cycle).
    """

    name: str
    steps: int
    chains: int

    def chains_for(self, rows: int) -> int:
        """Accumulators each of ``rows`` rows gets: a power of two, so that unrolled words share them evenly."""
        chains = 1
        while chains * 2 * rows <= self.chains:
            chains *= 2
        return chains


VOCABULARIES: dict[str, Vocabulary] = {
    vocabulary.name: vocabulary
    for vocabulary in (
        Vocabulary("avx512_vnni", steps=2, chains=8),
        Vocabulary("avx512_bf16", steps=4, chains=8),
        Vocabulary("avx512_fp32", steps=8, chains=8),
        Vocabulary("portable", steps=8, chains=1),
    )
}


@dataclass(frozen=True)
class Target:
    """One compiled row.

    Attributes:
        name: the row's name in the selection table, in slugs and in ``AWQJIT_KERNEL``.
        act_bits: compute modes it serves: 16 (w4a16), 8 (w4a8).
        features: CPU features without which its code must not be loaded; empty for any CPU.
        flags: compiler flags that allow exactly those instructions.
        vocabularies: dtype of x -> name in :data:`VOCABULARIES`.
        tiles: dtype of x -> register tiles.
        machines: ``platform.machine()`` values it can run on; empty for any.
    """

    name: str
    act_bits: tuple[int, ...]
    features: frozenset[str]
    flags: tuple[str, ...]
    vocabularies: dict[str, str]
    tiles: dict[str, Tile] = field(default_factory=dict)
    machines: tuple[str, ...] = ()

    def vocabulary(self, x_dtype: str) -> Vocabulary:
        return VOCABULARIES[self.vocabularies[x_dtype]]

    def tile(self, x_dtype: str) -> Tile:
        return self.tiles.get(x_dtype, Tile())


_X86 = ("x86_64", "AMD64")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})


def _each(value: str) -> dict[str, str]:
    return dict.fromkeys(DTYPES, value)


TARGETS: tuple[Target, ...] = (
    Target(
        name="avx512_vnni",
        act_bits=(8,),
        features=_AVX512 | {"avx512_vnni"},
        flags=(*_AVX512_FLAGS, "-mavx512vnni"),
        vocabularies=_each("avx512_vnni"),
        machines=_X86,
    ),
    Target(
        name="avx512_bf16",
        act_bits=(16,),
        features=_AVX512 | {"avx512_bf16"},
        flags=(*_AVX512_FLAGS, "-mavx512bf16"),
        # fp16 and fp32 activations have more bits than a bf16 dot product takes: they run on fp32 FMA.
        vocabularies={"bf16": "avx512_bf16", "fp16": "avx512_fp32", "fp32": "avx512_fp32"},
        machines=_X86,
    ),
    Target(
        name="portable",
        act_bits=(8, 16),
        features=frozenset(),
        # Vectors wider than the CPU's are passed to inlined functions only: the ABI gcc warns about is never used.
        flags=("-Wno-psabi",),
        vocabularies=_each("portable"),
        tiles=dict.fromkeys(DTYPES, Tile(rows=2, blocks=1, decode_rows=2)),
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
