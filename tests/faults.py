# SPDX-License-Identifier: Apache-2.0
"""Real processes, users, mounts and forbidden system calls for the tests of what goes wrong outside this package."""

from __future__ import annotations

import ctypes
import os
import pickle
import platform
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compilers import number_of, number_source
from rows import mm
from strategies import RawWeight, Shape

from awqjit import config, jit, machine, ops, places, toolchain
from awqjit.cache import Request, fetch
from awqjit.errors import AwqJitWarning
from awqjit.layout import pack
from awqjit.spec import Problem

SEVEN = Request("number", number_source(7), ())
HANGS = 180  # seconds without an answer after which a child is killed and its test fails
STRANGER = 54321  # a user id without a name or a home
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount, or become another user")

K, N, GROUP = 64, 16, 32
PROBLEM = Problem(K, N, GROUP, "fp32", "fp32", symmetric=False, bias=False, act_bits=16)


def _weight() -> RawWeight:
    rng = np.random.default_rng(9)
    shape = Shape(K, N, GROUP)
    return RawWeight(
        shape,
        q=torch.from_numpy(rng.integers(0, 16, (K, N), dtype=np.uint8)),
        z=torch.from_numpy(rng.integers(0, 16, (shape.groups, N), dtype=np.uint8)),
        s=torch.from_numpy(rng.uniform(0.002, 0.03, (shape.groups, N)).astype(np.float32)),
        name="seed 9",
    )


def is_answered_right() -> bool:
    """Whether the operator gives the right answer with whatever kernel this process chooses for :data:`PROBLEM`."""
    weight = _weight()
    x = torch.from_numpy(np.random.default_rng(10).standard_normal((4, K)).astype(np.float32))
    y = mm(x, pack(weight.quantized()), None, 16)
    oracle.expected(x, weight.q, weight.z, weight.s, GROUP, act_bits=16).check(y)
    return True


def answer_noting_warnings() -> tuple[str, str, list[str]]:
    """Answer twice, rightly: the row that did it, where its kernel came from, and our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert is_answered_right() and is_answered_right()
    choice = jit.choose(PROBLEM)
    return choice.kernel.name, choice.origin, ours(caught)


def fetch_noting_warnings() -> tuple[list[str], list[str], int, Path]:
    """Fetch the same small kernel twice and load it: origins, our warnings, number, directory of the cache.

    For a forked child: a process loads a path only once.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [fetch(SEVEN), fetch(SEVEN)]
    number = int(ctypes.CDLL(str(found[0].path)).number())
    return [one.origin for one in found], ours(caught), number, found[0].directory.parent


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, AwqJitWarning)]


@pytest.fixture(name="folder")
def folder_for_everyone() -> Iterator[Path]:
    """A directory that every user can enter, as pytest's own cannot."""
    with tempfile.TemporaryDirectory(prefix="awqjit-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(os.path.realpath(name))


@pytest.fixture(name="place")
def place_of_everyone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The writable cache, in a directory that every user can enter."""
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(folder / "cache"))
    return folder / "cache"


@pytest.fixture(name="home")
def own_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home and temporary directory, no variables, nothing known and nothing warned of yet."""
    for name in (*(variable.name for variable in config.VARIABLES), "CXX", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    (folder / "tmp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setattr(places, "_private", places._Private())
    monkeypatch.setattr(places, "_warned", set())
    monkeypatch.setattr(machine, "_no_numba", lambda: "hidden by the test")  # plain torch is what is left
    toolchain.forget()
    ops.forget()
    yield folder / "home"
    toolchain.forget()
    ops.forget()


def fork(function: Callable[[], Any], uid: int | None = None) -> tuple[int, int]:
    """Run a function in a forked child, as another user if one is given: process id, and where its answer comes."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: the child only runs our code
        child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.close(reading)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        torch.set_num_threads(1)  # torch's own operators, the oracle's, wait in a child for threads that are gone
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(function(), pipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def answer_of(child: tuple[int, int]) -> Any:
    """What a forked child's function returned."""
    process, reading = child
    if not select.select([reading], [], [], HANGS)[0]:
        kill(child)
        raise AssertionError(f"the child has not answered for {HANGS} s")
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    assert os.waitpid(process, 0)[1] == 0, "the child failed; its traceback is in the captured stderr"
    return pickle.loads(answer)


def in_child(function: Callable[[], Any], uid: int | None = None) -> Any:
    return answer_of(fork(function, uid))


def kill(child: tuple[int, int]) -> None:
    """kill -9, as the kernel does when memory runs out."""
    process, reading = child
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(reading)


def wait_for(path: Path, seconds: float = 90) -> None:
    """Until a file exists and is not empty."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@contextmanager
def mounted(path: Path, *arguments: str) -> Iterator[Path]:
    """A mount at a new directory, for a block: ``mounted(path, "-t", "tmpfs", "-o", "noexec", "none")``."""
    path.mkdir(exist_ok=True)
    umount = shutil.which("umount")  # now: tests change PATH
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run([str(umount), "-l", str(path)], check=True)


_CALLS = {
    "x86_64": {"clone": 56, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "clone3": 435},
    "aarch64": {"clone": 220, "execve": 221, "execveat": 281, "clone3": 435},
}


def forbid(*names: str) -> None:
    """Let the kernel refuse system calls with EPERM from now on, in this process and what it starts (seccomp)."""
    numbers = [_CALLS[platform.machine()][name] for name in names if name in _CALLS[platform.machine()]]
    program = [(0x20, 0, 0, 0)]  # load the number of the system call
    program += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]  # equal: jump to the refusal
    program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 1)]  # allow; refuse with errno 1
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.addressof(header), 0, 0)):  # no new privileges; the filter
        if libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments)):
            raise OSError(ctypes.get_errno(), "prctl")


can_forbid = platform.system() == "Linux" and platform.machine() in _CALLS


def number() -> tuple[int, str]:
    """What the kernel of :data:`SEVEN` answers, and where it came from."""
    found = fetch(SEVEN)
    return number_of(found.path), found.origin
