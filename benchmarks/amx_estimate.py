# SPDX-License-Identifier: Apache-2.0
"""How near the AMX kernels may come to the peak of the tile unit: a model's estimate, made without the hardware.

``python -m benchmarks.amx_estimate`` builds each kernel, runs it under the emulator of the tests, single-steps one job
(two column blocks over all of K, on one core, activations prepared before) and hands the instructions it executed to
the model in :mod:`benchmarks.amx_core`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from awqjit import config, jit
from awqjit.launch import CompiledKernel
from awqjit.layout import pack
from awqjit.weight import QuantizedWeight
from benchmarks import amx_published, common
from benchmarks.amx_core import TDP_CYCLES, Core, Estimate, disassemble

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from amx_emulator.emulator import Emulator, build, unavailable
from amx_emulator.machine import emulated_amx

K, N = 4096, 32
ROWS = (16, 64, 128, 512)
GROUPS = (32, 64, 128)
MODES = {"amx_int8": "w4a8", "amx_bf16": "w4a16"}
MACS_PER_CYCLE = {"amx_int8": 16 * 16 * 64 / TDP_CYCLES, "amx_bf16": 16 * 16 * 32 / TDP_CYCLES}
"""Multiply-adds a cycle of the tile unit at its peak."""
MOST = 16_000_000  # instructions of a trace
PREPARING = "prepare"  # in the names of functions that are not part of a job


def base_of(kernel: CompiledKernel) -> int:
    """Where the kernel's library is loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return min(int(line.partition("-")[0], 16) for line in lines if line.endswith(str(kernel.path.resolve())))


def trace(emulator: Emulator, kernel: CompiledKernel, weight: Any, x: torch.Tensor) -> np.ndarray:
    """Instructions that a call executes in the kernel's library: [count, 17], addresses relative to the library."""
    base = base_of(kernel)
    entries = np.empty((MOST, 17), dtype=np.uint64)
    arguments = (x, weight.weight, weight.scales, weight.zeros, None)
    kernel(*arguments)  # sites patched, caches of this machine warm
    emulator.library.amx_trace_start(base, base + kernel.path.stat().st_size + (1 << 16), entries.ctypes.data, MOST)
    kernel(*arguments)
    count = emulator.library.amx_trace_stop()
    if count == MOST:
        raise SystemExit(f"the trace has more than {MOST} instructions")
    entries[:count, 0] -= np.uint64(base)
    return entries[:count]


@dataclass(frozen=True)
class Answer:
    """What the model says of one kernel and number of rows.

    Attributes:
        job: one job, all it reads in the caches: that of a core that goes on to other columns with the same rows of x.
        rows: of x in that job.
        first: all jobs of the call, one after the other: each begins with rows of x that lie in no near cache if they
            are too many for the second one. The same as ``job`` where there is only one.
    """

    job: Estimate
    rows: int
    first: Estimate


def estimate(emulator: Emulator, row: str, group: int, m: int, k: int) -> Answer:
    """The model's answer for one kernel and number of rows."""
    problem = common.layer_problem(k, N, group, compute=MODES[row])
    torch.manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (k // 8, N), dtype=torch.int32)
    zeros = torch.randint(0, 16, (k // group, N), dtype=torch.uint8)
    weight = pack(QuantizedWeight(random, torch.rand(k // group, N).half() / 100, zeros, group, k, N))
    x = torch.randn(m, k).bfloat16()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with config.override(kernel=row):
            kernel = jit.choose(problem).kernel
            assert isinstance(kernel, CompiledKernel) and kernel.name == row
            entries = trace(emulator, kernel, weight, x)
    finally:
        torch.set_num_threads(threads)
    code, functions = disassemble(kernel.path)
    keep = np.ones(len(entries), dtype=bool)
    for name, (low, high) in functions.items():
        if PREPARING in name or not any(part in name for part in ("prefill", "multiply", "unpack", "drain")):
            keep &= (entries[:, 0] < low) | (entries[:, 0] >= high)
    jobs = [low for name, (low, _) in functions.items() if "multiply_job" in name]
    executed = entries[keep]
    begins = np.flatnonzero(np.isin(executed[:, 0], np.array(jobs, dtype=np.uint64)))
    whole = Core(code).run(executed.tolist())
    if len(begins) == 1:
        return Answer(whole, m, whole)
    return Answer(Core(code).run(executed[: begins[1]].tolist()), m // len(begins), whole)


def peak_share(row: str, m: int, k: int, found: Estimate) -> float:
    """Multiply-adds that the job needs (padding not counted), of those the tile unit can do in the model's cycles."""
    return m * N * k / found.cycles / MACS_PER_CYCLE[row]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.amx_estimate", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short K and few rows: to see that it works")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="numbers of rows of x")
    parser.add_argument("--groups", type=int, nargs="+", default=list(GROUPS), help="group sizes")
    parser.add_argument("--kernels", nargs="+", choices=list(MODES), default=list(MODES), help="kernel rows")
    parser.add_argument(
        "--out", type=Path, default=common.RESULTS / "amx-estimate-sapphire-rapids.json", help="where figures go"
    )
    options = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    k, rows = (512, [16, 64]) if options.quick else (K, options.rows)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        emulator = Emulator(build(Path(folder) / "libamx.so"))
        print(
            "MODEL ESTIMATES (3 to 11 % optimistic) of one Sapphire Rapids core; nothing was measured on such a machine"
        )
        with emulated_amx(emulator):
            assert emulator.arch_prctl(0x1023, 18) == 0
            published = amx_published.compare(emulator, Path(folder))
            for row in options.kernels:
                for group in options.groups:
                    for m in rows:
                        answer = estimate(emulator, row, group, m, k)
                        found = answer.job
                        share = peak_share(row, answer.rows, k, found)
                        first = peak_share(row, m, k, answer.first)
                        results.append(
                            {
                                "kernel": row, "group": group, "rows": m, "k": k, "peak_share": round(share, 4),
                                "peak_share_of_first_columns": round(first, 4), "rows_of_job": answer.rows,
                                "cycles": found.cycles, "products": found.products,
                                "instructions": found.instructions, "bottleneck": found.bottleneck,
                                "bounds": {name: round(value) for name, value in found.bounds.items()},
                            }
                        )  # fmt: skip
                        bound = found.bounds[found.bottleneck] / found.cycles
                        print(
                            f"{row} g={group:<4} M={m:<4} {share:6.1%} of the tile unit's peak; most work: "
                            f"{found.bottleneck} ({bound:.0%} of the time)",
                            flush=True,
                        )
    if not options.quick:
        path = common.write_result(
            "amx-estimate",
            {
                "what": "estimates of a model, not measurements: one Sapphire Rapids core, one job of 32 columns, data "
                "in its caches, activations prepared; 3 to 11 % optimistic on published measurements",
                "k": k,
                "published": published,
                "machine_that_computed_them": common.stamp(),
                "results": results,
            },
            options.out,
        )
        print(f"written: {path}")


if __name__ == "__main__":
    main()
