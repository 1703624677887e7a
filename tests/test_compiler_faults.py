# SPDX-License-Identifier: Apache-2.0
"""No compiler, a bad one, or none that may be started: the next compiler or the next row, and one warning."""

from __future__ import annotations

import os
import pickle
import resource
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from compilers import REAL, kernel_script, number_of, script
from faults import (  # noqa: F401  (fixtures)
    SEVEN,
    STRANGER,
    answer_noting_warnings,
    can_forbid,
    folder_for_everyone,
    forbid,
    in_child,
    needs_root,
    own_home,
)

from awqjit import machine, store, toolchain
from awqjit.cache import Request, fetch
from awqjit.errors import CompileError, NoCompilerError
from awqjit.target import TARGETS

pytestmark = [
    pytest.mark.skipif(not REAL or sys.platform != "linux", reason="needs Linux and g++ or clang++"),
    pytest.mark.usefixtures("home"),
]

BEST = next(t.name for t in TARGETS if 16 in t.act_bits and not machine.detect().missing(t.features))
ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that comes first on PATH; what must not be found by accident is hidden by broken names in it."""
    (folder / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)  # no zig
    for name in ("g++", "clang++"):
        script(folder / "bin" / name, "exit 1")
    return folder / "bin"


BAD = {
    "fails": "exit 1",
    "hangs": "sleep 600",
    "prints garbage": "head -c 100000 /dev/urandom; head -c 9999 /dev/urandom > probe.so",
    "prints without end": "exec yes",
    "is killed": "kill -9 $$",
    "is too old for the standard": (
        '[ "$1" = --version ] && exec "$REAL" --version; echo "c++: error: unrecognized command line option" '
        "'-std=c++17' >&2; exit 1"
    ),
    "compiles for another machine": (
        '[ "$1" = --version ] && exec "$REAL" --version; printf "\\177ELF\\001\\002\\001" > probe.so; '
        "head -c 9999 /dev/zero >> probe.so"
    ),
    "is no program": None,
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_a_bad_compiler_is_passed_over_for_the_next(
    body: str | None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_VERSION_TIMEOUT", 2)
    if body is None:
        (path / "g++").write_bytes(b"\x7fELF not really")
    else:
        script(path / "g++", body)
    script(path / "clang++", 'exec "$REAL" "$@"')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fetch(SEVEN)
    assert number_of(found.path) == 7
    assert toolchain.find_compiler().argv == (str(path / "clang++"),)


def test_a_compiler_that_vanishes_between_probe_and_use_is_replaced_by_the_next(path: Path) -> None:
    script(path / "g++", 'exec "$REAL" "$@"')
    script(path / "clang++", 'exec "$REAL" "$@"')
    assert toolchain.find_compiler().argv == (str(path / "g++"),)
    (path / "g++").unlink()
    # The next g++ on PATH, or clang++: one that is there.
    found = fetch(SEVEN)
    assert number_of(found.path) == 7
    assert toolchain.find_compiler().argv != (str(path / "g++"),)


def test_a_compiler_that_vanishes_and_leaves_none_costs_one_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = script(path / "my-c++", 'exec "$REAL" "$@"')
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    toolchain.find_compiler()
    compiler.unlink()
    row, origin, (warning,) = in_child(answer_noting_warnings)
    assert (row, origin) == ("torch", "torch")
    assert "my-c++" in warning and "plain torch" in warning


@pytest.mark.parametrize(
    "body",
    [
        "head -c 9999 /dev/urandom > kernel.so; exit 0",
        "exit 0",
        "head -c 9999 /dev/urandom; exit 1",
    ],
)
def test_a_compiler_that_gives_no_kernel_gives_the_next_row_and_is_not_remembered(
    body: str, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one compiler for all, the last row; and the next process, with a good compiler, builds as if new."""
    compiler = kernel_script(folder / "c++", body)
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    row, _, (warning,) = in_child(answer_noting_warnings)
    assert row == "torch" and "plain torch" in warning
    assert list(store.entries(home / ".cache" / "awqjit")) == []
    script(compiler, 'exec "$REAL" "$@"')
    assert in_child(answer_noting_warnings) == (BEST, "built", [])
    assert in_child(answer_noting_warnings) == (BEST, "cache", [])


