# SPDX-License-Identifier: Apache-2.0
"""The row that numba compiles: the definition's bits for any shape, torch's threads alone, and what happens without."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expected, w4a8_bits
from rows import forced, mm, packed, poisoned_memory, threads
from strategies import SEEDS, RawWeight, Shape, activations, biases, weights

from awqjit import config, jit, machine, ops, select
from awqjit.backends import numba as backend
from awqjit.backends import numba_bodies
from awqjit.errors import ArgumentError, AwqJitWarning, KernelRefusedError, NumbaError
from awqjit.spec import MAX_W4A8_GROUP, Problem

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
TESTS = Path(__file__).parent
PROBLEM = Problem(64, 16, 32, "bf16", "fp16", symmetric=True, bias=False, act_bits=8)


@pytest.fixture(autouse=True)
def only_numba() -> Iterator[None]:
    with forced("numba"), poisoned_memory():
        yield


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit but those of a NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@st.composite
def free_shapes(draw: st.DrawFn) -> Shape:
    """Any shape: nothing is compiled for one."""
    k = draw(st.integers(1, 300))
    return Shape(k, draw(st.integers(1, 70)), draw(st.integers(1, k)))


def random_weight(shape: Shape, seed: int = 0, scale: float = 0.01, dtype: torch.dtype = torch.float16) -> RawWeight:
    torch.manual_seed(seed)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    z = torch.randint(0, 16, (shape.groups, shape.n), dtype=torch.uint8)
    return RawWeight(shape, q, z, (torch.randn(shape.groups, shape.n) * scale).to(dtype), f"seed {seed}")


def bits_of(weight: RawWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return w4a8_bits(x, weight.q, weight.z, weight.s, weight.shape.group, bias=bias)


# ---- right ------------------------------------------------------------------------------------------------------


@needs_numba
@settings(max_examples=120)
@given(data=st.data(), shape=free_shapes(), count=st.integers(1, 3))
def test_w4a8_gives_the_bits_of_the_definition_for_any_shape(data: st.DataObject, shape: Shape, count: int) -> None:
    weight, x = data.draw(weights(shape)), data.draw(activations(shape.k))
    bias = data.draw(biases(shape.n))
    with threads(count):
        y = mm(x, packed(weight), bias, 8)
    wanted = bits_of(weight, x, bias)
    assert y.is_contiguous() and same(y.reshape(wanted.shape), wanted)


@needs_numba
@settings(max_examples=80)
@given(data=st.data(), shape=free_shapes())
def test_w4a16_matches_the_oracle_for_any_shape(data: st.DataObject, shape: Shape) -> None:
    weight, x = data.draw(weights(shape)), data.draw(activations(shape.k))
    bias = data.draw(biases(shape.n))
    y = mm(x, packed(weight), bias, 16)
    assert y.is_contiguous() and y.dtype == x.dtype and y.shape == (*x.shape[:-1], shape.n)
    expected(x, weight.q, weight.z, weight.s, shape.group, bias=bias).check(y)


@needs_numba
def test_every_number_of_rows_and_threads_gives_each_row_what_it_is_alone() -> None:
    weight = random_weight(Shape(264, 72, 128))
    x = torch.randn(300, 264, dtype=torch.bfloat16)
    wanted, stored = bits_of(weight, x), packed(weight)
    for m in (*range(1, 34), 63, 64, 65, 257, 300):
        for count in (1, 2, 5):
            with threads(count):
                assert same(mm(x[:m], stored, None, 8), wanted[:m])


@needs_numba
@pytest.mark.parametrize("act_bits", [8, 16])
def test_groups_too_long_for_exact_fp32_sums_are_summed_in_pieces(act_bits: int) -> None:
    """127 * 15 * 28672 is over 2^24; an odd term last would be lost in fp32."""
    shape = Shape(28672, 16, 28672)
    weight = random_weight(shape)
    weight.q[:, 0], weight.z[:] = 15, 0  # type: ignore[index]
    x = torch.full((11, shape.k), 127.0)
    x[1:], x[0, -1] = torch.randn(10, shape.k), 1.0
    for m in (1, 2, 4, 11):
        y = mm(x[:m], packed(weight), None, act_bits)
        expected(x[:m], weight.q, weight.z, weight.s, shape.group, act_bits=act_bits).check(y)
        if act_bits == 8:
            assert same(y, bits_of(weight, x[:m]))


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_that_are_no_ordinary_numbers_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    """Both zeros, the smallest subnormal, the largest number, infinities and NaN, each in its own column."""
    info = torch.finfo(dtype)
    named = [0.0, -0.0, info.tiny, -info.tiny / 4, info.max, -info.max, -1.5, torch.inf, -torch.inf, torch.nan]
    smallest = torch.tensor([1], dtype=torch.int16 if info.bits == 16 else torch.int32).view(dtype)
    s = torch.cat([torch.tensor(named).to(dtype), smallest]).reshape(1, -1)
    shape = Shape(8, s.shape[1], 8)
    q = torch.full((8, shape.n), 9, dtype=torch.uint8)
    x = torch.zeros(1, 8)
    x[0, 0] = 127.0
    for act_bits in (8, 16):
        y = mm(x, packed(RawWeight(shape, q, None, s, "scales")), None, act_bits)
        assert same(y, 127.0 * s.float())


@needs_numba
def test_flush_to_zero_in_the_calling_thread_changes_nothing() -> None:
    shape = Shape(264, 72, 128)
    weight = random_weight(shape, scale=2.0**-126, dtype=torch.float32)
    x = torch.randn(40, shape.k) * 2.0**-4
    wanted, stored = bits_of(weight, x), packed(weight)
    assert (wanted.abs() < 2.0**-126).any() and wanted.any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        results = [mm(x[:m], stored, None, 8) for m in (1, 5, 40)]
        flushed = torch.tensor([2.0**-140]) * torch.tensor([1.0])
    finally:
        torch.set_flush_denormal(False)
    assert flushed.item() == 0, "the caller's mode was changed"
    assert all(same(y, wanted[: y.shape[0]]) for y in results)


@needs_numba
@pytest.mark.parametrize("act_bits", [8, 16])
@settings(max_examples=6)
@given(seed=SEEDS)
def test_a_bad_row_spoils_no_other(act_bits: int, seed: int) -> None:
    weight = random_weight(Shape(264, 72, 128), seed)
    for m in (2, 8, 40):
        x = torch.randn(m, 264)
        clean = mm(x, packed(weight), None, act_bits)
        x[1, 200] = torch.nan
        y = mm(x, packed(weight), None, act_bits)
        assert y[1].isnan().all() and torch.equal(y[[0, *range(2, m)]], clean[[0, *range(2, m)]])


@needs_numba
@pytest.mark.parametrize("name", ["x", "weight", "scales", "zeros", "bias"])
def test_freed_memory_is_refused(name: str) -> None:
    weight = packed(random_weight(Shape(32, 16, 32)))
    tensors = {"x": torch.ones(2, 32), "bias": torch.ones(16)}
    tensors |= {part: getattr(weight, part) for part in ("weight", "scales", "zeros")}
    mm(tensors["x"], weight, tensors["bias"], 8)
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=f"^{name}: got a tensor whose storage has been freed"):
        mm(tensors["x"], weight, tensors["bias"], 8)


@needs_numba
def test_a_failing_thread_pool_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, x = packed(random_weight(Shape(256, 512, 64))), torch.randn(8, 256)

    @backend._ParallelFor
    def broken(*_: object) -> int:
        return 7

    address = ctypes.cast(broken, ctypes.c_void_p).value
    monkeypatch.setattr(backend.launch, "_torch_parallel_for", lambda: address)
    with threads(2), pytest.raises(backend.LaunchError, match="failed with code 7"):
        mm(x, stored, None, 8)


# ---- processes and threads --------------------------------------------------------------------------------------

# In a process of its own, where numba has compiled nothing yet. ``body`` prints its answer as JSON.
SCRIPT = """
import json, os, sys, threading, time
import torch
sys.path.insert(0, {tests!r})
from test_numba import bits_of, mm, packed, random_weight, same, Shape

