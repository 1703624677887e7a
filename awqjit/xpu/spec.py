# SPDX-License-Identifier: Apache-2.0
"""SYCL kernels of a Problem: which there are, what each takes, which run for M rows, and in what work sizes.

A device is described by its number of *lanes*: the columns that one instruction of its matrix unit (DPAS) gives, which
is also the size of the sub-groups that all kernels are compiled for: 16 (Data Center GPU Max, Arc B, Lunar Lake) or
8 (Arc A).

==========  ======================================  =========================================
kernel      M rows at the matrix unit               M rows without it
==========  ======================================  =========================================
quantise    w4a8: int8 tiles of x                   w4a8: int8 rows of x
decode      up to DECODE_ROWS rows                  one row
prefill     more                                    more
==========  ======================================  =========================================

w4a16 kernels read x itself. :func:`plan` picks the kernel that should be fast for a number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from awqjit.errors import ArgumentError
from awqjit.spec import Problem
from awqjit.weight import ceil_div

FRAGMENT = 32
"""Consecutive k of a column that a lane holds at a time: its four words, and one u4 operand of the matrix unit."""

TILE_ROWS = 8
"""Rows of x that one instruction of the matrix unit multiplies."""

LEAVES: tuple[str | None, ...] = ("visa", "emulated", None)
DECODE, PREFILL, QUANTISE = "decode", "prefill", "quantise"

DECODE_ROWS = 32
"""Largest M that decode runs for at the matrix unit. Up to here sub-groups that split K are worth more than rows that
share unpacked weights: without the split too few sub-groups would be in flight to fill a GPU."""

_SLICES: tuple[tuple[int, int], ...] = ((128, 16), (1 << 30, 8))
"""(at most so many column blocks, sub-groups that split K among them), the first that fits. A GPU holds some thousand
sub-groups at a time, so narrow layers split K further; 16 sub-groups of 16 lanes fit every device's work-group."""

_TILES: dict[int, tuple[int, int]] = {8: (2, 2), 16: (2, 1)}
"""act_bits -> prefill's register tile, in row tiles and column blocks. A pair of these takes 16 of 128 registers for
the sums of one group and of all groups; operands and addresses fit beside them without spills in Intel's compiler for
Data Center GPU Max, Arc B and Arc A. w4a16 has more operands: weights made ready, and activations that are rearranged
as they arrive; a second column block spilled up to 320 bytes. 256 registers a thread would hold larger tiles, for half
as many threads, but what asks for them is lost when a kernel is kept as SPIR-V."""

_PREFILL_SUBGROUPS = 4
"""Sub-groups of a prefill work-group: they share rows of x through the L1 cache, no local memory."""

_QUANTISE_SUBGROUPS = 8
"""Most sub-groups that share a long group of x; one takes up to 8 fragments."""

SPLIT_GROUPS = 4
"""With at most so many groups the sub-groups split each group; with more, each takes whole groups. All partial dot
products of a column block are kept in local memory in the first case, so that must not be many."""

EXACT_ROWS = 8192
"""Products of an int8 activation and q - z that may be added in fp32 exactly: 8192 * 127 * 15 is below 2**24."""


@dataclass(frozen=True)
class XpuTarget:
    """One kind of device.

    Attributes:
        name: the row of the selection: "sycl_dpas" (matrix unit) or "sycl" (plain SYCL, any device).
        lanes: 16 or 8.
        leaf: how the matrix unit is spelled: "visa" on hardware, "emulated" for tests on any SYCL device; None for
            the row "sycl".
    """

    name: str
    lanes: int
    leaf: str | None

    def __post_init__(self) -> None:
        if self.name not in ("sycl_dpas", "sycl"):
            raise ArgumentError("XpuTarget.name", self.name, "sycl_dpas or sycl")
        if self.lanes not in (16, 8):
            raise ArgumentError("XpuTarget.lanes", self.lanes, "16 or 8")
        if self.leaf not in LEAVES or (self.leaf is None) != (self.name == "sycl"):
            raise ArgumentError("XpuTarget.leaf", self.leaf, "None for sycl, visa or emulated for sycl_dpas")

    @property
    def slug(self) -> str:
        """For example ``sycl_dpas16``, ``sycl8``."""
        return f"{self.name}{self.lanes}{'-emulated' if self.leaf == 'emulated' else ''}"


