# SPDX-License-Identifier: Apache-2.0
"""One linear layer at a time: awqjit's two modes, dense bf16 and torch's own int4 kernel, over shapes and batch sizes.

    python -m benchmarks.kernels [--quick] [--shapes 4096x4096 ...] [--m 1 16 ...] [--group 128] [--output FILE]

Contenders take turns call by call. Each has copies of its weights that exceed any cache and uses them in rotation, so
that a call never finds its weights in one. Outputs are poisoned before the calls that are compared with an fp32
reference, before and after the timing. The machine's limits are measured in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from awqjit import jit, progress
from benchmarks import limits
from benchmarks.common import (
    MODES,
    layer_problem,
    print_stamp,
    print_table,
    relative_error,
    stamp,
    summary,
    write_result,
)
from benchmarks.contenders import (
    DENSE,
    TORCH_INT4,
    Contender,
    dense_contender,
    int4_contender,
    make_weight,
    torch_int4_contender,
)

SHAPES = ((3584, 18944), (18944, 3584), (4096, 4096), (896, 4864), (4864, 896), (1536, 8960))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
TOLERANCE = {"w4a16": 0.01, "w4a8": 0.02, DENSE: 0.01, TORCH_INT4: 0.02}
"""Relative error that a right result stays below: bf16 rounding is 0.002, int8 activations 0.008, bf16 scales 0.005."""

_CHECKED_COLUMNS = 512  # of either end


def poisoned_error(contender: Contender, x: torch.Tensor, columns: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error of a fresh output whose memory, as far as the allocator reuses it, held NaN before."""
    old = contender.call(x, 0)
    place = old.data_ptr()
    old.fill_(torch.nan)
    del old
    y = contender.call(x, contender.copies - 1)
    if y.data_ptr() != place:  # fresh pages are zero, which is as wrong as NaN; anything else is tried once more
        again = contender.call(x, 0).fill_(torch.nan)
        del again, y
        y = contender.call(x, contender.copies - 1)
    return relative_error(y[:, columns], reference)


def time_cell(contenders: list[Contender], x: torch.Tensor, seconds: float, least: int, most: int) -> list[list[float]]:
    """Seconds of each call, in turns that begin with another contender each round; every copy is as old as any."""
    times: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + seconds * len(contenders)
    turn = 0
    while turn < least or (turn < most and time.perf_counter() < end):
        for step in range(len(contenders)):
            index = (turn + step) % len(contenders)
            contender = contenders[index]
            start = time.perf_counter()
            contender.call(x, turn % contender.copies)
            times[index].append(time.perf_counter() - start)
        turn += 1
    return times


