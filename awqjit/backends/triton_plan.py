# SPDX-License-Identifier: Apache-2.0
"""How a problem is cut up for the Triton kernels: what follows from the problem, and what is tuned.

What decides in which order numbers are added (how many rows of W are taken at a time, and into how many slices K is
cut) is a function of the problem and of whether x has few rows, never tuned: results do not depend on a stopwatch. A
row of y is then the same for any number of rows of x up to :data:`FEW_ROWS`, and for any number above.

What is tuned is how many rows of x and columns of W one program takes, with how many warps and how many stages of a
pipeline of loads. :data:`TABLE` holds every combination that is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from awqjit.spec import Problem
from awqjit.weight import ceil_div

FEW_ROWS = 16
"""Up to so many rows of x one program takes them all, and K is cut into slices where N gives too few programs."""

_MOST_ROWS = 1024  # more rows than these are tuned as these are

_LONGEST_TILE = {"fp16": 64, "bf16": 64, "fp32": 32, "int8": 128}
_SHORTEST_TILE = {"fp16": 16, "bf16": 16, "fp32": 16, "int8": 32}  # what matrix units take

_PROGRAMS = 256  # enough to keep a large GPU busy
_COLUMNS = 64  # of one program, when slices are counted
_SLICE_STEPS = {16: 4, 8: 2}  # a slice has so many steps at least: tiles (w4a16) or groups (w4a8)


@dataclass(frozen=True)
class Blocks:
    """One combination that is tried.

    Attributes:
        rows: rows of x that a program takes.
        columns: columns of W that a program takes.
        warps: groups of 32 threads (of 16 or 32 on Intel) that make up a program.
        stages: tiles that are loaded ahead.
    """

    rows: int
    columns: int
    warps: int
    stages: int


TABLE: dict[str, tuple[Blocks, ...]] = {
    "few rows": (
        Blocks(16, 64, 4, 4),
        Blocks(16, 32, 2, 4),
        Blocks(16, 32, 4, 5),
        Blocks(16, 64, 2, 5),
        Blocks(16, 128, 4, 4),
        Blocks(16, 128, 8, 3),
    ),
    "many rows": (
        Blocks(64, 64, 4, 4),
        Blocks(32, 64, 4, 4),
        Blocks(32, 128, 4, 3),
        Blocks(64, 128, 4, 3),
        Blocks(128, 64, 4, 3),
        Blocks(128, 128, 8, 3),
        Blocks(128, 128, 4, 3),
        Blocks(256, 64, 8, 3),
    ),
}
"""By number of rows of x. The first of each is taken where nothing can be timed."""


def regime(rows: int) -> str:
    """Which part of :data:`TABLE` is for so many rows of x."""
    return "few rows" if rows <= FEW_ROWS else "many rows"


def bucket(rows: int) -> int:
    """Numbers of rows of x with the same bucket are tuned together: it is the next power of two, within bounds."""
    return min(max(1 << (rows - 1).bit_length(), FEW_ROWS), _MOST_ROWS)


@dataclass(frozen=True)
class Plan:
    """What follows from a problem.

    Attributes:
        tile: rows of W taken at a time: a power of two.
        tiles: of a group. Tiles start at a multiple of 8, so that whole words are read.
        aligned: every group starts at a multiple of 8.
        masked: some tile reaches out of its group, or past K.
        steps: of the loop over K: tiles (w4a16) or groups (w4a8).
        slices: that K is cut into for few rows of x; 1 for none.
        slice_steps: steps of each slice but the last, which may have fewer.
    """

    tile: int
    tiles: int
    aligned: bool
    masked: bool
    steps: int
    slices: int
    slice_steps: int

    @classmethod
    def of(cls, problem: Problem) -> Plan:
        group, k = problem.group_size, problem.k
        aligned = group % 8 == 0 or group == k
        rows = group if aligned else group + 7
        kind = "int8" if problem.act_bits == 8 else problem.x_dtype
        tile = min(max(1 << (rows - 1).bit_length(), _SHORTEST_TILE[kind]), _LONGEST_TILE[kind])
        tiles = ceil_div(rows, tile)
        steps = problem.groups * (1 if problem.act_bits == 8 else tiles)
        wanted = min(
            ceil_div(_PROGRAMS, ceil_div(problem.n, _COLUMNS)), max(steps // _SLICE_STEPS[problem.act_bits], 1)
        )
        slice_steps = ceil_div(steps, wanted)
        return cls(
            tile=tile,
            tiles=tiles,
            aligned=aligned,
            masked=group % tile != 0 or k % group != 0,
            steps=steps,
            slices=ceil_div(steps, slice_steps),
            slice_steps=slice_steps,
        )

    def sliced(self, rows: int) -> bool:
        """Whether K is cut into slices for so many rows of x."""
        return self.slices > 1 and regime(rows) == "few rows"