@pytest.mark.skipif(BEST == "portable", reason="this CPU runs the portable row alone")
@pytest.mark.parametrize("how", ["echo \"c++: error: unrecognized option '-mavx2'\" >&2; exit 1", "sleep 600"])
def test_a_compiler_that_cannot_do_a_rows_flags_gives_the_next_row(
    how: str, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_CXX", str(kernel_script(folder / "c++", f'case "$*" in *-mavx*) {how};; esac')))
    if "sleep" in how:
        monkeypatch.setenv("AWQJIT_COMPILE_TIMEOUT", "10")
    row, origin, (warning,) = in_child(answer_noting_warnings)
    assert (row, origin) == ("portable", "built")
    assert "portable is used" in warning and ("unrecognized option" in warning or "stopped after 10 s" in warning)


# Systems that forbid starting programs.


def answer_under(*names: str) -> tuple[str, str, list[str]]:
    torch.set_num_threads(1)  # torch's own pool ends a process that may not start threads
    forbid(*names)
    return answer_noting_warnings()


@pytest.mark.skipif(not can_forbid, reason="needs seccomp")
@pytest.mark.parametrize(
    "names", [("execve", "execveat"), ("fork", "vfork", "clone", "clone3"), ("fork", "vfork", "clone3", "execve")]
)
def test_where_the_kernel_forbids_starting_programs_there_is_one_warning_and_the_right_answer(
    names: tuple[str, ...], home: Path
) -> None:
    row, origin, (warning,) = in_child(lambda: answer_under(*names))
    assert (row, origin) == ("torch", "torch")
    assert "Operation not permitted" in warning and "plain torch" in warning
    assert in_child(answer_noting_warnings) == (BEST, "built", [])  # what was forbidden to one is not kept for all
    assert in_child(lambda: answer_under(*names)) == (BEST, "cache", [])  # and a cache needs no program


@needs_root
def test_where_no_more_processes_are_allowed_there_is_one_warning_and_the_right_answer(home: Path) -> None:
    def answer() -> tuple[str, str, list[str]]:
        torch.set_num_threads(1)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        return answer_noting_warnings()

    row, origin, (warning,) = in_child(answer, STRANGER)
    assert (row, origin) == ("torch", "torch")
    assert "temporarily unavailable" in warning


def test_a_path_without_any_compiler_costs_one_warning(path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    row, origin, (warning,) = in_child(answer_noting_warnings)
    assert (row, origin) == ("torch", "torch") and "g++" in warning and "clang++" in warning
    with pytest.raises(NoCompilerError):
        fetch(SEVEN)


# Errors, and what is kept of them.

FETCH = """
import pickle, sys
from awqjit.cache import Request, fetch
from awqjit.errors import CompileError
source = "\\n".join(["int good;", "int bad = ;", "int worse = ;", ""])
try:
    fetch(Request("broken", source, ("-DX=1",)))
except CompileError as error:
    sys.stdout.buffer.write(pickle.dumps(error))
"""


def test_a_compile_error_crosses_processes_with_its_first_error_source_and_command(folder: Path, home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FETCH],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
        check=True,
    )
    error = pickle.loads(done.stdout)
    assert isinstance(error, CompileError)
    assert "kernel.cpp:2" in error.first_error and error.first_error in str(error)
    lines = dict(line.split(": ", 1) for line in str(error).splitlines()[1:])
    source = Path(lines["source"].strip())
    assert source.read_text().splitlines()[1] == "int bad = ;"
    command = lines["command"].strip()
    assert str(source) in shlex.split(command) and "-DX=1" in shlex.split(command)
    source.write_text(SEVEN.source)
    subprocess.run(command, shell=True, cwd="/", check=True, timeout=60)  # the very command, once mended
    assert number_of(source.with_name("kernel.so")) == 7


def test_a_failure_is_not_remembered_by_other_processes(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = kernel_script(folder / "c++", 'echo "kernel.cpp:1: error: bad day" >&2; exit 1')
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    request = Request("number", SEVEN.source, ())

    def fails() -> str:
        with pytest.raises(CompileError) as caught:
            fetch(request)
        return str(caught.value)

    assert "bad day" in in_child(fails) and "bad day" in in_child(fails)
    script(compiler, 'exec "$REAL" "$@"')
    assert in_child(lambda: fetch(request).origin) == "built"
    assert in_child(lambda: fetch(request).origin) == "cache"
