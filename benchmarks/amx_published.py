# SPDX-License-Identifier: Apache-2.0
"""The model of :mod:`benchmarks.amx_core` on a loop that others have measured: ``python -m benchmarks.amx_published``.

The figures are those of a public repository of AMX experiments (usstq/mm_amx) for one core of a Sapphire Rapids
machine: bf16 matrices of 256 x 256 x 256, operations a cycle of the 1024 that the tile unit can do at most.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.amx_core import Core, Estimate, disassemble

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from amx_emulator.emulator import Emulator, build, unavailable

PEAK = 1024.0
"""bf16 operations a cycle, a multiplication and an addition counted as two."""
OPERATIONS = 2 * 256**3
MOST = 100_000  # instructions of a trace


@dataclass(frozen=True)
class Published:
    """One measured loop: how A lies in memory, and the least and most operations a cycle that were reported."""

    name: str
    a_step: int
    least: float
    most: float


PUBLISHED = (
    Published("A in tiles", 64, 738, 746),
    Published("A row by row, 512 bytes apart", 512, 692, 696),
    Published("A row by row, 576 bytes apart", 576, 742, 746),
)


def estimate(emulator: Emulator, folder: Path, a_step: int) -> Estimate:
    """The model's answer for the loop, with A's rows so many bytes apart."""
    library = folder / "published.so"
    if not library.exists():
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run(["g++", "-O2", "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    lines = Path("/proc/self/maps").read_text().splitlines()
    base = min(int(line.partition("-")[0], 16) for line in lines if line.endswith(str(library)))
    a, b, c = (np.zeros(1 << 18 | 1 << 12, dtype=np.uint8) for _ in range(3))
    pointers = [ctypes.c_void_p((one.ctypes.data + 4095) & ~4095) for one in (a, b, c)]  # as whole pages
    arguments = (pointers[0], ctypes.c_int64(a_step), pointers[1], pointers[2])
    entries = np.empty((MOST, 17), dtype=np.uint64)
    loaded.multiply(*arguments)
    emulator.library.amx_trace_start(base, base + library.stat().st_size + 65536, entries.ctypes.data, MOST)
    loaded.multiply(*arguments)
    count = emulator.library.amx_trace_stop()
    assert count < MOST, "the trace is cut off"
    entries = entries[:count]
    entries[:, 0] -= np.uint64(base)
    code, functions = disassemble(library)
    low, high = functions["multiply"]
    keep = (entries[:, 0] >= low) & (entries[:, 0] < high)
    return Core(code).run(entries[keep].tolist())


def optimism(one: Published, found: Estimate) -> tuple[float, float, float]:
    """Operations a cycle that the model gives, and by what part they exceed the most and the least measured ones."""
    rate = OPERATIONS / found.cycles
    return rate, rate / one.most - 1, rate / one.least - 1


def compare(emulator: Emulator, folder: Path) -> list[dict[str, object]]:
    """Every published figure beside the model's. The emulator has to be installed, and permission asked for."""
    rows: list[dict[str, object]] = []
    for one in PUBLISHED:
        rate, low, high = optimism(one, estimate(emulator, folder, one.a_step))
        rows.append(
            {
                "loop": one.name, "measured": [one.least, one.most], "model": round(rate),
                "optimism": [round(low, 3), round(high, 3)],
            }
        )  # fmt: skip
        print(
            f"{one.name}: measured {one.least:.0f} to {one.most:.0f} bf16 operations a cycle of {PEAK:.0f}, "
            f"model {rate:.0f}: {low:+.1%} to {high:+.1%}",
            flush=True,
        )
    return rows


def main() -> None:
    if reason := unavailable():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Emulator(build(folder / "libamx.so")).installed() as emulator:
            assert emulator.arch_prctl(0x1023, 18) == 0
            compare(emulator, folder)


if __name__ == "__main__":
    main()
