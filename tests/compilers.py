# SPDX-License-Identifier: Apache-2.0
"""Compilers that misbehave on purpose, as shell scripts, and a C++ kernel small enough to build by the dozen."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import tempfile
from pathlib import Path

REAL = shutil.which("g++") or shutil.which("clang++") or ""


def number_source(number: int) -> str:
    """C++ whose library answers with a number."""
    return f'extern "C" __attribute__((visibility("default"))) int number() {{ return {number}; }}\n'


def number_of(library: Path) -> int:
    """The number a library answers with. Loads a copy: the same path is only ever loaded once per process."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(library, folder)
        return int(ctypes.CDLL(copy).number())


def script(path: Path, body: str) -> Path:
    """An executable shell script; ``$REAL`` in it is the real compiler."""
    path.write_text(f"#!/bin/sh\nREAL={shlex.quote(REAL)}\n{body}\n")
    path.chmod(0o755)
    return path


def kernel_script(path: Path, body: str) -> Path:
    """A compiler that works, so passes the probe, but runs ``body`` first when it is given a kernel."""
    return script(path, f'case "$*" in *kernel.cpp*)\n{body}\n;; esac\nexec "$REAL" "$@"')


def counting(path: Path, seconds: float = 0) -> tuple[Path, Path]:
    """A compiler that writes its process id into a file, a line a kernel, and is slow; the compiler and the file."""
    runs = path.with_name("runs")
    runs.touch()
    return kernel_script(path, f"echo $$ >> {shlex.quote(str(runs))}; sleep {seconds}"), runs
