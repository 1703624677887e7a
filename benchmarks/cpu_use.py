# SPDX-License-Identifier: Apache-2.0
"""How much of the machine other programs took meanwhile, from ``/proc``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_IDLE = (3, 4)  # idle, iowait
_FIELDS = 8  # user nice system idle iowait irq softirq steal; guest times are part of user's


def busy_ticks(stat: str) -> dict[int, int]:
    """CPU -> ticks it did not idle, stolen ones included, from the text of ``/proc/stat``."""
    busy = {}
    for line in stat.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(value) for value in values[:_FIELDS]]
            busy[int(name[3:])] = sum(ticks) - sum(ticks[index] for index in _IDLE)
    return busy


def process_ticks(stat: str) -> int:
    """Ticks a process ran with all its threads, from the text of ``/proc/<pid>/stat``."""
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return int(fields[11]) + int(fields[12])


def foreign_share(busy: float, own: float, wall: float, cpus: int) -> float:
    """Share of the machine that others took.

    Args:
        busy: seconds that all CPUs together did not idle.
        own: seconds that own processes ran.
        wall: seconds that passed.
        cpus: how many there are.
    """
    return max(0.0, busy - own) / (wall * cpus)


@dataclass(frozen=True)
class Reading:
    """Seconds so far: of busy CPUs, of own processes, and on the clock."""

    busy: float
    own: float
    wall: float
    cpus: int


def read(processes: Iterable[int]) -> Reading | None:
    """Now; None where there is no ``/proc/stat``. The calling process counts as own.

    Raises:
        FileNotFoundError: a process has ended.
    """
    try:
        busy = busy_ticks(Path("/proc/stat").read_text())
    except OSError:
        return None
    own = sum(process_ticks(Path(f"/proc/{pid}/stat").read_text()) for pid in {os.getpid(), *processes})
    tick = os.sysconf("SC_CLK_TCK")
    return Reading(sum(busy.values()) / tick, own / tick, time.perf_counter(), len(busy))


def between(before: Reading | None, after: Reading | None) -> float | None:
    """The foreign share from one reading to another; None where it cannot be known."""
    if before is None or after is None:
        return None
    return foreign_share(
        after.busy - before.busy, after.own - before.own, max(after.wall - before.wall, 1e-9), after.cpus
    )
