# SPDX-License-Identifier: Apache-2.0
"""SYCL source to SPIR-V, as a builder for the kernel cache: the compiler is a library that runs in a process apart."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

from awqjit import child, store
from awqjit.errors import ArgumentError, CompileError
from awqjit.toolchain import Compiler
from awqjit.xpu import shim, wheels

SCRIPT = Path(__file__).with_name("spirv_process.py")
_FILES = 3  # of the command, after the script: libsycl, libintelocl, shim


Flags = tuple[str, ...]


class _Builder:
    """Functions of :mod:`awqjit.toolchain`, for SYCL."""

    PRODUCT = store.SPIRV

    def neutral_command(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        return ("sycl", store.SOURCE, store.SPIRV, *flags)

    def relative_command(self, compiler: Compiler, flags: Flags, source: Path, output: Path) -> Flags:
        return (*compiler.argv, source.name, output.name, *wheels.find().options, *flags)

    def absolute_command(self, compiler: Compiler, flags: Flags, source: Path, output: Path) -> Flags:
        files = (os.path.abspath(source), os.path.abspath(output))
        return (*compiler.argv, *files, *wheels.find().options, *flags)

    def find_compiler(self) -> Compiler:
        found = wheels.find()
        files = (str(found.sycl), str(found.opencl), str(shim.path()))
        command = (sys.executable, "-I", "-S", str(SCRIPT), *files)
        return Compiler(command, "sycl", found.version, f"{wheels.SYCL} {found.version}")

    def likely_stamp(self) -> str | None:
        found = wheels.find()
        return _stamp(found.version, found.compiler)

    def file_stamp(self, argv: tuple[str, ...]) -> str | None:
        return self.likely_stamp()

    def compile_shared(
        self,
        compiler: Compiler,
        source: Path,
        flags: tuple[str, ...],
        output: Path,
        timeout: float,
        name: str | None = None,
    ) -> str:
        if output.parent != source.parent:
            raise ArgumentError("output", output, f"a file in {source.parent}, where the compiler runs")
        command = self.relative_command(compiler, flags, source, output)
        failure, log = child.run(command, source.parent, timeout)
        if failure is None and not (output.is_file() and output.stat().st_size > 0):
            failure = "error: the compiler reported success but wrote no module"
        if failure is not None:
            shown = self.absolute_command(compiler, flags, source, output)
            text = "\n".join(part for part in (log, failure) if part)
            raise CompileError(name or source.stem, shown, str(source), text)
        return log


BUILDER = _Builder()


def request(slug: str, source: str, options: tuple[str, ...]) -> store.Request:
    """A SYCL kernel as the cache knows it.

    Args:
        slug: the first part of its directory's name.
        source: SYCL source with one kernel.
        options: compiler options; those that every kernel needs come from the wheel's version.
    """
    return store.Request(slug, source, options, BUILDER)


@lru_cache(maxsize=4)
def _stamp(version: str, compiler: Path) -> str:
    status = os.stat(compiler)
    return f"{compiler}|{status.st_size}|{status.st_mtime_ns}|{version}"