@dataclass(frozen=True)
class XpuKernel:
    """One kernel, in a source of its own.

    Attributes:
        name: "quantise", "decode" or "prefill"; the ``extern "C"`` function is called ``awqjit_`` + name.
        source: the rendered SYCL text. Equal texts are the same kernel, whatever Problem they were rendered for.
        options: compiler options.
        arguments: names of the function's arguments, in order. ``m`` (rows of x) and ``x_stride`` (elements from one
            row of x to the next) are int64 scalars, the others device pointers: ``x`` [M, K] with adjacent columns,
            ``weight``, ``scales``, ``zeros`` of the packed weight, ``bias`` fp32 [N], ``y`` contiguous [M, N] of x's
            dtype, and the names of :func:`scratch`.
        x_alignment: every row of x must begin at a multiple of so many elements, if it takes x.
    """

    name: str
    source: str
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    x_alignment: int = 1

    @property
    def function(self) -> str:
        return f"awqjit_{self.name}"


@dataclass(frozen=True)
class Launch:
    """One kernel over a two-dimensional range: (row tiles, column blocks), sizes in work-items."""

    kernel_name: str
    global_range: tuple[int, int]
    local_range: tuple[int, int]


@dataclass(frozen=True)
class Scratch:
    """A temporary of one call, written by one kernel and read by the next; it need not be cleared.

    Attributes:
        name: the argument it is passed as.
        dtype: "int8", "int32" or "fp32".
        shape: in elements; contiguous, at least 256-byte aligned.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Shape:
    """How a problem is cut for a target: the sizes that kernels and work ranges share.

    Attributes:
        fragments: 32-row pieces of K.
        blocks: column blocks of one sub-group's width.
        row_tiles: tiles of 8 rows that a sub-group of prefill holds, at the matrix unit.
        column_tiles: column blocks that it holds.
        prefill_subgroups: sub-groups of a prefill work-group, side by side along N, at the matrix unit.
        slices: sub-groups that share K: in decode, and in every kernel without a matrix unit.
        split_inside: each of them takes a part of every group; else each takes whole groups.
        quantise_subgroups: sub-groups that share one group of x in quantise.
    """

    fragments: int
    blocks: int
    row_tiles: int
    column_tiles: int
    prefill_subgroups: int
    slices: int
    split_inside: bool
    quantise_subgroups: int


def shape_of(problem: Problem, target: XpuTarget) -> Shape:
    """All sizes, from the tables above."""
    blocks = ceil_div(problem.n, target.lanes)
    slices = next(slices for most, slices in _SLICES if blocks <= most)
    inside = problem.groups <= SPLIT_GROUPS
    group_fragments = ceil_div(problem.group_size, FRAGMENT)
    return Shape(
        fragments=ceil_div(problem.k, FRAGMENT),
        blocks=blocks,
        row_tiles=_TILES[problem.act_bits][0],
        column_tiles=_TILES[problem.act_bits][1],
        prefill_subgroups=_PREFILL_SUBGROUPS,
        slices=min(slices, group_fragments if inside else problem.groups),
        split_inside=inside,
        quantise_subgroups=min(_QUANTISE_SUBGROUPS, ceil_div(group_fragments, 8)),
    )


def whole_fragments(problem: Problem) -> bool:
    """Whether each fragment of 32 rows lies in one group."""
    return problem.group_size % FRAGMENT == 0 or problem.group_size == problem.k


def refusal(problem: Problem, target: XpuTarget) -> str | None:
    """Why the target's kernels do not serve a problem; None if they do."""
    if target.leaf is None:
        return None
    if problem.act_bits == 16 and problem.x_dtype == "fp32":
        return "the matrix unit takes no fp32 activations"
    if not whole_fragments(problem):
        return f"a group of {problem.group_size} rows is no multiple of {FRAGMENT}"
    return None


