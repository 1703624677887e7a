# SPDX-License-Identifier: Apache-2.0
"""Every compiled x86-64 row on one layer, beside torch's int4 kernel held to AVX2 and beside 256-bit limits.

    python -m benchmarks.rows [--quick] [--shapes 4096x4096 ...] [--m 1 16 ...]

A wide machine runs the narrow rows too; whether these are good for the CPUs that have nothing wider is what this asks.
torch reads ``ATEN_CPU_CAPABILITY`` when it is loaded, so the measuring process is a child with that set; awqjit's
rows do not look at it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from awqjit import cache, machine, progress
from awqjit.launch import CompiledKernel
from awqjit.render import render
from awqjit.spec import KernelSpec
from awqjit.target import TARGETS, Target, target
from benchmarks.common import interleave, layer_problem, print_stamp, print_table, stamp, write_result
from benchmarks.limits import Meter
from benchmarks.peers.awqjit_rows import W4A8
from benchmarks.peers.data import make_weights, make_x, relative_error
from benchmarks.peers.torch_int4pack import Int4Pack
from benchmarks.plan import ROTATE_BYTES
from benchmarks.rounds import TOLERANCE

CAP = "ATEN_CPU_CAPABILITY"
PEER = "torch int4pack, AVX2"
GROUP = 128
BATCHES = (1, 16, 64, 256)

# CPUs with AVX512-VNNI but without AVX-VNNI run that row's source in another encoding of the same instructions.
TWIN = replace(
    target("avx_vnni"),
    name="avx_vnni_evex",
    features=frozenset({"avx2", "fma", "f16c", "avx512vl", "avx512_vnni"}),
    flags=("-mavx2", "-mfma", "-mf16c", "-mavx512vl", "-mavx512vnni"),
)

Call = Callable[[Tensor], Tensor]


def targets() -> list[Target]:
    """The rows whose instructions this machine has; the twin where it lacks the real one."""
    here = machine.detect()
    found = [one for one in TARGETS if here.missing(one.features) is None and "x86_64" in (one.machines or ("x86_64",))]
    if here.missing(target("avx_vnni").features) is not None and here.missing(TWIN.features) is None:
        found.append(TWIN)
    return found


class Layer:
    """One layer: every row's kernel, torch's, and copies of the weights that no cache holds together."""

    def __init__(self, k: int, n: int, rotate_bytes: int) -> None:
        self.weights = make_weights(k, n, GROUP, zero_points=True)
        copies = max(1, -(-rotate_bytes // (k * n // 2)))
        self.bytes = k * n // 2 + (k // GROUP) * n * 3  # words, fp16 scales, zero points of a byte
        ours, peer = W4A8(torch.get_num_threads()), Int4Pack(torch.get_num_threads())
        for adapter in (ours, peer):
            adapter.setup()
        first = ours.prepare(self.weights, "bf16")
        packed = [first, *(ours.clone(first) for _ in range(copies - 1))]
        self.calls: dict[str, list[Call]] = {}
        for bits in (8, 16):
            for row in targets():
                if bits in row.act_bits:
                    kernel = self._kernel(row, bits)
                    self.calls[f"w4a{bits} {row.name}"] = [
                        lambda x, kernel=kernel, one=one: kernel(x, one[0], one[1], one[2], None) for one in packed
                    ]
        words = peer.prepare(self.weights, "bf16")
        rotated = [words, *(peer.clone(words) for _ in range(copies - 1))]
        self.calls[PEER] = [lambda x, one=one: peer.call(one, x) for one in rotated]
        self._next = dict.fromkeys(self.calls, 0)

    def _kernel(self, row: Target, bits: int) -> CompiledKernel:
        problem = layer_problem(self.weights.k, self.weights.n, GROUP, compute=f"w4a{bits}")
        spec = KernelSpec(problem, row, row.tile(bits, "bf16"))
        return CompiledKernel.load(spec, cache.fetch(cache.Request(spec.slug, render(spec), row.flags)).path)

    def seconds(self, name: str, x: Tensor, least: float) -> float:
        """Of one call, the mean over at least two calls and so much time."""
        calls, count = self.calls[name], 0
        start = time.perf_counter()
        while count < 2 or time.perf_counter() - start < least:
            calls[self._next[name]](x)
            self._next[name] = (self._next[name] + 1) % len(calls)
            count += 1
        return (time.perf_counter() - start) / count


def errors(layer: Layer, m: int) -> dict[str, float]:
    """Relative to float64, each contender's first copy."""
    x = make_x(m, layer.weights.k, "bf16", outliers=False)
    reference = x.astype(np.float64) @ layer.weights.float64(np.arange(layer.weights.n))
    inputs = torch.from_numpy(x).bfloat16()
    return {name: relative_error(calls[0](inputs).float().numpy(), reference) for name, calls in layer.calls.items()}


def measure_cell(layer: Layer, m: int, rounds: int, least: float, meter: Meter) -> dict[str, Any]:
    """One number of rows: each round times every contender once, and the machine's limits."""
    x = torch.from_numpy(make_x(m, layer.weights.k, "bf16", outliers=False)).bfloat16()
    found = errors(layer, m)
    limits: list[dict[str, float]] = []

    def limit() -> float:
        now = meter.limits(repeats=3)
        limits.append({"gbs": now.gbs, **now.gops})
        return 0.0

    timed = interleave(
        {**{name: lambda name=name: layer.seconds(name, x, least) for name in layer.calls}, "": limit}, rounds
    )
    del timed[""]
    return {
        "k": layer.weights.k,
        "n": layer.weights.n,
        "m": m,
        "bytes": layer.bytes,
        "errors": found,
        "seconds": {name: [float(f"{value:.4g}") for value in values] for name, values in timed.items()},
        "limits": [{name: round(value, 2) for name, value in one.items()} for one in limits],
    }


