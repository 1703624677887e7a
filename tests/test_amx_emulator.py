# SPDX-License-Identifier: Apache-2.0
"""The emulator that AMX kernels are tested under, tested itself: by real machine code, and by bugs put into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from amx_emulator.emulator import FOLDER, SOURCES, build, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

TESTS = (
    *("products", "subnormals", "threads", "addressing", "frame", "configuration"),
    *("faults", "permission", "counters", "registers"),
)
"""The tests of selftest.cpp."""


@dataclass(frozen=True)
class Mutant:
    """A bug: in ``file``, ``old`` becomes ``new``."""

    file: str
    old: str
    new: str


MUTANTS = {
    "one operand twice": Mutant("decoder.c", "out->second = third;", "out->second = rm;"),
    "signs swapped": Mutant("decoder.c", "AMX_TDPBUSD, AMX_TDPBSUD,", "AMX_TDPBSUD, AMX_TDPBUSD,"),
    "index not scaled": Mutant("execute.c", "<< one->shift : 0", ": 0"),
    "index register's high bit": Mutant("decoder.c", "| x << 3;", ";"),
    "base register's high bit": Mutant("decoder.c", "out->base = (sib & 7) | b << 3;", "out->base = (sib & 7);"),
    "displacement unsigned": Mutant("decoder.c", "(int8_t)*p", "*p"),
    "relative to the wrong end": Mutant("execute.c", "at + (uint64_t)one->length", "at"),
    "segment forgotten": Mutant("execute.c", "address += segment_base(one->segment);", ""),
    "address not cut": Mutant("execute.c", "if (one->address32) address = (uint32_t)address;", ""),
    "rows behind a load kept": Mutant("execute.c", "clear(thread);\n  thread->palette = 1;", "thread->palette = 1;"),
    "wide rows": Mutant("execute.c", "const size_t width = thread->row_bytes[t];", "const size_t width = 64;"),
    "correction forgotten": Mutant("arithmetic.c", "if (kind == AMX_TDPBSSD)\n    for", "if (0)\n    for"),
    "subnormals kept": Mutant("arithmetic.c", "0x1f80 | _MM_FLUSH_ZERO_ON | 0x0040", "0x1f80"),
    "one chain": Mutant("arithmetic.c", ", even);", ", odd);"),
    "tiles shared by threads": Mutant("execute.c", "static __thread struct", "static struct"),
    "depth not checked": Mutant("execute.c", "if (thread->row_bytes[a] / 4 != depth)", "if (0)"),
    "half a shape accepted": Mutant("execute.c", "if (!widths[t] != !rows[t])", "if (0)"),
    "ninth tile accepted": Mutant("execute.c", "if (t >= 8 &&", "if (t >= 16 &&"),
    "equal tiles accepted": Mutant("execute.c", "if (c == a || c == b || a == b)", "if (0)"),
    "permission not asked for": Mutant("execute.c", "if (amx_options[AMX_OPTION_STRICT] && !permitted)", "if (0)"),
    "restart from the first row": Mutant("execute.c", "thread->start_row = (uint8_t)thread->touched_row;", ";"),
    "splits not seen": Mutant("execute.c", "& 63) + width > 64", "& 63) + width > 128"),
    "a configuration leaves tiles defined": Mutant("execute.c", "  thread->written = 0;\n", ""),
    "flags": Mutant("traps.c", "if (stepping) note(context, address);", "context->uc_mcontext.gregs[REG_EFL] = 0;"),
}  # fmt: skip


def compile_selftest(folder: Path) -> list[Path]:
    """The test program's own two parts."""
    objects = []
    for name in ("selftest", "selftest_arithmetic"):
        objects.append(folder / f"{name}.o")
        command = ["g++", "-std=c++17", "-O1", "-mavx512f", "-mavx512bw", "-Wall", "-Wextra", "-Werror", "-c"]
        subprocess.run([*command, f"{FOLDER / name}.cpp", "-o", str(objects[-1])], check=True)
    return objects


def compile_part(folder: Path, source: Path) -> Path:
    out = folder / f"{source.stem}.o"
    subprocess.run(["gcc", "-O2", "-I", str(FOLDER), "-c", str(source), "-o", str(out)], check=True)
    return out


def link(folder: Path, objects: list[Path]) -> Path:
    subprocess.run(["g++", "-pthread", "-o", str(folder / "selftest"), *map(str, objects)], check=True)
    return folder / "selftest"


def run(program: Path, test: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), test], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Source file -> its object file; the test program's under its own names."""
    folder = tmp_path_factory.mktemp("amx-emulator")
    found = {path.stem + ".cpp": path for path in compile_selftest(folder)}
    return found | {name: compile_part(folder, FOLDER / name) for name in SOURCES}


@pytest.fixture(scope="session")
def selftest(parts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link(tmp_path_factory.mktemp("amx-selftest"), list(parts.values()))


@pytest.mark.parametrize("name", TESTS)
def test_the_emulator_does_what_the_manual_says(name: str, selftest: Path) -> None:
    result = run(selftest, name)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_in_the_emulator_is_found(name: str, parts: dict[str, Path], tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    text = (FOLDER / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    (tmp_path / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    shutil.copy(FOLDER / "parts.h", tmp_path)
    program = link(tmp_path, list((parts | {mutant.file: compile_part(tmp_path, tmp_path / mutant.file)}).values()))
    assert any(run(program, test).returncode for test in TESTS)


def test_a_million_tile_instructions_take_few_seconds(selftest: Path) -> None:
    assert float(run(selftest, "speed").stdout) > 2e5, "a second; 1e6 to 2e6 on an idle machine"


def test_preloaded_it_answers_the_system_call(tmp_path: Path) -> None:
    library = build(tmp_path / "libamx.so", "preload.c")
    code = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall(158, 0x1023, 18))"
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "0\n", found.stderr