def check_served(problem: Problem, target: XpuTarget) -> None:
    """Raises:
    ArgumentError: the target refuses the problem.
    """
    reason = refusal(problem, target)
    if reason is not None:
        raise ArgumentError("problem", problem.slug, f"another target than {target.slug}: {reason}")


def uses_sums(problem: Problem, target: XpuTarget) -> bool:
    """Whether kernels need the sums of the int8 activations. Without a matrix unit q - z is formed first, and 4-bit
    weights without zero points reach the unit as q - 8."""
    return problem.act_bits == 8 and target.leaf is not None and not problem.symmetric


def rows_of(problem: Problem, target: XpuTarget, name: str) -> int:
    """Rows of x that one work-group of decode or prefill makes."""
    if target.leaf is None:
        return 1 if name == DECODE else TILE_ROWS
    return TILE_ROWS if name == DECODE else TILE_ROWS * shape_of(problem, target).row_tiles


def plan(problem: Problem, target: XpuTarget, m: int) -> tuple[Launch, ...]:
    """What runs for m rows, in order, each launch after the one before it.

    Raises:
        ArgumentError: m is less than 1, or the target refuses the problem.
    """
    _check_rows(m)
    most = DECODE_ROWS if target.leaf is not None else 1
    return launches(problem, target, m, DECODE if m <= most else PREFILL)


def launches(problem: Problem, target: XpuTarget, m: int, name: str) -> tuple[Launch, ...]:
    """As :func:`plan`, with the kernel that multiplies given: "decode" or "prefill".

    Raises:
        ArgumentError: as for plan, or m is less than one tile of a w4a16 prefill at the matrix unit.
    """
    check_served(problem, target)
    shape = shape_of(problem, target)
    rows = rows_of(problem, target, name)
    whole = name == PREFILL and target.leaf is not None and problem.act_bits == 16
    _check_rows(m, rows if whole else 1)
    tiles = ceil_div(m, rows)
    if target.leaf is not None and name == PREFILL:
        wide = shape.column_tiles * shape.prefill_subgroups
        groups, subgroups = (tiles, ceil_div(shape.blocks, wide)), shape.prefill_subgroups
    else:
        groups, subgroups = (tiles, shape.blocks), shape.slices
    multiply = _launch(name, groups, subgroups * target.lanes)
    if problem.act_bits == 16:
        return (multiply,)
    units = m
    if target.leaf is not None:  # prefill reads whole tiles of its own and needs no test for the end of x
        units = ceil_div(m, TILE_ROWS) if name == DECODE else tiles * shape.row_tiles
    quantise = _launch(QUANTISE, (units, problem.groups), shape.quantise_subgroups * target.lanes)
    return (quantise, multiply)


def scratch(problem: Problem, target: XpuTarget, m: int) -> tuple[Scratch, ...]:
    """The temporaries that the launches of one call share; none for w4a16.

    Raises:
        ArgumentError: m is less than 1, or the target refuses the problem.
    """
    _check_rows(m)
    check_served(problem, target)
    if problem.act_bits == 16:
        return ()
    shape = shape_of(problem, target)
    tiles = ceil_div(m, TILE_ROWS * shape.row_tiles) * shape.row_tiles
    depth = FRAGMENT * shape.fragments
    per_group = (tiles, problem.groups, TILE_ROWS)
    sums = (Scratch("xsum", "int32", per_group),) if uses_sums(problem, target) else ()
    return (Scratch("xq", "int8", (tiles * TILE_ROWS, depth)), Scratch("xd", "fp32", per_group), *sums)


def _check_rows(m: int, least: int = 1) -> None:
    if m < least:
        raise ArgumentError("m", m, f"at least {least}")


def _launch(name: str, groups: tuple[int, int], local: int) -> Launch:
    return Launch(name, (groups[0], groups[1] * local), (1, local))
