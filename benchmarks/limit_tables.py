# SPDX-License-Identifier: Apache-2.0
"""Tables that hold awqjit against the machine's limits, made from a result of the kernel benchmark alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import ratios
from benchmarks.kernel_tables import OURS, Cell, Table, cells_of, counted, median, state_of
from benchmarks.limits import KIND_OF
from benchmarks.plan import ONE_THREAD

CLIFF_TOLERANCE = 0.03
LARGE = 4096 * 4096  # weights; smaller layers are bound by what a call costs, too


def peaks(result: dict[str, Any], threads: int | None = None) -> dict[str, Any]:
    """The better of the limits measured before and after, for so many threads (all)."""
    both = [
        max((one for one in measured if threads in (None, one["threads"])), key=lambda one: int(one["threads"]))
        for measured in (result["limits"], result["limits_after"])
    ]
    gops = {kind: max(one["gops"][kind] for one in both) for kind in both[0]["gops"]}
    return {"gbs": max(one["gbs"] for one in both), "gops": gops, "threads": both[0]["threads"]}


def share_of_peak(result: dict[str, Any], cell: Cell, name: str) -> float | None:
    """Operations a second over the peak of the instruction that the contender's products run in."""
    time = median(result, cell, name)
    if time is None:
        return None
    entry = cell["contenders"][name]
    peak = peaks(result)["gops"].get(KIND_OF[entry["arithmetic"]])
    return None if peak is None else 2 * cell["m"] * cell["k"] * cell["n"] / time / 1e9 / peak


def bandwidth_shares(result: dict[str, Any], cell: Cell, name: str) -> dict[str, float]:
    """Bytes a second over what the memory gave just before, by its state: one or two chiplets, or one core."""
    if name not in cell["contenders"]:
        return {}
    entry = cell["contenders"][name]
    found: dict[str, list[float]] = {}
    for index in counted(result, cell):
        state, time = cell["rounds"][index], entry["medians"][index]
        if time is not None and "gbs" in state:
            found.setdefault(state_of(state), []).append(entry["bytes"] / time / 1e9 / state["gbs"])
    return {state: statistics.median(shares) for state, shares in found.items()}


def _shares(name: str, what: str, shares: Sequence[float]) -> list[tuple[str, ...]]:
    if not shares:
        return []
    return [(f"{name}, {what}", f"{ratios.geometric_mean(shares):.0%}", f"{min(shares):.0%}")]


def limit_table(result: dict[str, Any]) -> Table:
    """The limits, and how near awqjit is to them: reading at M=1 on the large shapes, computing from M=64 on."""
    limit = peaks(result)
    rows: list[tuple[str, ...]] = [("read bandwidth", f"{limit['gbs']:.1f} GB/s", "")]
    rows += [(f"{kind.removeprefix('dot_')} products", f"{gops:.0f} GOP/s", "") for kind, gops in limit["gops"].items()]
    everything = cells_of(result)
    for group, dtype in dict.fromkeys((cell["group"], cell["dtype"]) for cell in everything):
        for m, name in ((m, name) for m in (1, 64, 128, 256, 1024) for name in OURS.values()):
            cells = cells_of(result, group=group, dtype=dtype, m=m)
            what = f"g={group}, {dtype} x, M={m}"
            if m == 1:
                large = [bandwidth_shares(result, cell, name) for cell in cells if cell["k"] * cell["n"] >= LARGE]
                for state in sorted({state for shares in large for state in shares}):
                    known = [shares[state] for shares in large if state in shares]
                    rows += _shares(name, f"{what}: of the read bandwidth, cores on {state}", known)
            else:
                shares = [share_of_peak(result, cell, name) for cell in cells]
                rows += _shares(name, f"{what}: of the peak", [share for share in shares if share is not None])
    return Table("Limits", ("", "mean over shapes", "least"), rows)


def thread_table(result: dict[str, Any]) -> Table:
    """All threads against one, over the same ratio of the limits' peaks."""
    many, one = peaks(result), peaks(result, 1)
    rows = []
    for cell in cells_of(result, "threads"):
        for name in OURS.values():
            all_threads, single = median(result, cell, name), median(result, cell, name + ONE_THREAD)
            if all_threads is None or single is None:
                continue
            kind = KIND_OF[cell["contenders"][name]["arithmetic"]]
            if kind in many["gops"]:
                speedup, possible = single / all_threads, many["gops"][kind] / one["gops"][kind]
                shape = f"K={cell['k']} N={cell['n']} M={cell['m']}"
                rows.append((f"{name}, {shape}", f"{speedup:.2f}", f"{possible:.2f}", f"{speedup / possible:.2f}"))
    return Table(f"{many['threads']} threads against one", ("", "kernel", "limits", "kernel / limits"), rows)


def cliff_table(result: dict[str, Any]) -> Table:
    """Batch sizes at which fewer rows take longer, for each shape and mode of the sweep."""
    cells = cells_of(result, "sweep")
    rows: list[tuple[str, ...]] = []
    for k, n in dict.fromkeys((cell["k"], cell["n"]) for cell in cells):
        for name in OURS.values():
            times = {
                cell["m"]: time
                for cell in cells
                if (cell["k"], cell["n"]) == (k, n) and (time := median(result, cell, name)) is not None
            }
            found = ratios.cliffs(times, CLIFF_TOLERANCE)
            shown = ", ".join(f"M={m} slower than M={larger}" for m, larger in found)
            rows.append((f"{name}, K={k} N={n}", shown or "none"))
    return Table(f"Fewer rows that take longer, by more than {CLIFF_TOLERANCE:.0%}", ("", "M"), rows)
