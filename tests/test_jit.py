# SPDX-License-Identifier: Apache-2.0
"""From a problem to a kernel: one compile for many threads, what happens without a compiler, forced rows, warming."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compilers
import numpy as np
import oracle
import pytest
import torch
from strategies import RawWeight, Shape
from torch import Tensor, nn

import awqjit
from awqjit import config, jit, machine, ops
from awqjit.errors import (
    ArgumentError,
    AwqJitWarning,
    CompileError,
    KernelMissingError,
    KernelRefusedError,
    NoCompilerError,
)
from awqjit.layout import pack
from awqjit.modules import Int4Linear
from awqjit.spec import Problem
from awqjit.target import TARGETS

needs_compiler = pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
BEST = {
    bits: next(t.name for t in TARGETS if bits in t.act_bits and not machine.detect().missing(t.features))
    for bits in (16, 8)
}
WIDE = BEST[16] != "portable"
K, N, G = 64, 16, 32
X = torch.from_numpy(np.random.default_rng(31).standard_normal((4, K)).astype(np.float32))


def raw(n: int = N, k: int = K) -> RawWeight:
    rng = np.random.default_rng(n)
    shape = Shape(k, n, G)
    return RawWeight(
        shape,
        q=torch.from_numpy(rng.integers(0, 16, (k, n), dtype=np.uint8)),
        z=torch.from_numpy(rng.integers(0, 16, (shape.groups, n), dtype=np.uint8)),
        s=torch.from_numpy(rng.uniform(0.002, 0.03, (shape.groups, n)).astype(np.float32)),
        name=f"seed {n}",
    )


def problem(n: int = N, act_bits: int = 16) -> Problem:
    return Problem(K, n, G, "fp32", "fp32", symmetric=False, bias=False, act_bits=act_bits)


def run(n: int = N, act_bits: int = 16, x: Tensor = X) -> Tensor:
    packed = pack(raw(n).quantized())
    assert packed.zeros is not None
    return torch.ops.awqjit.int4_mm(x, packed.weight, packed.scales, packed.zeros, None, K, n, G, act_bits)


def check(y: Tensor, n: int = N, act_bits: int = 16, x: Tensor = X) -> None:
    weight = raw(n)
    oracle.expected(x, weight.q, weight.z, weight.s, G, act_bits=act_bits).check(y)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with nothing in it."""
    path = tmp_path / "cold"
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(path))
    ops.forget()
    yield path
    ops.forget()


@pytest.fixture
def no_compiler(cold: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AWQJIT_CXX", str(tmp_path / "no-such-compiler"))
    hide_numba(monkeypatch)
    return cold


def hide_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_no_numba", lambda: "hidden by the test")


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, AwqJitWarning)]


# ---- threads ----------------------------------------------------------------------------------------------------