def ratio(cell: dict[str, Any], name: str, over: str) -> float | None:
    """How many times as fast one contender is as another: the median over the rounds."""
    seconds = cell["seconds"]
    if name not in seconds or over not in seconds:
        return None
    return statistics.median(b / a for a, b in zip(seconds[name], seconds[over], strict=True))


def share_of_limit(cell: dict[str, Any], name: str, limit: str) -> float | None:
    """What a row reaches of a 256-bit limit that was measured in the same round: the median over the rounds."""
    if name not in cell["seconds"] or limit not in cell["limits"][0]:
        return None
    work = cell["bytes"] if limit == "gbs" else 2 * cell["m"] * cell["k"] * cell["n"]
    pairs = zip(cell["seconds"][name], cell["limits"], strict=True)
    return statistics.median(work / seconds / 1e9 / limits[limit] for seconds, limits in pairs)


def goals(result: dict[str, Any]) -> list[tuple[str, str, float | None, float]]:
    """(shape, what is asked, what was measured, what is wanted), a line each."""
    lines: list[tuple[str, str, float | None, float]] = []
    for cell in result["cells"]:
        shape, m = f"{cell['k']}x{cell['n']}, M={cell['m']}", cell["m"]
        if m == 1:
            lines.append((shape, "avx2 w4a8 / 256-bit reads", share_of_limit(cell, "w4a8 avx2", "gbs"), 0.95))
        if m >= 16:
            for mode in ("w4a8", "w4a16"):
                lines.append((shape, f"avx2 {mode} × int4pack", ratio(cell, f"{mode} avx2", PEER), 1.5))
        if m == 64:
            lines.append((shape, "avx2 w4a8 / 256-bit VNNI peak", share_of_limit(cell, "w4a8 avx2", "dot_int8"), 0.55))
            twin = next((name for name in cell["seconds"] if name.startswith("w4a8 avx_vnni")), "")
            lines.append((shape, "avx_vnni w4a8 / 256-bit VNNI peak", share_of_limit(cell, twin, "dot_int8"), 0.72))
            lines.append((shape, "avx512bw w4a8 × avx2", ratio(cell, "w4a8 avx512bw", "w4a8 avx2"), 1.3))
    return [line for line in lines if line[2] is not None]


def table(result: dict[str, Any], k: int, n: int) -> tuple[list[str], list[list[str]]]:
    """Median microseconds of each contender and number of rows: the columns' names and the lines."""
    cells = {cell["m"]: cell for cell in result["cells"] if (cell["k"], cell["n"]) == (k, n)}
    names = next(iter(cells.values()))["seconds"]
    columns = ["µs, median", *(f"M={m}" for m in cells)]
    return columns, [
        [name, *(f"{statistics.median(cell['seconds'][name]) * 1e6:.0f}" for cell in cells.values())] for name in names
    ]


def shapes_of(result: dict[str, Any]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((cell["k"], cell["n"]) for cell in result["cells"]))


def _shape(text: str) -> tuple[int, int]:
    k, _, n = text.partition("x")
    return int(k), int(n)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tries it out: the figures mean nothing")
    parser.add_argument("--shapes", nargs="+", type=_shape, metavar="KxN", default=[(4096, 4096)])
    parser.add_argument("--m", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="of calls, for each contender in each round")
    parser.add_argument("--output", type=Path, help="JSON file instead of benchmarks/results/rows-<cpu>.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.shapes, options.rounds, options.seconds = [(512, 512)], 2, 0.002
    if os.environ.get(CAP) != "avx2":
        command = [sys.executable, "-m", "benchmarks.rows", *arguments]
        return subprocess.run(command, env=os.environ | {CAP: "avx2"}).returncode
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        raise SystemExit(f"torch runs its {torch.backends.cpu.get_cpu_capability()} kernels in spite of {CAP}=avx2")
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cpus = cpus[: torch.get_num_threads()]
    result: dict[str, Any] = {"machine": stamp(), "group": GROUP, "peer": PEER, "cells": []}
    steps = len(options.shapes) * len(options.m)
    with Meter(cpus, width=32) as meter, progress.bar("measuring", steps) as step:
        for k, n in options.shapes:
            layer = Layer(k, n, 0 if options.quick else ROTATE_BYTES)
            for m in options.m:
                result["cells"].append(measure_cell(layer, m, options.rounds, options.seconds, meter))
                step()
    result["machine_after"] = stamp()
    print_stamp(result["machine"], result["machine_after"])
    for k, n in shapes_of(result):
        print_table(f"{k} x {n}, group size {GROUP}, bf16 x", *table(result, k, n))
    lines = [[shape, what, f"{value:.2f}", f"{wanted}"] for shape, what, value, wanted in goals(result)]
    print_table("Against goals", ["layer", "what", "measured", "wanted"], lines)
    if not options.quick or options.output:
        print(write_result("rows", result, options.output))
    wrong = {name for cell in result["cells"] for name, error in cell["errors"].items() if not error <= TOLERANCE}
    if wrong:
        print(f"WRONG RESULTS: {', '.join(sorted(wrong))}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
