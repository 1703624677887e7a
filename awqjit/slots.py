# SPDX-License-Identifier: Apache-2.0
"""How many compilers run at once: no more than the cores and the memory this process may use, or ``AWQJIT_JOBS``.

A model's first forward pass, a thread pool or a server may want hundreds of kernels in the same second; each compiler
takes a core and :data:`COMPILER_BYTES` of memory. Limits of a container (cgroup version 1 and 2) count as the
machine's own do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from awqjit import config

COMPILER_BYTES = 256 << 20
"""Memory one compiler may take: g++ 12 was seen to take 128 MiB for a kernel."""

_RECHECK_SECONDS = 0.5  # memory comes back without telling anyone


@dataclass(frozen=True)
class Limits:
    """What this process may use now.

    Attributes:
        cores: of the machine, or of the affinity mask (cpusets included).
        quota: cores' worth of time a cgroup allows, or None.
        memory: bytes that can still be taken, or None where the system does not say.
    """

    cores: int
    quota: float | None
    memory: int | None


def usable_cores() -> int:
    """CPU cores this process may run on: its affinity mask where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def limits(root: Path = Path("/")) -> Limits:
    """Read the limits of this process.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    quotas, left = [], []
    memory = _memory_available(root / "proc/meminfo")
    if memory is not None:
        left.append(memory)
    for folder in _cgroups(root, "cpu"):
        quotas += _cpu_quota(folder)
    for folder in _cgroups(root, "memory"):
        left += _memory_left(folder)
    return Limits(usable_cores(), min(quotas, default=None), min(left, default=None))


def most() -> int:
    """Compilers that may run at once, those that already do included: ``AWQJIT_JOBS``, else what fits, at least 1.

    Raises:
        ConfigError: ``AWQJIT_JOBS`` is not a number.
    """
    return _most(running=_slots.taken)


def _most(running: int) -> int:
    chosen: int | None = getattr(_thread, "jobs", None) or config.JOBS.read()
    if chosen is not None:
        return chosen
    here = limits()
    fit = here.cores
    if here.quota is not None:
        fit = min(fit, int(here.quota))
    if here.memory is not None:
        fit = min(fit, running + here.memory // COMPILER_BYTES)
    return max(1, fit)


def choose(jobs: int | None) -> None:
    """Let this thread start a compiler whenever fewer than ``jobs`` run, whatever the limits are; None: obey them."""
    _thread.jobs = jobs


@contextmanager
def slot() -> Iterator[None]:
    """Wait until one more compiler may run, and count it as running for a block."""
    slots = _slots
    with slots.changed:
        while slots.taken >= _most(slots.taken):
            slots.changed.wait(_RECHECK_SECONDS)
        slots.taken += 1
    try:
        yield
    finally:
        with slots.changed:
            slots.taken -= 1
            slots.changed.notify_all()


class _Slots:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.taken = 0


_slots = _Slots()
_thread = threading.local()


def _after_fork_in_child() -> None:
    # The threads that held slots, or the lock, are gone.
    global _slots
    _slots = _Slots()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _memory_available(meminfo: Path) -> int | None:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Directories whose limits apply to this process for a controller, its own first, then those above it.

    In a container the path that the kernel names may lie outside of what is mounted; then its parents remain.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        mounted = root / "sys/fs/cgroup"
        if names:
            if controller not in names.split(","):
                continue
            mounted = next((d for d in (mounted / names, mounted / controller) if d.is_dir()), mounted / controller)
        own = mounted / path.strip("/")
        yield own
        if own != mounted:
            yield from (part for part in own.parents if part.is_relative_to(mounted))


def _cpu_quota(folder: Path) -> list[float]:
    text = _text(folder / "cpu.max")  # version 2: microseconds of CPU time, or "max", then those of the period
    words = text.split() or [_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    with suppress(ValueError, ZeroDivisionError):
        quota, period = map(int, words)
        return [quota / period] if quota > 0 else []
    return []


def _memory_left(folder: Path) -> list[int]:
    """Bytes that the cgroup can still take; pages of files that it would drop for them count as free."""
    for limit, usage, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(ValueError):
            most_bytes, used = int(_text(folder / limit)), int(_text(folder / usage))
            statistics = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            return [max(0, most_bytes - used + int(statistics.get(dropped, 0)))]
    return []
