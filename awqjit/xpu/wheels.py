# SPDX-License-Identifier: Apache-2.0
"""Where Intel's SYCL run time is: what the wheels intel-sycl-rt and intel-opencl-rt have installed."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from awqjit.errors import MissingDependencyError, SyclError

SYCL, OPENCL = "intel-sycl-rt", "intel-opencl-rt"
OLDEST = (2025, 3)
"""The first release whose compiler library and SYCL headers do what is needed."""

INSTALL = "pip install awqjit[xpu]"
FEATURE = "computing on an Intel GPU (device xpu)"


@dataclass(frozen=True)
class Wheels:
    """Installed files of the two wheels.

    Attributes:
        version: of intel-sycl-rt, for example "2026.2.0".
        sycl: libsycl.so.N, the run time; torch's XPU builds use the same file.
        compiler: libsycl-jit.so, DPC++'s front end and SPIR-V back end.
        include: the folder of sycl/sycl.hpp.
        opencl: libintelocl.so, the SYCL device that a CPU is. Compiling needs some device, and this one is everywhere.
    """

    version: str
    sycl: Path
    compiler: Path
    include: Path
    opencl: Path

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options that this release needs whatever the kernel."""
        # Until 2025 the library links helper functions into every kernel, and fails to find them in the wheel.
        return ("-fno-sycl-device-lib=all",) if self.version.startswith("2025.") else ()


@lru_cache(maxsize=1)
def find() -> Wheels:
    """The installed wheels. The answer is kept, a failure is not.

    Raises:
        MissingDependencyError: one of them is not installed; names the extra that brings both.
        SyclError: intel-sycl-rt is older than :data:`OLDEST`, or lacks a file.
    """
    found = {name: _distribution(name) for name in (SYCL, OPENCL)}
    missing = [name for name, distribution in found.items() if distribution is None]
    if missing:
        raise MissingDependencyError(" and ".join(missing), FEATURE, INSTALL)
    sycl, opencl = found[SYCL], found[OPENCL]
    assert sycl is not None and opencl is not None
    numbers = tuple(int(part) for part in re.findall(r"\d+", sycl.version)[:2])
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise SyclError(f"{SYCL} {sycl.version} cannot be used", f"{wanted} or later is needed: {INSTALL}")
    return Wheels(
        version=sycl.version,
        sycl=_file(sycl, r"libsycl\.so\.\d+"),
        compiler=_file(sycl, r"libsycl-jit\.so"),
        include=_file(sycl, r"sycl/sycl\.hpp").parent.parent,
        opencl=_file(opencl, r"libintelocl\.so"),
    )


def lacking() -> str | None:
    """Why there is no SYCL run time to compile with, in one sentence; None if there is one."""
    try:
        find()
    except (MissingDependencyError, SyclError) as error:
        return str(error)
    return None


def forget() -> None:
    """Look again, for example after an installation."""
    find.cache_clear()


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _file(distribution: importlib.metadata.Distribution, pattern: str) -> Path:
    """The one file of a wheel whose path ends with ``pattern``, a whole name; links are followed."""
    # The list of files as text: a SYCL wheel has thousands, and making an object of each takes half a second.
    found = re.search(rf"^((?:.*/)?{pattern}),", distribution.read_text("RECORD") or "", re.MULTILINE)
    if found is not None:
        path = Path(str(distribution.locate_file(found[1]))).resolve()
        if path.is_file():
            return path  # a library finds the others beside its own file
    reason = f"has no file that ends with {pattern}: install it again ({INSTALL})"
    raise SyclError(f"{distribution.metadata['Name']} {distribution.version}", reason)
