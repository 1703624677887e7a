# SPDX-License-Identifier: Apache-2.0
"""Ends and limits: an interpreter that ends while a kernel compiles, a fork at that moment, how many compilers run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import compilers
import pytest

from awqjit import config, jit
from awqjit.spec import Problem

needs_compiler = pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
PATIENCE = 100.0

COMMON = """
import atexit, os, sys, threading, time
from awqjit import jit
from awqjit.spec import Problem

def problem(n=16):
    return Problem(64, n, 32, "fp32", "fp32", symmetric=False, bias=False, act_bits=16)

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

started = sys.argv[1]
"""


def problem(n: int = 16) -> Problem:
    return Problem(64, n, 32, "fp32", "fp32", symmetric=False, bias=False, act_bits=16)


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # A zombie waits for whoever adopted it.
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


class Endless:
    """A compiler that never finishes a kernel: it says that it has started, and its process id."""

    def __init__(self, folder: Path) -> None:
        self.started = folder / "started"
        body = f'echo $$ > "{folder}/pid"; mv "{folder}/pid" "{self.started}"; while :; do sleep 0.05; done'
        self.path = compilers.kernel_script(folder / "g++", body)

    @property
    def pid(self) -> int:
        return int(self.started.read_text())


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "cold"))
    return tmp_path / "cold"


@pytest.fixture
def endless(tmp_path: Path, cold: Path, monkeypatch: pytest.MonkeyPatch) -> Endless:
    compiler = Endless(tmp_path)
    monkeypatch.setenv("AWQJIT_CXX", str(compiler.path))
    return compiler


def ends(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMON + script, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE
    )


# ---- the end of the interpreter ---------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "import threading; threading.Thread(target=int).start()"])
def test_the_interpreter_ends_while_a_daemon_thread_compiles_and_leaves_no_compiler(
    endless: Endless, cold: Path, end: str
) -> None:
    done = ends(
        f"threading.Thread(target=jit.choose, args=(problem(),), daemon=True).start()\nwait_for(started)\n{end}\n",
        endless.started,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    until(lambda: not alive(endless.pid), "the compiler outlived the interpreter")
    assert not list(cold.glob("failed-*"))  # nothing failed
    assert not list(cold.glob("w4a16-*"))


@needs_compiler
def test_a_process_that_ends_at_once_blocks_nobody(
    endless: Endless, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os._exit runs nothing of ours: the compiler goes on alone, and holds nothing that the next process needs."""
    done = ends(
        "threading.Thread(target=jit.choose, args=(problem(),), daemon=True).start()\nwait_for(started)\nos._exit(7)\n",
        endless.started,
    )
    assert done.returncode == 7, done.stderr
    try:
        monkeypatch.setenv("AWQJIT_CXX", compilers.REAL)
        with config.override(kernel="portable"):
            before = time.monotonic()
            assert jit.choose(problem()).origin == "built"
            assert time.monotonic() - before < config.COMPILE_TIMEOUT.read() / 2  # did not wait for a lock
    finally:
        os.kill(endless.pid, signal.SIGKILL)


@needs_compiler
def test_a_kernel_first_wanted_at_exit_is_still_built(cold: Path) -> None:
    done = ends(
        "atexit.register(lambda: print(jit.choose(problem(32)).origin))\n"  # runs after what compiling registers
        "print(jit.choose(problem()).origin)\n",
        "",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["built", "built"]


@needs_compiler
def test_a_fork_whose_child_ends_by_the_book_does_not_stop_its_parents_compiler(
    tmp_path: Path, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, started = tmp_path / "gate", tmp_path / "started"
    body = f'touch "{started}"; while [ ! -e "{gate}" ]; do sleep 0.02; done'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    done = ends(
        """
thread = threading.Thread(target=lambda: print(jit.choose(problem()).origin, flush=True))
thread.start()
wait_for(started)
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
open(sys.argv[2], "w").close()
thread.join()
""",
        started,
        gate,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["built"]), done.stderr


@needs_compiler
def test_a_child_forked_during_a_compile_waits_for_its_parents_kernel_and_uses_it(
    tmp_path: Path, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One spec, one cache: the locks of threads are new in the child, the lock between processes is not."""
    gate, started = tmp_path / "gate", tmp_path / "started"
    body = f'echo + >> "{started}"; while [ ! -e "{gate}" ]; do sleep 0.02; done'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    monkeypatch.setenv("AWQJIT_JOBS", "1")  # the parent's slot is taken: the child must not wait for that one
    done = ends(
        """
thread = threading.Thread(target=lambda: print("parent", jit.choose(problem()).origin, flush=True))
thread.start()
wait_for(started)
pid = os.fork()
if pid == 0:
    print("child", jit.choose(problem()).origin, flush=True)
    os._exit(0)
time.sleep(1)
open(sys.argv[2], "w").close()
thread.join()
assert os.waitpid(pid, 0)[1] == 0
""",
        started,
        gate,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["child cache", "parent built"]
    assert started.read_text().split() == ["+"]
