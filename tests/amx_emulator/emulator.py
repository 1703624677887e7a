# SPDX-License-Identifier: Apache-2.0
"""Builds the emulator of AMX instructions and loads it into this process."""

from __future__ import annotations

import ctypes
import errno
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("decoder.c", "arithmetic.c", "execute.c", "traps.c")
KINDS = (
    *("ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored"),
    *("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud", "tdpbf16ps"),
)
"""``enum amx_kind`` of emulator.h."""
STRICT, PATCH, DENY, TELL = range(4)
"""``enum amx_option`` of emulator.h."""

_NEEDED = {"avx512f", "avx512bw", "avx512_vnni"}  # what the emulator itself computes with


def unavailable() -> str | None:
    """Why the emulator cannot run here, or None."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return f"AMX instructions are emulated on x86-64 Linux, this is {platform.system()} on {platform.machine()}"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if missing := sorted(_NEEDED - flags):
        return f"the emulator computes with {', '.join(missing)}, which this CPU has not"
    if "amx_tile" in flags:
        return "this CPU has AMX: nothing traps, nothing is emulated"
    return None if shutil.which("gcc") else "the emulator is built by gcc, which is not here"


def build(out: Path, *extra: str, sources: Path = FOLDER) -> Path:
    """Compile the emulator to a shared library."""
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", str(out)]
    subprocess.run([*command, *(str(sources / name) for name in (*SOURCES, *extra))], check=True)
    return out


class _Counters(ctypes.Structure):
    """``struct amx_counters`` of emulator.h."""

    _fields_ = (
        ("executed", ctypes.c_uint64 * len(KINDS)),
        *((name, ctypes.c_uint64) for name in ("traps", "rows", "split_loads", "undefined_reads", "faults")),
    )


@dataclass(frozen=True)
class Counters:
    """What was executed: instructions by their names, and what emulator.h says of the rest."""

    executed: dict[str, int]
    traps: int
    rows: int
    split_loads: int
    undefined_reads: int
    faults: int

    @classmethod
    def of(cls, raw: _Counters) -> Counters:
        numbers = {name: getattr(raw, name) for name, _ in _Counters._fields_[1:]}
        return cls(dict(zip(KINDS, raw.executed, strict=True)), **numbers)


class Emulator:
    """The emulator in this process. Nothing is taken over before :meth:`installed`."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.amx_arch_prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
        self.library.amx_set.argtypes = (ctypes.c_int, ctypes.c_long)
        self.library.amx_last_fault.restype = ctypes.c_char_p
        self.library.amx_trace_start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self.library.amx_trace_stop.restype = ctypes.c_size_t

    @contextmanager
    def installed(self) -> Iterator[Emulator]:
        """AMX instructions work in this block, once permission for them is requested; it ends with the block."""
        assert self.library.amx_install() == 0
        try:
            yield self
        finally:
            self.library.amx_forget_permission()
            assert self.library.amx_uninstall() == 0

    def arch_prctl(self, code: int, argument: int) -> int:
        """The system call of that name as a machine with AMX answers it: 0, or an errno."""
        return self.library.amx_arch_prctl(code, argument)

    @contextmanager
    def denying(self, code: int = errno.ENOSPC) -> Iterator[None]:
        """Requests for permission fail in this block."""
        self.library.amx_set(DENY, code)
        try:
            yield
        finally:
            self.library.amx_set(DENY, 0)

    @property
    def permission_requests(self) -> int:
        return self.library.amx_permission_requests()

    @property
    def last_fault(self) -> str:
        return self.library.amx_last_fault().decode()

    def reset(self) -> None:
        """Set all counters to 0."""
        self.library.amx_reset()

    def total(self) -> Counters:
        """The counters of all threads together."""
        raw = _Counters()
        self.library.amx_total(ctypes.byref(raw))
        return Counters.of(raw)

    def threads(self) -> list[Counters]:
        """The counters of each thread that has executed anything since the last reset."""
        found, raw = [], _Counters()
        while self.library.amx_of_thread(len(found), ctypes.byref(raw)):
            found.append(Counters.of(raw))
        return [one for one in found if any(one.executed.values())]
