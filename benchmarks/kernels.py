# SPDX-License-Identifier: Apache-2.0
"""One linear layer at a time, awqjit beside every peer that is set up: times, errors, and the machine's limits.

    python -m benchmarks.peers setup
    python -m benchmarks.kernels [--quick] [--sections peers ...] [--shapes 4096x4096 ...] [--m 1 16 ...]

``--quick`` is a subset of 3 minutes. Peers that are not set up, or cannot run, are recorded with the reason. See
benchmarks/README.md for how cells are measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from awqjit import progress
from benchmarks import kernel_tables, limit_tables
from benchmarks.common import RESULTS, cpu_slug, print_stamp, print_table, stamp
from benchmarks.limits import Meter
from benchmarks.peers.environments import ENVIRONMENTS, default_home, missing
from benchmarks.peers.registry import BY_NAME, CONTENDERS, LEFT_OUT, Contender
from benchmarks.plan import FULL, ONE_THREAD, QUICK, ROTATE_BYTES, Section
from benchmarks.rounds import TOLERANCE, Group, Worker, open_groups, time_cell

OUTLIERS_UP_TO = 64  # rows; more rows have no other error, only a longer check


def _rounded(times: Sequence[float | None]) -> list[float | None]:
    return [None if time is None else float(f"{time:.4g}") for time in times]


def measure_cell(groups: Sequence[Group], section: Section, m: int, busy_limit: float, meter: Meter) -> dict[str, Any]:
    """One batch size of the layer that the groups hold: errors before and after the timing, and the times."""
    layer = groups[0].layer
    kinds = ("outliers", "plain") if m <= OUTLIERS_UP_TO else ("plain",)
    errors: dict[str, dict[str, float]] = {}
    for group in groups:
        errors |= {name + group.suffix: found for name, found in group.check(m, kinds).items()}
    timed = time_cell(groups, m, section.rounds, section.seconds, busy_limit, meter)
    contenders: dict[str, Any] = {}
    for group in groups:
        again = group.check(m, ("plain",))
        for name, facts in group.facts.items():
            key = name + group.suffix
            # A NaN that came only once must stay: max() would drop it.
            plain = (errors[key]["plain"], again[name]["plain"])
            error = math.nan if any(map(math.isnan, plain)) else max(plain)
            contenders[key] = {
                **facts,
                "error": error,
                "error_outliers": errors[key].get("outliers"),
                "right": error <= TOLERANCE,
                "medians": _rounded(timed["medians"][key]),
                "least": _rounded(timed["least"][key]),
            }
    return {
        "section": section.name,
        "k": layer["k"],
        "n": layer["n"],
        "group": section.group,
        "dtype": section.dtype,
        "m": m,
        "rounds": timed["rounds"],
        "contenders": contenders,
    }


def measure_section(
    section: Section,
    groups: Sequence[Group],
    rotate_bytes: int,
    busy_limit: float,
    meter: Meter,
    step: Callable[[], None],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """All cells of a section, and contender -> why it is not in some of them."""
    cells: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for k, n in section.shapes:
        for group in groups:
            group.prepare(k, n, section.group, section.dtype, rotate_bytes)
            absent |= group.absent
        holding = [group for group in groups if group.facts]
        for m in section.batches:
            if holding:
                cells.append(measure_cell(holding, section, m, busy_limit, meter))
            step()
        for group in groups:
            absent |= group.absent
            group.worker.ask("drop")
    return cells, absent


def groups_for(
    section: Section, contenders: Sequence[Contender], home: Path, cpus: list[int], log: Path
) -> list[Group]:
    """The workers of one section."""
    if section.name == "peers":
        return open_groups(contenders, home, cpus, log)
    ours = [contender for contender in contenders if contender.ours]
    groups = open_groups(ours, home, cpus, log)
    if section.name == "threads":
        single = Group(Worker("torch", home, cpus[:1], log), [contender.name for contender in ours], ONE_THREAD)
        single.open()
        groups.append(single)
    return groups


def measure(
    sections: Sequence[Section],
    contenders: Sequence[Contender],
    home: Path,
    cpus: list[int],
    rotate_bytes: int,
    busy_limit: float,
    save: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """The whole benchmark.

    Args:
        sections: of the plan.
        contenders: awqjit's and peers.
        home: folder of the environments.
        cpus: to run on, a thread each.
        rotate_bytes: of weights, for each contender.
        busy_limit: share of the machine that others may take in a round that counts.
        save: called with the result so far after each section.
    """
    log = Path(tempfile.gettempdir()) / f"awqjit-kernels-{os.getpid()}.log"
    result: dict[str, Any] = {"machine": stamp() | {"threads": len(cpus), "cpus": cpus}, "machine_after": {}}
    counts = sorted({1, len(cpus)})
    total = sum(len(section.shapes) * len(section.batches) for section in sections)
    with Meter(cpus) as meter, progress.bar("measuring", total) as step:
        limits = [asdict(meter.limits(threads)) for threads in counts]
        result |= {"limits": limits, "limits_after": limits, "versions": {}, "absent": {}, "left_out": LEFT_OUT}
        result |= {"rotate_bytes": rotate_bytes, "busy_limit": busy_limit, "cells": []}
        for section in sections:
            groups = groups_for(section, contenders, home, cpus, log)
            try:
                cells, absent = measure_section(section, groups, rotate_bytes, busy_limit, meter, step)
            finally:
                for group in groups:
                    group.worker.end()
            result["cells"] += cells
            for group in groups:
                result["versions"] |= group.versions
            if section.name == "peers":
                started = {name for group in groups for name in group.names}
                for one in contenders:
                    if one.name not in started:
                        absent[one.name] = str(missing(ENVIRONMENTS[one.environment], home))
                result["absent"][f"g{section.group} {section.dtype}"] = absent
            result |= {"machine_after": stamp(), "limits_after": [asdict(meter.limits(threads)) for threads in counts]}
            save(result)
    return result


def write(result: dict[str, Any], path: Path) -> None:
    """JSON with one cell a line: a result has some hundred thousand numbers."""
    head = {key: value for key, value in result.items() if key != "cells"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "cells": [\n'
    text += ",\n".join("  " + json.dumps(cell) for cell in result["cells"]) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def summary(result: dict[str, Any]) -> list[kernel_tables.Table]:
    """What a run prints."""
    cells = kernel_tables.cells_of(result)
    kinds = list(dict.fromkeys((cell["group"], cell["dtype"]) for cell in cells))
    tables = []
    for group, dtype in kinds:
        shapes = dict.fromkeys((c["k"], c["n"]) for c in cells if (c["group"], c["dtype"]) == (group, dtype))
        tables += [kernel_tables.times_table(result, k, n, group, dtype) for k, n in shapes]
        tables += [kernel_tables.error_table(result, group, dtype), kernel_tables.ratio_table(result, group, dtype)]
        tables.append(kernel_tables.state_table(result, group, dtype))
    tables += [limit_tables.limit_table(result), limit_tables.thread_table(result), limit_tables.cliff_table(result)]
    tables.append(kernel_tables.absent_table(result))
    return [table for table in tables if table.rows]


def _shape(text: str) -> tuple[int, int]:
    k, _, n = text.partition("x")
    return int(k), int(n)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a subset of 3 minutes; writes no result by default")
    parser.add_argument("--sections", nargs="+", choices=("peers", "sweep", "threads"), help="only these")
    parser.add_argument("--groups", nargs="+", type=int, help="only these group sizes")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp16", "fp32"), help="only these dtypes of x")
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="KxN", help="instead of the plan's")
    parser.add_argument("--m", nargs="+", type=int, help="batch sizes instead of the plan's")
    parser.add_argument("--contenders", nargs="+", choices=tuple(BY_NAME), help="awqjit's and these only")
    parser.add_argument("--rounds", type=int, help="instead of the plan's")
    parser.add_argument("--seconds", type=float, help="of calls, for each contender in each round")
    parser.add_argument("--threads", type=int, help="CPUs to use, a thread each [all]")
    parser.add_argument("--home", type=Path, default=None, help=f"folder of the environments [{default_home()}]")
    parser.add_argument("--rotate-bytes", type=int, default=ROTATE_BYTES, help="of weights, for each contender")
    parser.add_argument(
        "--busy-limit", type=float, default=0.05, help="share of the machine that others may take in a round [0.05]"
    )
    parser.add_argument("--output", type=Path, default=None, help="file to write")
    options = parser.parse_args()
    chosen = {
        key: tuple(value) for key, value in (("shapes", options.shapes), ("batches", options.m)) if value is not None
    } | {key: value for key, value in vars(options).items() if key in ("rounds", "seconds") and value is not None}
    sections = [
        replace(section, **chosen)
        for section in (QUICK if options.quick else FULL)
        if section.name in (options.sections or ("peers", "sweep", "threads"))
        and section.group in (options.groups or (section.group,))
        and section.dtype in (options.dtypes or (section.dtype,))
    ]
    if not sections:
        parser.error("nothing to measure: no section of the plan has that group size and dtype")
    contenders = [one for one in CONTENDERS if one.ours or options.contenders is None or one.name in options.contenders]
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cpus = usable[: options.threads]
    home = (options.home or default_home()).absolute()
    path: Path | None = options.output or (None if options.quick else RESULTS / f"kernels-{cpu_slug()}.json")

    def save(result: dict[str, Any]) -> None:
        if path is not None:
            write(result, path)

    result = measure(sections, contenders, home, cpus, options.rotate_bytes, options.busy_limit, save)
    print_stamp(result["machine"], result["machine_after"])
    for table in summary(result):
        print_table(table.title, table.columns, table.rows)
    if path is not None:
        print(f"written: {path}")
    wrong = kernel_tables.wrong_cells(result)
    if wrong:
        print(f"wrong results: {'; '.join(wrong)}", file=sys.stderr)
    return int(any(text.startswith("awqjit") for text in wrong))


if __name__ == "__main__":
    sys.exit(main())
