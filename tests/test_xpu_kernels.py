# SPDX-License-Identifier: Apache-2.0
"""SYCL kernels on Intel's CPU device, the matrix unit emulated: the float64 oracle's bounds, the definition's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from oracle import expected
from strategies import ZERO_KINDS, RawWeight, Shape, activations, biases, weights
from torch import Tensor
from xpu_device import CASES, MS, Bench, Case, check_everything, edge_rows, same
from xpu_host import needs_wheels

from awqjit.errors import ArgumentError
from awqjit.spec import Problem
from awqjit.xpu import device
from awqjit.xpu.render import kernels
from awqjit.xpu.spec import DECODE, PREFILL, XpuTarget, launches, plan, refusal, scratch

EXAMPLES = 4
BOTH_MODES = pytest.mark.parametrize("act_bits", [16, 8], ids=["w4a16", "w4a8"])


@pytest.fixture
def cpu() -> Iterator[device.Device]:
    with device.cpu_as_xpu() as one:
        yield one


def drawn(case: Case) -> dict:
    zeros = ("none",) if case.symmetric else tuple(kind for kind in ZERO_KINDS if kind != "none")
    rows = activations(case.shape.k, dtypes=(case.x_dtype,), max_rows=12, strides=("contiguous",))
    bias = biases(case.shape.n).map(lambda bias: torch.zeros(case.shape.n) if bias is None else bias)
    edges = edge_rows(case.shape.k, case.x_dtype)
    return {
        "weight": weights(case.shape, dtypes=(case.scale_dtype,), zero_kinds=zeros),
        "x": rows.map(lambda x: torch.cat([x, edges])),
        "bias": bias.map(lambda bias: bias if case.bias else None),
    }


@needs_wheels
@BOTH_MODES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_the_oracle_and_w4a8_to_the_bit(cpu: device.Device, case: Case, act_bits: int) -> None:
    bench = Bench(cpu, case, act_bits)

    @settings(max_examples=EXAMPLES)
    @given(**drawn(case))
    def check(weight: RawWeight, x: Tensor, bias: Tensor | None) -> None:
        check_everything(bench, x, weight, bias)

    check()


def plain_weight(case: Case, seed: int, s: Tensor | None = None) -> RawWeight:
    torch.manual_seed(seed)
    size = (case.shape.groups, case.shape.n)
    q = torch.randint(0, 16, (case.shape.k, case.shape.n), dtype=torch.uint8)
    z = None if case.symmetric else torch.randint(0, 16, size, dtype=torch.uint8)
    return RawWeight(case.shape, q, z, (torch.randn(size) * 0.01 if s is None else s).to(case.scale_dtype), "plain")


@needs_wheels
@BOTH_MODES
def test_one_row_with_groups_longer_than_a_fragment(cpu: device.Device, act_bits: int) -> None:
    """One row is the case of decoding, and no group but the first may read its scale and zero point."""
    for case in CASES:
        shape = case.shape
        if shape.group <= 32 or shape.groups == 1 or not case.matrix:
            continue
        s = (torch.arange(shape.groups)[:, None] % 7 + 1) * torch.ones(1, shape.n)
        weight = plain_weight(case, 3, s)
        x = torch.zeros(shape.groups, shape.k, dtype=case.x_dtype)
        for group in range(shape.groups):  # one row of x for every group: y is that group's part of W
            x[group, min(shape.k - 1, group * shape.group + 33)] = 127
        bench = Bench(cpu, case, act_bits)
        for row in x:
            for path in bench.paths(1):
                y = bench.run(path, row[None], weight, torch.zeros(shape.n) if case.bias else None).y
                at = int(row.argmax())
                z = 8 if weight.z is None else weight.z[at // shape.group].float()
                wanted = 127 * (weight.q[at].float() - z) * weight.s[at // shape.group].float()
                assert torch.equal(y[0], wanted.to(y.dtype))


@needs_wheels
def test_int8_sums_are_exact_beyond_fp32(cpu: device.Device) -> None:
    """One long group of the largest products: 127 * 15 * 28672 is above 2^24 and has to stay an integer."""
    shape = Shape(28672, 16, 28672)
    weight = RawWeight(
        shape,
        torch.full((shape.k, shape.n), 15, dtype=torch.uint8),
        torch.zeros(1, shape.n, dtype=torch.uint8),
        torch.full((1, shape.n), 2.0**-10),
        "largest",
    )
    weight.q[5, ::2] = 14
    x = torch.full((2, shape.k), 127.0)
    x[1, ::3] = -3.0
    for matrix in (True, False):
        case = Case(shape, torch.float32, torch.float32, False, False, 16, matrix)
        check_everything(Bench(cpu, case, 8), x, weight, None, ms=(1, 2, 33))


@needs_wheels
@BOTH_MODES
def test_bad_rows_and_zero_rows_touch_no_other(cpu: device.Device, act_bits: int) -> None:
    case = CASES[10]
    bench, shape = Bench(cpu, case, act_bits), case.shape
    weight = plain_weight(case, 5)
    bias = torch.randn(shape.n) if case.bias else None
    x = torch.randn(33, shape.k).to(case.x_dtype)
    x[4] = 0
    bad = x.clone()
    bad[0, 3], bad[9, shape.k - 1] = float("inf"), float("nan")
    for path in bench.paths(33):
        clean, spoiled = (bench.run(path, rows, weight, bias).y for rows in (x, bad))
        assert spoiled[9].isnan().all() and not spoiled[0].isfinite().any()
        others = [row for row in range(33) if row not in (0, 9)]
        assert torch.equal(spoiled[others], clean[others])
        of_zeros = torch.zeros(shape.n) if bias is None else bias
        assert torch.equal(clean[4].float(), of_zeros.to(case.x_dtype).float())


@needs_wheels
def test_prefill_of_w4a8_gives_each_row_what_it_is_alone(cpu: device.Device) -> None:
    case = CASES[11]
    bench = Bench(cpu, case, 8)
    weight = plain_weight(case, 6)
    bias = torch.randn(case.shape.n) if case.bias else None
    x = torch.randn(40, case.shape.k).to(case.x_dtype)
    for path in (DECODE, PREFILL):
        alone = bench.run(path, x[:1], weight, bias).y
        assert all(same(bench.run(path, x[:m], weight, bias).y[:1], alone) for m in (1, 2, 8, 9, 17, 40))


def test_the_pool_has_every_group_size_in_both_dtypes_and_every_kind_of_device() -> None:
    for x_dtype in (torch.bfloat16, torch.float16):
        groups = {case.shape.group for case in CASES if case.x_dtype == x_dtype}
        assert {4, 16, 32, 64, 100, 128, 256} <= groups
        assert any(case.shape.group == case.shape.k > 256 or case.shape.k == 130 for case in CASES)
    assert {(case.matrix, case.lanes) for case in CASES} == {(True, 16), (True, 8), (False, 16), (False, 8)}


def problem(**changed: object) -> Problem:
    given = {"k": 512, "n": 48, "group_size": 128, "x_dtype": "bf16", "scale_dtype": "fp16", "symmetric": False}
    return Problem(**{**given, "bias": False, "act_bits": 16, **changed})  # type: ignore[arg-type]


DPAS = XpuTarget("sycl_dpas", 16, "visa")


def test_the_matrix_unit_refuses_by_name_what_it_cannot_do() -> None:
    assert refusal(problem(), DPAS) is None and refusal(problem(x_dtype="fp32", act_bits=8), DPAS) is None
    assert "fp32" in str(refusal(problem(x_dtype="fp32"), DPAS))
    assert "multiple of 32" in str(refusal(problem(group_size=100), DPAS))
    assert refusal(problem(k=100, group_size=100), DPAS) is None  # one group: a fragment cannot end in another
    assert refusal(problem(group_size=100, x_dtype="fp32"), XpuTarget("sycl", 16, None)) is None
    with pytest.raises(ArgumentError, match="multiple of 32"):
        kernels(problem(group_size=4), DPAS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cuda", 16, None), "XpuTarget.name"),
        (("sycl", 32, None), "XpuTarget.lanes"),
        (("sycl", 16, "visa"), "XpuTarget.leaf"),
        (("sycl_dpas", 16, None), "XpuTarget.leaf"),
    ],
)
def test_a_target_checks_itself(arguments: tuple, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        XpuTarget(*arguments)


@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("target", [DPAS, XpuTarget("sycl_dpas", 8, "visa"), XpuTarget("sycl", 16, None)], ids=str)
def test_work_covers_every_row_and_column_and_fits_a_device(target: XpuTarget, act_bits: int) -> None:
    for n in (1, 17, 4096, 28672):
        for k, g in ((32, 32), (4096, 128), (11008, 64), (28672, 28672)):
            one = problem(n=n, k=k, group_size=g, act_bits=act_bits)
            assert not scratch(one, target, 1) or act_bits == 8
            names = {kernel.name for kernel in kernels(one, target)}
            for m in (*MS, 34, 1000):
                steps = plan(one, target, m)
                assert [step.kernel_name for step in steps][:-1] == (["quantise"] if act_bits == 8 else [])
                for step in steps:
                    assert step.kernel_name in names
                    assert step.local_range[0] == 1 and step.global_range[1] % step.local_range[1] == 0
                    assert step.local_range[1] <= 256 and step.local_range[1] % target.lanes == 0
    with pytest.raises(ArgumentError, match="m: got 0"):
        plan(problem(), target, 0)


def test_w4a16_prefill_takes_whole_tiles_alone() -> None:
    with pytest.raises(ArgumentError, match="m: got 5, wanted at least 16"):
        launches(problem(), DPAS, 5, PREFILL)


def test_equal_arguments_give_equal_text_and_quantise_depends_on_x_alone() -> None:
    one, other = kernels(problem(act_bits=8), DPAS), kernels(problem(act_bits=8, n=96, scale_dtype="bf16"), DPAS)
    assert one == kernels(problem(act_bits=8), DPAS)
    assert one[0].source == other[0].source and one[1].source != other[1].source
    assert all(kernel.source.startswith("// SPDX-License-Identifier: Apache-2.0\n") for kernel in one)


def test_the_oracle_of_these_tests_finds_a_wrong_result() -> None:
    weight = plain_weight(replace(CASES[0], shape=Shape(64, 4, 32)), 1)
    x = torch.randn(2, 64)
    wanted = expected(x, weight.q, weight.z, weight.s, 32)
    y = wanted.y.float()
    wanted.check(y)
    y[1, 2] *= 1 + 1e-3
    with pytest.raises(AssertionError, match="out of bounds"):
        wanted.check(y)
