# SPDX-License-Identifier: Apache-2.0
"""Tables of the kernel benchmark, made from its result alone: for the terminal and for the documents."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import ratios
from benchmarks.limits import ONE_CHIPLET_NS
from benchmarks.peers.registry import BY_NAME, CONTENDERS, comparisons

LEAST_QUIET = 6
"""With fewer quiet rounds than this all rounds of a cell count, and the cell is marked."""

MEMORY_BOUND = 4  # rows
LEAST_OF_STATE = 4
"""A cell with fewer rounds in a state of the memory says nothing about it."""

BUSY_MARK = "°"

OURS = {8: "awqjit w4a8", 16: "awqjit w4a16"}
Cell = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows of text under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells_of(result: dict[str, Any], section: str = "peers", **wanted: Any) -> list[Cell]:
    """Cells of one section in which every named property (group, dtype, m, k, n) is as wanted."""
    found = (cell for cell in result["cells"] if cell["section"] == section)
    return [cell for cell in found if all(cell[key] == value for key, value in wanted.items())]


def batches_of(cells: Iterable[Cell]) -> list[int]:
    return sorted({cell["m"] for cell in cells})


def quiet(result: dict[str, Any], cell: Cell) -> list[int]:
    """Rounds that others left alone; where their use is not known, all."""
    return ratios.quiet_rounds([state["foreign"] or 0.0 for state in cell["rounds"]], result["busy_limit"])


def is_busy(result: dict[str, Any], cell: Cell) -> bool:
    return len(quiet(result, cell)) < min(LEAST_QUIET, len(cell["rounds"]))


def counted(result: dict[str, Any], cell: Cell) -> list[int]:
    """The rounds that count: the quiet ones, or all of a busy cell."""
    return list(range(len(cell["rounds"]))) if is_busy(result, cell) else quiet(result, cell)


def state_of(state: dict[str, Any]) -> str:
    """Where the cores in use were before a round, told by how soon they saw each other's writes."""
    nanoseconds = state.get("ping_pong_ns")
    if nanoseconds is None:
        return "one core"
    return "one chiplet" if nanoseconds < ONE_CHIPLET_NS else "two chiplets"


def median(result: dict[str, Any], cell: Cell, name: str) -> float | None:
    """Seconds of a contender: median over the rounds that count, of each round's median."""
    if name not in cell["contenders"]:
        return None
    times = cell["contenders"][name]["medians"]
    known = [times[index] for index in counted(result, cell) if times[index] is not None]
    return statistics.median(known) if known else None


def right_times(cell: Cell) -> dict[str, list[float | None]]:
    """Times of those contenders of a cell whose results are right: a wrong one is not fast."""
    return {name: entry["medians"] for name, entry in cell["contenders"].items() if entry["right"]}


def wrong_cells(result: dict[str, Any]) -> list[str]:
    return [
        f"{name} K={cell['k']} N={cell['n']} M={cell['m']} g={cell['group']} {cell['dtype']}: {entry['error']:.1e}"
        for cell in result["cells"]
        for name, entry in cell["contenders"].items()
        if not entry["right"]
    ]


@dataclass(frozen=True)
class Standing:
    """awqjit's mode against a set of peers at one batch size, over all shapes.

    Attributes:
        mean: geometric mean over shapes of (fastest peer's time / awqjit's) with its 90 % interval.
        least: the smallest of the shapes' ratios.
        peers: fastest peer -> on how many shapes.
        busy: some cell had too few quiet rounds.
    """

    mean: ratios.Interval
    least: float
    peers: Counter[str]
    busy: bool


def standing(
    result: dict[str, Any], bits: int, peers: Sequence[str], group: int, dtype: str, m: int, state: str | None = None
) -> Standing | None:
    """From the rounds of one state of the memory, or all; None if no cell has enough of both."""
    cells = cells_of(result, group=group, dtype=dtype, m=m)
    found = []
    for cell in cells:
        rounds = [index for index in counted(result, cell) if state in (None, state_of(cell["rounds"][index]))]
        if len(rounds) >= (2 if state is None else LEAST_OF_STATE) and (
            one := ratios.compare(right_times(cell), OURS[bits], peers, rounds)
        ):
            found.append(one)
    if not found:
        return None
    mean = ratios.bootstrap([one.ratios for one in found])
    busy = any(is_busy(result, cell) for cell in cells)
    return Standing(mean, min(one.ratio for one in found), Counter(one.peer for one in found), busy)


