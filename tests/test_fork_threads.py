# SPDX-License-Identifier: Apache-2.0
"""Forked children, worker processes and thread pools: the operator answers in all of them, with the same bits."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import compilers
import numpy as np
import pytest
import torch
from strategies import RawWeight, Shape
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from awqjit import config, launch, ops
from awqjit.modules import Int4Linear

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++"),
]
# Large enough that a call runs on several threads: rows * K * N is well over the 2^17 that one thread does alone.
SHAPE = Shape(256, 512, 64)
_rng = np.random.default_rng(41)
RAW = RawWeight(
    SHAPE,
    q=torch.from_numpy(_rng.integers(0, 16, (SHAPE.k, SHAPE.n), dtype=np.uint8)),
    z=torch.from_numpy(_rng.integers(0, 16, (SHAPE.groups, SHAPE.n), dtype=np.uint8)),
    s=torch.from_numpy(_rng.uniform(0.002, 0.03, (SHAPE.groups, SHAPE.n)).astype(np.float32)),
    name="seed 41",
)
X = torch.from_numpy(np.random.default_rng(42).standard_normal((40, SHAPE.k)).astype(np.float32))


def layer(compute: str = "w4a8") -> Int4Linear:
    return Int4Linear.from_quantized(RAW.quantized(), compute=compute)


def in_child(work: Callable[[], bool], seconds: float = 60) -> None:
    """Run ``work`` in a forked child; fail unless it returns True in time."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, "2: another answer, 3: an exception, negative: a signal"
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail(f"the forked child did not answer in {seconds} s")


@pytest.mark.parametrize("compute", ["w4a8", "w4a16"])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_child_forked_after_use_answers_with_the_same_bits(compute: str, rows: int) -> None:
    linear = layer(compute)
    x = X[:rows]
    wanted = linear(x)
    in_child(lambda: torch.equal(linear(x), wanted))
    assert torch.equal(linear(x), wanted)  # and the parent still has its threads


@pytest.mark.parametrize("row", ["portable", "torch"])
def test_a_forked_child_copies_a_large_strided_x_too(row: str) -> None:
    """torch's own copy of so many elements takes its thread pool, and in a forked child waits for it for ever."""
    linear = layer()
    x = torch.stack([torch.cat([X] * 10)] * 2, dim=-1)[..., 0]
    assert x.numel() > 1 << 16
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with config.override(kernel=row):
            ops.forget()
            wanted = linear(x)
            torch.ones(1 << 20).add_(1)  # whatever was used before: the pool exists now
            # Compared by NumPy: torch's own comparison of so many numbers would hang.
            in_child(lambda: np.array_equal(linear(x).numpy(), wanted.numpy()) and torch.get_num_threads() == 2, 20)
    finally:
        torch.set_num_threads(before)


def test_a_child_can_fork_again() -> None:
    linear = layer()
    wanted = linear(X)

    def work() -> bool:
        in_child(lambda: torch.equal(linear(X), wanted))
        return torch.equal(linear(X), wanted)

    in_child(work)


def test_a_child_forked_before_use_finds_its_kernel() -> None:
    linear = layer()
    wanted = linear(X)
    ops.forget()
    in_child(lambda: torch.equal(linear(X), wanted))


def test_a_child_forked_while_a_thread_compiles_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "cold"))
    gate, started = tmp_path / "gate", tmp_path / "started"
    body = f'touch "{started}"; while [ ! -e "{gate}" ]; do sleep 0.02; done'
    slow = compilers.kernel_script(tmp_path / "g++", body)
    linear = layer()
    with config.override(kernel="torch"):
        wanted = linear(X[:4])
    ops.forget()
    with config.override(cxx=str(slow)):
        thread = threading.Thread(target=linear, args=(X[:4],))
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while not started.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert started.exists()

            def work() -> bool:
                # The locks of the compiling thread are held for ever here; the kernel is built anew, by the real one.
                os.environ["AWQJIT_CXX"] = compilers.REAL
                os.environ["AWQJIT_CACHE_DIR"] = str(tmp_path / "child")
                return torch.allclose(linear(X[:4]), wanted, rtol=1e-4, atol=1e-4)

            in_child(work)
        finally:
            gate.touch()
            thread.join(60)
    assert not thread.is_alive()


class Answers(Dataset[Tensor]):
    def __init__(self, linear: Int4Linear) -> None:
        self.linear = linear

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            return self.linear(X[10 * index : 10 * index + 10])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_answer_with_the_same_bits(context: str) -> None:
    linear = layer()
    wanted = linear(X)
    loader = DataLoader(Answers(linear), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=100)
    assert torch.equal(torch.cat(list(loader)), wanted)


# ---- threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["w4a8", "w4a16"])
def test_the_number_of_threads_is_followed_and_changes_no_bit(compute: str) -> None:
    linear = layer(compute)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 7, 1, 16):
            torch.set_num_threads(count)
            results += [linear(X), linear(X[:3])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[i % 2]) for i, result in enumerate(results))


def test_many_threads_call_one_layer_at_once() -> None:
    linear = layer()
    wanted = [linear(X[:rows]) for rows in range(1, 9)]
    wrong: list[int] = []

    def work(rows: int) -> None:
        for _ in range(50):
            if not torch.equal(linear(X[:rows]), wanted[rows - 1]):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_call_inside_another_parallel_region_of_torch_answers() -> None:
    linear = layer()
    wanted = linear(X)
    ranges: list[tuple[int, int]] = []
    wrong: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    def body(begin: int, end: int, _: int | None) -> None:
        ranges.append((begin, end))
        for i in range(begin, end):
            if not torch.equal(linear(X), wanted):
                wrong.append(i)

    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, type(body), ctypes.c_void_p)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert kind(launch._torch_parallel_for())(0, 8, 1, body, None) == 0
    finally:
        torch.set_num_threads(before)
    assert sorted(i for begin, end in ranges for i in range(begin, end)) == list(range(8))
    assert wrong == []


# In a process of its own, so that nothing else has loaded a library.
SCRIPT = """
import sys
import torch
sys.path.insert(0, {tests!r})
from test_fork_threads import X, layer

def runtimes():
    lines = open("/proc/self/maps").read().splitlines()
    files = {{line.split()[-1] for line in lines if "/" in line}}
    return sorted(f for f in files if any(n in f for n in ("libgomp", "libiomp", "libomp")))

def threads():
    return len(__import__("os").listdir("/proc/self/task"))

torch.set_num_threads(4)
torch.ones(1 << 22).add_(1).sum()
before, pool = runtimes(), threads()
layer()(X)
after = runtimes()
assert before == after, (before, after)
print(len(after), threads() - pool)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_a_kernel_brings_no_openmp_runtime_and_no_threads_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(tests=str(Path(__file__).parent))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    runtimes, new_threads = map(int, done.stdout.split())
    assert runtimes == 1
    assert new_threads == 0
