# SPDX-License-Identifier: Apache-2.0
"""What the tests of the way to SYCL kernels share: wheels that are there or invented, a stand-in for the compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from awqjit.xpu import shim, spirv, wheels

LACKING = wheels.lacking()
needs_wheels = pytest.mark.skipif(LACKING is not None, reason=f"NOT TESTED without SYCL: {LACKING}")

MAGIC = b"\x03\x02\x23\x07"

STAND_IN = """\
import os, sys, time
sycl, opencl, shim, source, output, *options = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*options, file=log)
text = open(source).read()
if "crash" in text:
    os.kill(os.getpid(), 11)
if "hang" in text:
    time.sleep(600)
if "silent" in text:
    sys.exit(0)
if "mistake" in text:
    print("kernel.cpp:1:9: error: " + text)
    sys.exit(1)
open(output, "wb").write({magic!r} + text.encode() + " ".join(options).encode())
"""


class StandIn:
    """A program in place of the compiler's process, and wheels that are not there: no SYCL is needed.

    Attributes:
        version: of the invented wheel.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log = folder / "compilations"
        script = folder / "stand_in.py"
        script.write_text(STAND_IN.format(log=str(self._log), magic=MAGIC))
        self._folder, self._monkeypatch = folder, monkeypatch
        monkeypatch.setattr(spirv, "SCRIPT", script)
        monkeypatch.setattr(shim, "path", lambda: folder / "shim.so")
        self.install("2026.2.0")

    def install(self, version: str) -> None:
        """Another version of the wheel."""
        folder = self._folder / version
        folder.mkdir(exist_ok=True)
        for name in ("libsycl.so.9", "libsycl-jit.so", "libintelocl.so"):
            (folder / name).write_text(version)
        found = wheels.Wheels(
            version, folder / "libsycl.so.9", folder / "libsycl-jit.so", folder, folder / "libintelocl.so"
        )
        self._monkeypatch.setattr(wheels, "find", lambda: found)

    @property
    def compilations(self) -> list[str]:
        """The options of every time the compiler was started."""
        return self._log.read_text().splitlines() if self._log.exists() else []


def in_a_process(code: str) -> list[str]:
    """A command that runs Python code."""
    return [sys.executable, "-c", code]