weight = random_weight(Shape(256, 512, 64))
x = torch.randn(40, 256)
wanted, stored = bits_of(weight, x), packed(weight)
torch.set_num_threads(4)
torch.ones(1 << 22).add_(1).sum()

def right():
    return same(mm(x, stored, None, 8), wanted)

{body}
"""


def answer(body: str, **variables: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(tests=str(TESTS), body=body)],
        env={**os.environ, config.KERNEL.name: "numba", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_numba
def test_numba_brings_no_threads_of_its_own_and_is_imported_at_first_use() -> None:
    body = """
count = lambda: len(os.listdir("/proc/self/task"))
before, early = count(), "numba" in sys.modules
ok = right()
layer = sys.modules.get("numba.np.ufunc.parallel")
print(json.dumps([ok, count() - before, early, getattr(layer, "_is_initialized", False)]))
"""
    if not Path("/proc/self/task").exists():
        pytest.skip("no /proc")
    assert answer(body) == [True, 0, False, False]


@needs_numba
def test_a_child_forked_before_during_and_after_compiling_answers_with_the_same_bits() -> None:
    body = """
from awqjit.backends import numba_bodies

def in_child():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if right() else 2)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    return "hangs"

before = in_child()
thread = threading.Thread(target=right)
thread.start()
# Until the thread is in the middle of it: numba's own locks are held.
while thread.is_alive() and numba_bodies.lock.acquire(blocking=False):
    numba_bodies.lock.release()