def ratio_table(result: dict[str, Any], group: int, dtype: str) -> Table:
    """Against the fastest peer of each cell."""
    batches = batches_of(cells_of(result, group=group, dtype=dtype))
    rows: list[tuple[str, ...]] = []
    for bits, ours in OURS.items():
        for name, peers in comparisons(bits).items():
            standings = [standing(result, bits, peers, group, dtype, m) for m in batches]
            title = f"{ours}, {name}"
            rows.append((title, *("" if one is None else _ratio(one) for one in standings)))
            rows.append(("least of the shapes", *("" if one is None else f"{one.least:.2f}" for one in standings)))
            rows.append(("fastest peer", *("" if one is None else one.peers.most_common(1)[0][0] for one in standings)))
    title = f"Time of the fastest peer / awqjit's, group size {group}, {dtype} x"
    return Table(title, ("", *(f"M={m}" for m in batches)), rows)


def _ratio(one: Standing) -> str:
    mark = BUSY_MARK if one.busy else ""
    return f"{one.mean.estimate:.2f} ({one.mean.low:.2f} to {one.mean.high:.2f}){mark}"


def state_table(result: dict[str, Any], group: int, dtype: str) -> Table:
    """The same at the batch sizes that memory bounds, by where the cores in use were."""
    cells = [cell for cell in cells_of(result, group=group, dtype=dtype) if cell["m"] <= MEMORY_BOUND]
    states = sorted({state_of(state) for cell in cells for state in cell["rounds"]})
    rows: list[tuple[str, ...]] = []
    for bits, ours in OURS.items():
        for name, peers in comparisons(bits).items():
            for m in batches_of(cells):
                found = [standing(result, bits, peers, group, dtype, m, state) for state in states]
                rows.append((f"{ours}, {name}, M={m}", *("" if one is None else _ratio(one) for one in found)))
    title = f"The same by where the cores were, group size {group}, {dtype} x"
    return Table(title, ("", *(f"cores on {state}" for state in states)), rows)


def times_table(result: dict[str, Any], k: int, n: int, group: int, dtype: str) -> Table:
    """Median microseconds of every contender."""
    cells = {cell["m"]: cell for cell in cells_of(result, k=k, n=n, group=group, dtype=dtype)}
    rows = []
    for name in BY_NAME:
        times = [median(result, cell, name) for cell in cells.values()]
        if any(time is not None for time in times):
            rows.append((name, *("" if time is None else _microseconds(time) for time in times)))
    return Table(f"K={k} N={n}, group size {group}, {dtype} x: median µs", ("", *(f"M={m}" for m in cells)), rows)


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def error_table(result: dict[str, Any], group: int, dtype: str) -> Table:
    """Largest relative error of each contender over all cells, on plain data and with outlier channels."""
    cells = cells_of(result, group=group, dtype=dtype)
    rows = []
    for one in CONTENDERS:
        entries = [cell["contenders"][one.name] for cell in cells if one.name in cell["contenders"]]
        if entries:
            plain = max(entry["error"] for entry in entries)
            outliers = [entry["error_outliers"] for entry in entries if entry["error_outliers"] is not None]
            shown = f"{max(outliers):.1e}" if outliers else ""
            takes, arithmetic = entries[0]["takes"], entries[0]["arithmetic"]
            rows.append((one.name, takes, arithmetic, f"{plain:.1e}", shown))
    return Table("Largest relative error", ("", "x", "products", "plain data", "outlier channels"), rows)


def absent_table(result: dict[str, Any]) -> Table:
    """Contender -> why it is not in some section; those left out altogether at the end."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for where, absent in result["absent"].items():
        for name, reason in absent.items():
            reasons.setdefault((name, reason), []).append(where)
    everywhere = len(result["absent"])
    rows: list[tuple[str, ...]] = [
        (name, reason if len(where) == everywhere else f"{reason} ({', '.join(where)})")
        for (name, reason), where in reasons.items()
    ]
    return Table("Absent", ("contender", "why"), rows + list(result["left_out"].items()))