@needs_compiler
def test_sixteen_threads_that_want_one_kernel_first_compile_it_once(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, runs = compilers.counting(tmp_path / "g++", seconds=0.3)
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    start = threading.Barrier(16)

    def one(_: int) -> tuple[jit.Choice, Tensor]:
        start.wait()
        return jit.choose(problem()), run()

    with ThreadPoolExecutor(16) as pool:
        chosen, results = zip(*pool.map(one, range(16)), strict=True)
    assert all(choice is chosen[0] for choice in chosen)
    assert len(runs.read_text().splitlines()) == 1
    assert len(jit.choices()) == 1
    check(results[0])
    assert all(torch.equal(result, results[0]) for result in results)


@needs_compiler
def test_a_thread_with_a_ready_kernel_does_not_wait_for_one_that_compiles(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(N)
    gate, started = tmp_path / "gate", tmp_path / "started"
    body = f'touch "{started}"; while [ ! -e "{gate}" ]; do sleep 0.02; done'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    slow = threading.Thread(target=run, args=(N + 16,))
    slow.start()
    try:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert started.exists()
        check(run(N))  # would wait for the gate for ever
        assert slow.is_alive()
    finally:
        gate.touch()
        slow.join(60)
    assert not slow.is_alive()
    check(run(N + 16), N + 16)


# ---- no compiler, or one that fails -----------------------------------------------------------------------------


def test_without_a_compiler_there_is_one_warning_and_the_right_answer(no_compiler: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for act_bits in (16, 8):
            check(run(N, act_bits), N, act_bits)
            check(run(N + 16, act_bits), N + 16, act_bits)
            run(N, act_bits)
    (text,) = ours(caught)
    assert "slowly in plain torch" in text
    assert "no-such-compiler" in text
    assert text.count("no-such-compiler") <= 2  # what was tried and how: not once per row
    assert {choice.kernel.name for choice in jit.choices()} == {"torch"}
    assert {choice.origin for choice in jit.choices()} == {"torch"}


@needs_compiler
def test_a_kernel_in_the_cache_needs_no_compiler(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run()
    ops.forget()
    monkeypatch.delenv("AWQJIT_CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(jit.cache.toolchain.importlib.util, "find_spec", lambda name: None)  # no zig
    with warnings.catch_warnings():
        warnings.simplefilter("error", AwqJitWarning)
        assert torch.equal(run(), wanted)
    assert jit.choose(problem()).origin == "cache"


@needs_compiler
@pytest.mark.skipif(not WIDE, reason="this CPU runs the portable row alone")
def test_a_compiler_that_lacks_a_rows_flag_gives_the_next_row_and_one_warning(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'case "$*" in *-mavx*) echo "g++: error: unrecognized command-line option -mavx512bf16" >&2; exit 1;; esac'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(run(N))
        check(run(N + 16), N + 16)
    (text,) = ours(caught)
    assert f"the kernel row {BEST[16]}" in text and "cannot be built here, portable is used" in text
    assert "unrecognized command-line option -mavx512bf16" in text
    choice = jit.choose(problem())
    assert choice.kernel.name == "portable"
    assert BEST[16] in {row for row, _ in choice.refusals}


@needs_compiler
def test_a_compiler_that_fails_for_every_row_gives_plain_torch_and_one_warning(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_numba(monkeypatch)
    body = 'echo "kernel.cpp:1:1: error: no disk" >&2; exit 1'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(run())
    (text,) = ours(caught)
    assert "no disk" in text
    assert jit.choose(problem()).kernel.name == "torch"


# ---- variables --------------------------------------------------------------------------------------------------


@needs_compiler
def test_jit_0_names_the_missing_kernel_and_takes_one_that_is_there(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with config.override(jit="0"), pytest.raises(KernelMissingError) as caught:
        run()
    assert f"{problem().slug}-{BEST[16]}" in str(caught.value)
    assert str(cold) in str(caught.value)
    assert jit.choices() == ()
    wanted = run()
    assert jit.choose(problem()).origin == "built"
    ops.forget()
    with config.override(jit="0"):
        assert torch.equal(run(), wanted)
        assert jit.choose(problem()).origin == "cache"
        with pytest.raises(KernelMissingError, match=f"n{N + 16}"):
            run(N + 16)
    ops.forget()
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(cold))
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(cold.with_name("another")))
    with config.override(jit="0"):
        assert torch.equal(run(), wanted)
        assert jit.choose(problem()).origin == "baked"


@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("row", [*(target.name for target in TARGETS), "torch"])
def test_a_forced_row_runs_or_refuses_and_nothing_else_runs(row: str, act_bits: int) -> None:
    target = next((t for t in TARGETS if t.name == row), None)
    refuses = target is not None and (act_bits not in target.act_bits or machine.detect().missing(target.features))
    if target is not None and not compilers.REAL and not refuses:
        pytest.skip("no g++ or clang++")
    with config.override(kernel=row), warnings.catch_warnings():
        warnings.simplefilter("error", AwqJitWarning)
        if refuses:
            with pytest.raises(KernelRefusedError, match=f"AWQJIT_KERNEL={row} cannot run"):
                run(N, act_bits)
            assert jit.choices() == ()
        else:
            check(run(N, act_bits), N, act_bits)
            assert [choice.kernel.name for choice in jit.choices()] == [row]


def test_a_forced_row_that_does_not_exist_is_refused() -> None:
    with (
        config.override(kernel="cuda"),
        pytest.raises(KernelRefusedError, match=r"no such row; rows: .*portable, .*torch"),
    ):
        run()


def test_a_forced_row_that_cannot_be_built_is_not_replaced(no_compiler: Path) -> None:
    with config.override(kernel="portable"), pytest.raises(NoCompilerError, match="no-such-compiler"):
        run()
    assert jit.choices() == ()


@needs_compiler
def test_a_forced_row_that_does_not_compile_shows_where_the_failed_build_is(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", 'echo "error: flat" >&2; exit 1')))
    with config.override(kernel="portable"), pytest.raises(CompileError, match="error: flat") as caught:
        run()
    assert (caught.value.directory / "kernel.cpp").is_file()
    monkeypatch.delenv("AWQJIT_CXX")
    with config.override(kernel="portable"):  # the failure is not remembered
        check(run())


@needs_compiler
def test_max_isa_caps_the_row_and_the_answers_stay_right() -> None:
    with config.override(max_isa="portable"):
        for act_bits in (16, 8):
            check(run(N, act_bits), N, act_bits)
    assert {choice.kernel.name for choice in jit.choices()} == {"portable"}


@needs_compiler
def test_variables_are_read_again_after_forget() -> None:
    run()
    first = jit.choose(problem()).kernel.name
    with config.override(kernel="torch"):
        run()
        assert jit.choose(problem()).kernel.name == first  # once per problem and process
        ops.forget()
        run()
        assert jit.choose(problem()).kernel.name == "torch"


# ---- choices ----------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_choice_says_what_was_chosen_why_and_how_long_it_took(cold: Path) -> None:
    built = jit.choose(problem())
    assert (built.kernel.name, built.origin) == (BEST[16], "built")
    assert 0 < built.compile_seconds <= built.seconds
    before = [target.name for target in TARGETS][: [target.name for target in TARGETS].index(BEST[16])]
    assert [row for row, _ in built.refusals] == before
    assert all(reason for _, reason in built.refusals)
    assert jit.choose(problem()) is built
    ops.forget()
    found = jit.choose(problem())
    assert (found.origin, found.compile_seconds) == ("cache", 0.0)
    assert jit.choices() == (found,)


@needs_compiler
def test_a_new_batch_size_or_mode_of_memory_compiles_nothing(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, runs = compilers.counting(tmp_path / "g++")
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    for rows in (0, 1, 7, 8, 9, 64, 200):
        x = torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32))
        check(run(x=x), x=x)
    assert len(runs.read_text().splitlines()) == 1


# ---- warm -------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    layers = [Int4Linear.from_quantized(raw(n).quantized()) for n in (N, N + 16, N, N + 32)]
    return nn.ModuleList([nn.LayerNorm(K), *layers])


@needs_compiler
def test_warm_compiles_each_problem_of_a_model_once_several_at_a_time(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    compiler = compilers.kernel_script(
        tmp_path / "g++", f'echo + >> "{log}"; sleep 0.5; "$REAL" "$@"; rc=$?; echo - >> "{log}"; exit $rc'
    )
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    choices = awqjit.warm(model(), jobs=3, show_progress=False)
    assert [choice.problem.n for choice in choices] == [N, N + 16, N + 32]
    assert {choice.origin for choice in choices} == {"built"}
    events = log.read_text().split()
    assert events.count("+") == 3
    assert events[:2] == ["+", "+"]  # a second began before the first was done
    ops.forget()
    with config.override(jit="0"):
        again = awqjit.warm(model(), show_progress=False)
        check(run())
    assert {choice.origin for choice in again} == {"cache"}


@needs_compiler
def test_warm_finishes_the_others_before_it_raises(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'if grep -q "N = {N + 16};" kernel.cpp; then echo "error: unlucky" >&2; exit 1; fi; sleep 0.3'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    with config.override(kernel="portable"), pytest.raises(CompileError, match="unlucky"):
        awqjit.warm(model(), jobs=1, show_progress=False)
    assert [choice.problem.n for choice in jit.choices()] == [N, N + 32]


def test_warm_takes_problems_and_refuses_zero_jobs() -> None:
    with config.override(kernel="torch"):
        (choice,) = awqjit.warm([problem(), problem()], show_progress=False)
        assert choice.problem == problem()
        assert awqjit.warm([], show_progress=False) == ()
        with pytest.raises(ArgumentError, match="jobs: got 0, wanted at least 1"):
            awqjit.warm([problem()], jobs=0)


@needs_compiler
def test_a_warm_model_runs_without_compiling(cold: Path) -> None:
    layers = model()
    awqjit.warm(layers, dtype=torch.bfloat16, show_progress=False)
    with config.override(jit="0"):
        for layer in list(layers)[1:]:
            assert layer(X.bfloat16()).dtype == torch.bfloat16