compiling = thread.is_alive()
during = in_child()
thread.join()
print(json.dumps([before, compiling, during, right(), in_child(), right()]))
"""
    assert answer(body) == [0, True, 0, True, 0, True]


@needs_numba
def test_many_threads_that_want_it_first_compile_once_and_answer_alike() -> None:
    body = """
from concurrent.futures import ThreadPoolExecutor
from awqjit import jit
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: right(), range(24)))
print(json.dumps([all(found), len(jit.choices()), jit.choices()[0].compile_seconds > 0]))
"""
    assert answer(body) == [True, 1, True]


@needs_numba
def test_a_narrow_cpu_without_fma_gives_the_same_bits() -> None:
    """One rounding in multiply and add is the definition's, where the CPU has no instruction for it too."""
    # The name alone: numba takes the features of a CPU named so from LLVM.
    variables = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    body = "print(json.dumps([right(), all(same(mm(x[:m], stored, None, 8), wanted[:m]) for m in (1, 2, 3, 7))]))"
    assert answer(body, **variables) == [True, True]


# ---- selection --------------------------------------------------------------------------------------------------


@needs_numba
def test_a_choice_says_that_numba_compiled_it_and_a_second_shape_compiles_nothing() -> None:
    numba_bodies.compiled.cache_clear()
    first = jit.choose(PROBLEM)
    assert (first.kernel.name, first.origin) == ("numba", "numba")
    assert 0 < first.compile_seconds <= first.seconds
    other = Problem(100, 40, 7, "fp32", "bf16", symmetric=False, bias=True, act_bits=8)
    assert jit.choose(other).compile_seconds < 0.1 < first.compile_seconds


@needs_numba
def test_where_compiling_is_forbidden_numba_is_too() -> None:
    with config.override(jit="0", kernel="numba"), pytest.raises(KernelRefusedError, match="AWQJIT_JIT=0 forbids"):
        jit.choose(PROBLEM)


def row() -> select.Row:
    return next(row for row in select.ROWS if row.name == "numba")


def test_the_row_refuses_where_numba_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else real(name))
    assert row().accepts(PROBLEM, machine.detect()) == "numba is not installed"
    with pytest.raises(KernelRefusedError, match=r"AWQJIT_KERNEL=numba cannot run .*numba is not installed"):
        jit.choose(PROBLEM)


@needs_numba
def test_the_row_refuses_a_numba_that_was_not_made_for_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row().accepts(PROBLEM, machine.detect()) is None
    monkeypatch.setattr(machine, "_numba_pythons", lambda: ("0.1", frozenset({"3.6", "3.7"})))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert row().accepts(PROBLEM, machine.detect()) == f"numba 0.1 does not support Python {here}"


@needs_numba
def test_the_installed_numba_says_which_pythons_it_supports() -> None:
    version, pythons = machine._numba_pythons()
    assert version and f"{sys.version_info.major}.{sys.version_info.minor}" in pythons


def test_groups_too_long_for_int32_are_refused() -> None:
    long = Problem(MAX_W4A8_GROUP + 1, 16, MAX_W4A8_GROUP + 1, "bf16", "fp16", False, False, 8)
    assert "int32 sums" in str(row().accepts(long, machine.Machine("x86_64", "Linux", "", frozenset())))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A numba that is installed, and that no import of it survives."""

    def fails(act_bits: int) -> None:
        raise ImportError("Numba needs NumPy 2.5 or less\nand more")

    monkeypatch.setattr(numba_bodies, "compiled", fails)
    monkeypatch.setattr(machine, "_no_numba", lambda: None)


@pytest.mark.usefixtures("broken")
def test_a_numba_that_cannot_be_imported_is_an_error_where_it_was_asked_for_by_name() -> None:
    with pytest.raises(NumbaError, match=r"numba does not work here: ImportError: Numba needs NumPy 2\.5 or less$"):
        jit.choose(PROBLEM)


@pytest.mark.usefixtures("broken")
def test_a_numba_that_cannot_be_imported_gives_plain_torch_and_the_one_warning_says_why() -> None:
    with config.override(kernel=None, cxx="/nowhere/c++"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ops.forget()
        assert jit.choose(PROBLEM).kernel.name == "torch"
    (text,) = [str(one.message) for one in caught if issubclass(one.category, AwqJitWarning)]
    assert "Numba needs NumPy 2.5 or less" in text and "/nowhere/c++" in text and "slowly in plain torch" in text