def measure_shape(
    k: int,
    n: int,
    group: int,
    batches: list[int],
    machine_limits: limits.Limits,
    rotate_bytes: int,
    seconds: float,
    least: int,
    most: int,
    advance: Callable[[], None],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One row per batch size and contender, and the contenders that do not run, with the reason."""
    weight = make_weight(k, n, group)
    fastest_float = next((kind for kind in ("dot_bf16", "dot_fp32") if kind in machine_limits.gops), None)
    contenders = [int4_contender(mode, weight, rotate_bytes) for mode in MODES]
    contenders.append(dense_contender(weight, rotate_bytes, fastest_float))
    absent: dict[str, str] = {}
    peer = torch_int4_contender(weight, rotate_bytes, fastest_float)
    if isinstance(peer, Contender):
        contenders.append(peer)
    else:
        absent[TORCH_INT4] = peer
    columns = torch.arange(n)
    if n > 2 * _CHECKED_COLUMNS:
        columns = torch.cat((columns[:_CHECKED_COLUMNS], columns[-_CHECKED_COLUMNS:]))
    checked = weight.dequantize(torch.float32)[:, columns]
    rows = []
    for m in batches:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
        reference = x.float() @ checked
        errors = [poisoned_error(contender, x, columns, reference) for contender in contenders]
        times = time_cell(contenders, x, seconds, least, most)
        dense = statistics.median(times[len(MODES)])
        for contender, before, measured in zip(contenders, errors, times, strict=True):
            after = poisoned_error(contender, x, columns, reference)
            # max() would drop a NaN that comes second
            error = math.nan if math.isnan(before) or math.isnan(after) else max(before, after)
            median = statistics.median(measured)
            operations = 2 * m * k * n
            bound = machine_limits.seconds(contender.kind, operations, contender.bytes_read)
            rows.append(
                {
                    "k": k,
                    "n": n,
                    "m": m,
                    "contender": contender.name,
                    "copies": contender.copies,
                    "seconds": summary(measured),
                    "gbs": contender.bytes_read / median / 1e9,
                    "gops": operations / median / 1e9,
                    "of_limit": None if bound is None else bound / median,
                    "speedup_over_dense": dense / median,
                    "error": error,
                    "right": error <= TOLERANCE[contender.name],
                }
            )
            advance()
    return rows, absent


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def means(rows: list[dict[str, Any]], batches: list[int]) -> dict[str, Any]:
    """Geometric means over shapes, for each contender: per batch size and over all."""
    result: dict[str, Any] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == name]
        known = [row["of_limit"] for row in own if row["of_limit"] is not None]
        result[name] = {
            "speedup_over_dense": geometric_mean([row["speedup_over_dense"] for row in own]),
            "of_limit": geometric_mean(known) if known else None,
            "speedup_over_dense_by_m": {
                m: geometric_mean([row["speedup_over_dense"] for row in own if row["m"] == m]) for m in batches
            },
        }
    return result


def show(rows: list[dict[str, Any]]) -> None:
    k, n = rows[0]["k"], rows[0]["n"]
    lines = []
    for row in rows:
        lines.append(
            (
                f"{row['m']}  {row['contender']}",
                f"{row['seconds']['median'] * 1e6:.0f}",
                f"{row['gbs']:.1f}",
                f"{row['gops']:.0f}",
                "" if row["of_limit"] is None else f"{row['of_limit']:.0%}",
                f"{row['speedup_over_dense']:.2f}",
                f"{row['error']:.1e}" + ("" if row["right"] else " WRONG"),
            )
        )
    print_table(f"K={k} N={n}", ("M, contender", "median µs", "GB/s", "GOP/s", "of limit", "× dense", "error"), lines)


def _shape(text: str) -> tuple[int, int]:
    k, _, n = text.partition("x")
    return int(k), int(n)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small shape, few calls; writes no result by default")
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="KxN", help="default: six layers of Qwen2 models")
    parser.add_argument("--m", nargs="+", type=int, help="batch sizes (default: 1 to 1024)")
    parser.add_argument("--group", type=int, default=128, help="group size")
    parser.add_argument("--seconds", type=float, help="for each contender and cell (default: 0.4)")
    parser.add_argument("--rotate-mb", type=int, help="weights of each contender in all copies (default: 320 MB)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args()
    quick = options.quick
    shapes = options.shapes or ([(896, 4864)] if quick else list(SHAPES))
    batches = options.m or ([1, 16] if quick else list(BATCHES))
    seconds = options.seconds or (0.05 if quick else 0.4)
    rotate_bytes = (options.rotate_mb or (64 if quick else 320)) * 1_000_000
    least, most = (3, 50) if quick else (7, 2000)

    before = stamp()
    jit.warm([layer_problem(k, n, options.group, compute=mode) for k, n in shapes for mode in MODES])
    machine_limits = limits.measure(torch.get_num_threads())
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    with progress.bar("timing", len(shapes) * len(batches) * 4) as advance:
        for k, n in shapes:
            found, missing = measure_shape(
                k, n, options.group, batches, machine_limits, rotate_bytes, seconds, least, most, advance
            )
            rows += found
            absent |= missing
    limits_after = limits.measure(torch.get_num_threads())
    after = stamp()
    averages = means(rows, batches)
    for k, n in shapes:
        show([row for row in rows if (row["k"], row["n"]) == (k, n)])
    peaks = ", ".join(f"{kind.removeprefix('dot_')} {value:.0f} GOP/s" for kind, value in machine_limits.gops.items())
    print(f"limits: {machine_limits.gbs:.1f} GB/s (after the run {limits_after.gbs:.1f}); {peaks}")
    for name, reason in absent.items():
        print(f"{name} does not run: {reason}")
    print_stamp(before, after)
    print_table(
        f"Geometric means over {len(shapes)} shapes, group size {options.group}",
        ("contender", *(f"M={m} × dense" for m in batches), "all × dense", "of limit"),
        [
            (
                name,
                *(f"{row['speedup_over_dense_by_m'][m]:.2f}" for m in batches),
                f"{row['speedup_over_dense']:.2f}",
                "" if row["of_limit"] is None else f"{row['of_limit']:.0%}",
            )
            for name, row in averages.items()
        ],
    )
    if options.output or not quick:
        payload = {
            "machine": before,
            "machine_after": after,
            "limits": vars(machine_limits),
            "limits_after": vars(limits_after),
            "group_size": options.group,
            "absent": absent,
            "means": averages,
            "cells": rows,
        }
        print(f"written: {write_result('kernels', payload, options.output)}")
    wrong = [f"{row['contender']} K={row['k']} N={row['n']} M={row['m']}" for row in rows if not row["right"]]
    if wrong:
        print(f"wrong results: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
