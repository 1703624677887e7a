# SPDX-License-Identifier: Apache-2.0
"""The Triton row before a kernel runs: how problems are cut up, when it is chosen, what happens without Triton."""

from __future__ import annotations

import dataclasses
import importlib.util
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import mm
from strategies import Shape

from awqjit import config, jit, machine, ops, select
from awqjit.backends import triton as backend
from awqjit.backends.dense import DenseKernel
from awqjit.backends.triton_plan import FEW_ROWS, TABLE, Plan, bucket, regime
from awqjit.errors import AwqJitWarning, KernelRefusedError, TritonError
from awqjit.layout import LAYOUT_GPU, pack
from awqjit.machine import Machine
from awqjit.spec import MAX_W4A8_GROUP, Problem

PROBLEM = Problem(64, 16, 32, "bf16", "fp16", symmetric=True, bias=False, act_bits=8)
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    k = draw(st.integers(1, 20000))
    group = draw(st.one_of(st.integers(1, k), st.sampled_from([g for g in (4, 16, 32, 100, 128, k) if g <= k])))
    dtype, bits = draw(st.sampled_from(["bf16", "fp16", "fp32"])), draw(st.sampled_from([16, 8]))
    return Problem(k, draw(st.integers(1, 20000)), group, dtype, "fp16", symmetric=True, bias=False, act_bits=bits)


@given(problem=problems())
def test_tiles_cover_every_group_and_slices_every_step(problem: Problem) -> None:
    plan = Plan.of(problem)
    assert plan.tile & (plan.tile - 1) == 0 and plan.tile >= (32 if problem.act_bits == 8 else 16)
    reached, steps = set(), plan.steps if problem.act_bits == 16 else plan.steps * plan.tiles
    assert steps == problem.groups * plan.tiles
    for group in {0, 1, problem.groups // 2, problem.groups - 1} & set(range(problem.groups)):
        low = group * problem.group_size
        high = min(low + problem.group_size, problem.k)
        start = low if plan.aligned else low // 8 * 8
        assert start % 8 == 0 and start <= low and start + plan.tiles * plan.tile >= high
        if not plan.masked:
            assert (start, start + plan.tiles * plan.tile) == (low, high)
    for index in range(plan.slices):
        mine = set(range(index * plan.slice_steps, min((index + 1) * plan.slice_steps, plan.steps)))
        assert mine and not mine & reached
        reached |= mine
    assert reached == set(range(plan.steps))


@given(rows=st.integers(1, 1 << 20))
def test_a_bucket_lies_in_one_part_of_the_table(rows: int) -> None:
    assert regime(bucket(rows)) == regime(rows) and bucket(bucket(rows)) == bucket(rows)
    assert bucket(rows) >= min(rows, 1024)


def test_few_rows_fit_one_program() -> None:
    assert all(blocks.rows >= FEW_ROWS for blocks in TABLE["few rows"])
    assert all(len(set(blocks)) == len(blocks) for blocks in TABLE.values())


# ---- when it is chosen --------------------------------------------------------------------------------------------

WITH_CUDA = Machine("x86_64", "Linux", "a CPU", frozenset(), no_cuda=None, no_triton=None)
WITH_XPU = dataclasses.replace(WITH_CUDA, xpu=machine.Xpu("a GPU", 16, True, no_sycl="no wheels"), no_xpu="")


@pytest.mark.parametrize(("here", "device"), [(WITH_CUDA, "cuda"), (WITH_XPU, "xpu")])
def test_triton_comes_right_before_torch(here: Machine, device: str) -> None:
    names = [verdict.row.name for verdict in select.explain(PROBLEM, here, device)]
    assert names[-2:] == ["triton", "torch"]
    assert select.choose(PROBLEM, here, device).name == "triton"
    without = dataclasses.replace(here, no_triton="triton is not installed")
    assert select.choose(PROBLEM, without, device).name == "torch"
    with pytest.raises(KernelRefusedError, match="triton is not installed"):
        select.choose(PROBLEM, without, device, forced="triton")


def test_groups_too_long_for_int32_sums_are_refused() -> None:
    long = Problem(2 * MAX_W4A8_GROUP, 16, 2 * MAX_W4A8_GROUP, "bf16", "fp16", True, False, 8)
    assert select.choose(long, WITH_CUDA, "cuda").name == "torch"
    assert select.choose(dataclasses.replace(long, act_bits=16), WITH_CUDA, "cuda").name == "triton"


def test_without_a_device_nothing_is_chosen_and_the_reason_is_given() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    reason = backend.describe(machine.detect()).no_cuda
    assert reason is not None and ("built without CUDA" in reason or "finds no device" in reason)
    assert {verdict.reason for verdict in select.explain(PROBLEM, backend.describe(WITH_CUDA), "cuda")} == {reason}


@pytest.fixture
def cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "describe", lambda here: dataclasses.replace(here, no_cuda=None))
    monkeypatch.setattr(machine, "_no_triton", lambda: None)


@pytest.mark.usefixtures("cuda_is_there")
def test_a_device_on_which_triton_fails_gets_torch_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "obstacle", lambda *asked: "RuntimeError: no driver")
    with pytest.warns(AwqJitWarning, match=r"slowly in plain torch .*triton does not work here: RuntimeError: no driv"):
        choice = jit.choose(PROBLEM, "cuda:0")
    assert isinstance(choice.kernel, DenseKernel) and choice.device == "cuda:0"
    ops.forget()
    with config.override(kernel="triton"), pytest.raises(TritonError, match="no driver"):
        jit.choose(PROBLEM, "cuda:0")


@pytest.mark.usefixtures("cuda_is_there")
def test_triton_does_not_compile_where_compiling_is_forbidden() -> None:
    with config.override(kernel="triton", jit="0"), pytest.raises(TritonError, match="AWQJIT_JIT=0 forbids compiling"):
        jit.choose(PROBLEM, "cuda:0")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_the_obstacle_says_so() -> None:
    assert backend.obstacle("cpu", 16, "bf16") == "the package triton is not installed"


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: set TRITON_INTERPRET=1")
def test_the_operator_runs_it_when_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """From packed tensors in the GPU layout, act-order among them, through the operator: the CPU acts as a GPU."""
    from triton_cases import bits, random_weight, same

    from awqjit.ops import matmul

    monkeypatch.setattr(backend, "describe", lambda here: dataclasses.replace(here, no_cuda=None))
    monkeypatch.setattr(matmul, "_place", lambda x, layout: "cuda:0")
    load = backend.TritonKernel.load
    monkeypatch.setitem(jit.ON_ACCELERATORS, ("cuda", "triton"), lambda problem, device: load(problem, "cpu"))
    weight = random_weight(Shape(96, 40, 32))
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    g_idx = torch.empty(96, dtype=torch.int32)
    g_idx[order] = torch.arange(96, dtype=torch.int32) // 32
    q = torch.empty_like(weight.q)
    q[order] = weight.q
    shuffled = dataclasses.replace(weight, q=q)
    x = torch.randn(2, 9, 96, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(40, generator=torch.Generator().manual_seed(3)).half()
    with config.override(kernel="triton"):
        plain = mm(x, pack(weight.quantized(), LAYOUT_GPU), bias, 8)
        act_order = pack(dataclasses.replace(shuffled.quantized(), g_idx=g_idx), LAYOUT_GPU)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(96)
        permuted = mm(x[..., inverse], act_order, bias, 8)
    assert plain.shape == (2, 9, 40) and same(plain.reshape(18, 40), bits(weight, x, bias))
    assert same(permuted, plain)
