# SPDX-License-Identifier: Apache-2.0
"""The tiles that ``awqjit tune`` tries, by regime, and why none of them can change a result.

======================  ==============  ==========================================================================
regime                  rows of x       what is tried
======================  ==============  ==========================================================================
decode                  1               how far ahead of the weights to prefetch
small batch             4, 8, 16        rows of a pass that splits weights in registers, times prefetch distances
prefill                 64, 256         splitting for any number of rows: rows of a pass times rows of a job;
                                        unpacking: shapes of a register tile times rows of a job
prefill, matrix tiles   64, 256         rows of a job: hardware fixes the tiles
======================  ==============  ==========================================================================

A w4a8 kernel's sums are exact, so every tile gives the same bits. In w4a16 the order of an fp32 sum depends on the
number of accumulators that a row gets, and that on how many rows share a pass: only tiles that give every row of every
M the number it has with the row's default tile are tried, or accepted from a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from awqjit.target import EVERY_ROWS, Target, Tile, Vocabulary

LEAST = 12
"""Candidates of a regime, at least; where its usual steps leave fewer, finer ones are taken."""

PREFETCH = (0, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536)
DECODE_ROWS = tuple(range(1, 17))
ROW_CHUNKS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
SPLIT_LIMITS = (0, 32)
PANEL_BLOCKS = (1, 2, 3, 4)
_COARSE_CHUNKS = (64, 128, 256)


@dataclass(frozen=True)
class _Row:
    """What the table needs to know of a row."""

    default: Tile
    vocabulary: Vocabulary
    act_bits: int

    def keeps_results(self, tile: Tile) -> bool:
        return self.act_bits == 8 or _same_order(tile, self.default, self.vocabulary)

    def heights(self, best: Tile) -> list[int]:
        """Rows of a pass that may be tried, those nearest to the best first."""
        allowed = (rows for rows in DECODE_ROWS if self.keeps_results(replace(best, decode_rows=rows)))
        return sorted(allowed, key=lambda rows: (abs(rows - best.decode_rows), rows))

    def register_tiles(self) -> list[tuple[int, int]]:
        """Shapes of about as many accumulators as the default's, which are known to fit the registers."""
        rows, blocks = self.default.rows, self.default.blocks
        if self.vocabulary.tiled:
            return [(rows, blocks)]
        others = [(rows * blocks // wide, wide) for wide in PANEL_BLOCKS if 1 <= rows * blocks // wide <= 16]
        return list(dict.fromkeys([(rows, blocks), (rows + 2, blocks), *others]))


@dataclass(frozen=True)
class Regime:
    """One kind of call that a tile is tuned for.

    Attributes:
        name: as results show it.
        rows: values of M that are measured.
        tiles: ``tiles(best so far, row)``: what is tried; not yet whether results stay the same.
    """

    name: str
    rows: tuple[int, ...]
    tiles: Callable[[Tile, _Row], Iterator[Tile]]


def _decode(best: Tile, row: _Row) -> Iterator[Tile]:
    for prefetch in PREFETCH:
        yield replace(best, prefetch=prefetch)


def _small_batch(best: Tile, row: _Row) -> Iterator[Tile]:
    heights = row.heights(best)[:LEAST]
    others = [one for one in PREFETCH if one != best.prefetch]
    step = max(1, len(others) * len(heights) // LEAST)
    for prefetch in (best.prefetch, *others[::step]):
        for rows in heights:
            yield replace(best, decode_rows=rows, prefetch=prefetch)


def _prefill(best: Tile, row: _Row) -> Iterator[Tile]:
    if row.vocabulary.tiled:
        for chunk in ROW_CHUNKS:
            yield replace(best, row_chunk=chunk)
        return
    for chunk in _COARSE_CHUNKS:
        for rows in row.heights(best)[:3]:
            yield replace(best, split_rows=EVERY_ROWS, decode_rows=rows, row_chunk=chunk)
    for rows, blocks in row.register_tiles():
        for chunk in _COARSE_CHUNKS[:2]:
            for limit in SPLIT_LIMITS if rows == row.default.rows else SPLIT_LIMITS[:1]:
                yield replace(best, rows=rows, blocks=blocks, row_chunk=chunk, split_rows=limit)


REGIMES: tuple[Regime, ...] = (
    Regime("decode", (1,), _decode),
    Regime("small batch", (4, 8, 16), _small_batch),
    Regime("prefill", (64, 256), _prefill),
)
"""In the order they are tuned: each starts with the best tile of those before, and may not cost them anything."""


def candidates(regime: Regime, best: Tile, target: Target, act_bits: int, x_dtype: str) -> tuple[Tile, ...]:
    """The tiles to compare in a regime, the best so far first.

    Args:
        regime: one of :data:`REGIMES`.
        best: the best tile of the regimes before.
        target: the row.
        act_bits: 16 or 8.
        x_dtype: dtype of x.
    """
    row = _Row(target.tile(act_bits, x_dtype), target.vocabulary(act_bits, x_dtype), act_bits)
    return tuple(tile for tile in dict.fromkeys((best, *regime.tiles(best, row))) if row.keeps_results(tile))


def refusal(tile: Tile, target: Target, act_bits: int, x_dtype: str) -> str:
    """Why a tile is none that tuning could have chosen for this row, or ""."""
    row = _Row(target.tile(act_bits, x_dtype), target.vocabulary(act_bits, x_dtype), act_bits)
    allowed: dict[str, tuple[int, ...]] = {
        "prefetch": PREFETCH,
        "decode_rows": DECODE_ROWS,
        "row_chunk": ROW_CHUNKS,
        "split_rows": (*SPLIT_LIMITS, EVERY_ROWS),
    }
    for name, values in allowed.items():
        if getattr(tile, name) not in (*values, getattr(row.default, name)):
            return f"{name}={getattr(tile, name)} is not among the candidates"
    if (tile.rows, tile.blocks) not in row.register_tiles():
        return f"a register tile of {tile.rows} x {tile.blocks} is not among the candidates"
    if row.vocabulary.tiled and tile.split_rows != row.default.split_rows:
        return "matrix tiles are not traded for vector code"
    return "" if row.keeps_results(tile) else "it would add up in another order than the default"


@lru_cache(maxsize=4096)
def _same_order(tile: Tile, default: Tile, vocabulary: Vocabulary) -> bool:
    """Whether every row of every M is added up in the same order with both tiles."""
    # Beyond two chunks the pieces have sizes that have occurred before.
    most = 2 * max(tile.row_chunk, default.row_chunk) + 2
    return all(_orders(tile, m, vocabulary) == _orders(default, m, vocabulary) for m in range(1, most))


@lru_cache(maxsize=1 << 16)
def _orders(tile: Tile, m: int, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Accumulators of each of m rows, of any number of rows if all have as many; 0 on matrix tiles."""
    if m > tile.decode_limit:
        return (0 if vocabulary.tiled else 1,)  # prefill adds word by word, as a single accumulator does
    per_row: list[int] = []
    for chunk in _cut(m, tile.row_chunk):
        for height in _cut(chunk, tile.decode_rows):
            per_row += [vocabulary.chains_for(height)] * height
    return tuple(per_row) if len(set(per_row)) > 1 else (per_row[0],)


def _cut(m: int, most: int) -> Iterator[int]:
    """m rows in as few nearly equal pieces of at most ``most`` as possible, in the order of the kernel's."""
    pieces = -(-m // most)
    for piece in range(pieces):
        yield m * (piece + 1) // pieces - m * piece // pieces
