# SPDX-License-Identifier: Apache-2.0
"""Compilers that misbehave on purpose, as shell scripts, and a C++ kernel small enough to build by the dozen."""

from __future__ import annotations

import ctypes
import importlib.util
import shlex
import shutil
import sys
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


def by_kind(folder: Path) -> dict[str, str]:
    """Kind -> a compiler that is here, as ``AWQJIT_CXX`` takes it: gcc, clang (clang++, else the package ziglang)."""
    found = {kind: path for kind, name in (("gcc", "g++"), ("clang", "clang++")) if (path := shutil.which(name))}
    if "clang" not in found and importlib.util.find_spec("ziglang") is not None:
        # A script, as the flag for the CPU, which zig needs, is not accepted from a user.
        command = shlex.join([sys.executable, "-m", "ziglang", "c++", "-nostdlib++", "-mcpu=baseline"])
        found["clang"] = str(script(folder / "zig-c++", f'exec {command} "$@"'))
    return found


def kernel_script(path: Path, body: str) -> Path:
    """A compiler that works, so passes the probe, but runs ``body`` first when it is given a kernel."""
    return script(path, f'case "$*" in *kernel.cpp*)\n{body}\n;; esac\nexec "$REAL" "$@"')


def counting(path: Path, seconds: float = 0) -> tuple[Path, Path]:
    """A compiler that writes its process id into a file, a line a kernel, and is slow; the compiler and the file."""
    runs = path.with_name("runs")
    runs.touch()
    return kernel_script(path, f"echo $$ >> {shlex.quote(str(runs))}; sleep {seconds}"), runs
