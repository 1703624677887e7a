# SPDX-License-Identifier: Apache-2.0
"""The limits of this machine that kernels are held against: peak dot products and read bandwidth, measured now."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from awqjit import config, machine, select, toolchain

OPERATIONS = {"dot_int8": 128, "dot_bf16": 64, "dot_fp32": 32}
"""Operations of one instruction on 64 bytes, a multiplication and an addition counted as two."""

KIND_OF = {"int8": "dot_int8", "bf16": "dot_bf16", "fp32": "dot_fp32"}
"""What a contender's products run in -> the instructions that bound it."""

ACCUMULATORS = 16  # instructions in one round of limits.cpp
STREAMS = (1, 2, 4)  # read at once by a thread; the best counts

ONE_CHIPLET_NS = 150.0
"""Cores that see each other's writes within this share a last-level cache."""

_ROUNDS = 1_000_000  # some 5 ms
_READ_BYTES = 1 << 29  # far more than any cache
_PROBE_BYTES = 1 << 27
_PING_PONGS = 4000  # about 1 ms


@dataclass(frozen=True)
class Limits:
    """What so many threads reach together.

    Attributes:
        threads: how many.
        gops: kind of dot product -> 10^9 operations a second; kinds the CPU lacks are absent.
        gbs: 10^9 bytes read from memory a second.
    """

    threads: int
    gops: dict[str, float]
    gbs: float

    def seconds(self, kind: str | None, operations: float, bytes_read: float) -> float | None:
        """The least time for a kernel that does so many operations and reads so many bytes, or None if not known."""
        if kind not in self.gops:
            return None
        return max(operations / self.gops[kind], bytes_read / self.gbs) / 1e9


class Meter:
    """Measures; compiles its program when entered.

    Args:
        cpus: numbers of the CPUs to use, a thread each.
        width: bytes of the registers that it reads and computes with: 64, or 32 to see what AVX2 can reach at most.

    Raises:
        NoCompilerError, CompileError: the measuring program cannot be built (on entering).
    """

    def __init__(self, cpus: list[int], width: int = 64) -> None:
        self.cpus = cpus
        self.width = width
        self._folder = tempfile.TemporaryDirectory(prefix="awqjit-limits-")
        self._data = np.empty(0, np.uint8)

    def __enter__(self) -> Meter:
        self._library = _build(Path(self._folder.name), self.width)
        self._library.together.restype = ctypes.c_double
        self._library.ping_pong.restype = ctypes.c_double
        self._data = np.ones(_READ_BYTES, np.uint8)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._data = np.empty(0, np.uint8)
        self._folder.cleanup()

    def _together(self, name: str, amount: int, threads: int) -> float:
        function: Any = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        read, dot = (function, None) if name.startswith("read") else (None, function)
        cpus = (ctypes.c_int * threads)(*self.cpus[:threads])
        data = ctypes.c_void_p(self._data.ctypes.data)
        seconds = float(self._library.together(read, dot, data, ctypes.c_int64(amount), threads, cpus))
        if seconds <= 0:
            raise OSError(f"{threads} threads could not be started")
        return seconds

    def bandwidth(self, threads: int, repeats: int, size: int = _READ_BYTES) -> float:
        """10^9 bytes a second read by so many threads, the best of all tries and numbers of streams."""
        share = size // threads // 4096 * 4096
        best = min(self._together(f"read_{s}", share, threads) for s in STREAMS for _ in range(repeats))
        return threads * share / best / 1e9

    def limits(self, threads: int | None = None, repeats: int = 15) -> Limits:
        """The best of a few tries with so many threads, by default one on each CPU."""
        threads = threads or len(self.cpus)
        gops: dict[str, float] = {}
        for kind, operations in OPERATIONS.items():
            if hasattr(self._library, kind):
                best = min(self._together(kind, _ROUNDS, threads) for _ in range(repeats))
                gops[kind] = threads * _ROUNDS * ACCUMULATORS * operations * self.width / 64 / best / 1e9
        return Limits(threads, gops, self.bandwidth(threads, repeats))

    def state(self) -> dict[str, float]:
        """The memory's speed at this moment, in some 20 ms.

        Returns:
            ``gbs``: see :class:`Limits`; ``ping_pong_ns``: until a write of the first CPU is seen by the last, where
            there is more than one.
        """
        found = {"gbs": round(self.bandwidth(len(self.cpus), 2, _PROBE_BYTES), 2)}
        if len(self.cpus) > 1:
            first, last = self.cpus[0], self.cpus[-1]
            found["ping_pong_ns"] = round(self._library.ping_pong(first, last, ctypes.c_int64(_PING_PONGS)), 1)
        return found


def _build(folder: Path, width: int) -> ctypes.CDLL:
    here = machine.detect()
    flags: dict[str, None] = {}
    for row in select.ROWS:
        if row.target is not None and row.target.features and here.missing(row.target.features) is None:
            flags |= dict.fromkeys(row.target.flags)
    source = Path(shutil.copy(Path(__file__).with_name("limits.cpp"), folder))
    library = folder / "limits.so"
    flags |= dict.fromkeys((f"-DWIDTH={width}", "-Wno-psabi", "-pthread"))
    toolchain.compile_shared(toolchain.find_compiler(), source, tuple(flags), library, config.COMPILE_TIMEOUT.read())
    return ctypes.CDLL(str(library))
