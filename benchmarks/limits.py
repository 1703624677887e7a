# SPDX-License-Identifier: Apache-2.0
"""The limits of this machine that kernels are held against: peak dot products and read bandwidth, measured now."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from awqjit import config, machine, select, toolchain

OPERATIONS = {"dot_int8": 128, "dot_bf16": 64, "dot_fp32": 32}
"""Operations of one 64-byte instruction, a multiplication and an addition counted as two."""

KIND_OF = {"avx512_vnni": "dot_int8", "avx512_bf16": "dot_bf16", "avx512_fp32": "dot_fp32"}
"""A kernel's vocabulary -> the instructions that bound it. Others have no known bound."""

ACCUMULATORS = 16  # instructions in one round of limits.cpp
_ROUNDS = 1_000_000  # some 5 ms
_READ_BYTES = 1 << 29  # far more than any cache


@dataclass(frozen=True)
class Limits:
    """What all threads reach together.

    Attributes:
        gops: kind of dot product -> 10^9 operations a second; kinds the CPU lacks are absent.
        gbs: 10^9 bytes read from memory a second.
    """

    gops: dict[str, float]
    gbs: float

    def seconds(self, kind: str | None, operations: float, bytes_read: float) -> float | None:
        """The least time for a kernel that does so many operations and reads so many bytes, or None if not known."""
        if kind not in self.gops:
            return None
        return max(operations / self.gops[kind], bytes_read / self.gbs) / 1e9


def _build(folder: Path) -> ctypes.CDLL:
    here = machine.detect()
    flags: dict[str, None] = {}
    for row in select.ROWS:
        if row.target is not None and row.target.features and here.missing(row.target.features) is None:
            flags |= dict.fromkeys(row.target.flags)
    source = Path(shutil.copy(Path(__file__).with_name("limits.cpp"), folder))
    library = folder / "limits.so"
    toolchain.compile_shared(
        toolchain.find_compiler(), source, (*flags, "-Wno-psabi"), library, config.COMPILE_TIMEOUT.read()
    )
    return ctypes.CDLL(str(library))


def _together(threads: int, work: Callable[[int], object]) -> float:
    """Seconds until all threads are done; they start together. ctypes lets go of the interpreter's lock."""
    barrier = threading.Barrier(threads + 1)

    def run(index: int) -> None:
        barrier.wait()
        work(index)

    pool = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for thread in pool:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in pool:
        thread.join()
    return time.perf_counter() - start


def measure(threads: int, repeats: int = 15) -> Limits:
    """The best of a few tries with so many threads.

    Raises:
        NoCompilerError, CompileError: the measuring program cannot be built.
    """
    with tempfile.TemporaryDirectory(prefix="awqjit-limits-") as temporary:
        library = _build(Path(temporary))
        gops: dict[str, float] = {}
        for kind, operations in OPERATIONS.items():
            function = getattr(library, kind, None)
            if function is None:
                continue
            function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_float
            dot: Callable[[int], object] = function
            best = min(_together(threads, lambda index, dot=dot: dot(_ROUNDS)) for _ in range(repeats))  # type: ignore[misc]
            gops[kind] = threads * _ROUNDS * ACCUMULATORS * operations / best / 1e9
        read = library.read_memory
        read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
        buffer = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
        share = _READ_BYTES // threads // 4096 * 4096
        best = min(
            _together(threads, lambda index: read(buffer.data_ptr() + index * share, share)) for _ in range(repeats)
        )
        return Limits(gops, threads * share / best / 1e9)
