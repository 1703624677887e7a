# SPDX-License-Identifier: Apache-2.0
"""Every kernel row, forced in turn, against the float64 oracle and against the definition's bits."""

from __future__ import annotations

from dataclasses import replace

import compilers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expected, w4a8_bits
from rows import ALL, COMPILED, OTHER_COMPILER_CASES, Case, cases_of, forced, mm, packed, poisoned_memory, threads
from strategies import SEEDS, ZERO_KINDS, RawWeight, Shape, activations, biases, weights

from awqjit import jit, toolchain
from awqjit.errors import ArgumentError

EXAMPLES = 12

rows = pytest.mark.parametrize(("row", "act_bits"), ALL, ids=lambda value: str(value))
compiled_rows = pytest.mark.parametrize(("row", "act_bits"), COMPILED, ids=lambda value: str(value))
INT8_ROWS = tuple(name for name, bits in COMPILED if bits == 8)
int8_rows = pytest.mark.parametrize("row", INT8_ROWS)


def drawn(case: Case, x_rows: int = 40) -> dict[str, st.SearchStrategy]:
    """Strategies for the data of a case."""
    zeros = ("none",) if case.symmetric else tuple(kind for kind in ZERO_KINDS if kind != "none")
    return {
        "weight": weights(case.shape, dtypes=(case.scale_dtype,), zero_kinds=zeros),
        "x": activations(case.shape.k, dtypes=(case.x_dtype,), max_rows=x_rows),
        "bias": biases(case.shape.n).filter(lambda bias: bias is not None) if case.bias else st.none(),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit but those of a NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize(
    ("row", "act_bits", "case"), [(*row, case) for row in ALL for case in cases_of(row[0])], ids=str
)
def test_a_row_matches_the_oracle(row: str, act_bits: int, case: Case) -> None:
    with forced(row), poisoned_memory():

        @settings(max_examples=EXAMPLES)
        @given(**drawn(case))
        def check(weight, x, bias):
            y = mm(x, packed(weight), bias, act_bits)
            assert y.dtype == x.dtype and y.is_contiguous() and y.shape == (*x.shape[:-1], case.shape.n)
            z = weight.z
            expected(x, weight.q, z, weight.s, case.shape.group, bias=bias, act_bits=act_bits).check(y)

        check()
        assert {choice.kernel.name for choice in jit.choices()} <= {row}


@pytest.mark.parametrize(("row", "case"), [(row, case) for row in INT8_ROWS for case in cases_of(row)], ids=str)
def test_a_w4a8_row_gives_the_bits_of_the_definition(row: str, case: Case) -> None:
    """So all w4a8 rows agree bit for bit, for any number of rows and threads."""
    with forced(row), poisoned_memory():

        @settings(max_examples=EXAMPLES)
        @given(count=st.integers(1, 4), **drawn(case))
        def check(weight, x, bias, count):
            with threads(count):
                y = mm(x, packed(weight), bias, 8)
            wanted = w4a8_bits(x, weight.q, weight.z, weight.s, case.shape.group, bias=bias)
            assert same(y.reshape(wanted.shape), wanted)

        check()


@pytest.fixture(scope="session")
def other_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of gcc and clang the one that the tests above have not been built by."""
    found = compilers.by_kind(tmp_path_factory.mktemp("compilers"))
    used = toolchain.find_compiler().kind
    others = [path for kind, path in found.items() if kind != used]
    if not others:
        pytest.skip(f"no compiler but {used} is here: install g++, clang++ or the package ziglang")
    return others[0]


@compiled_rows
@pytest.mark.parametrize("case", OTHER_COMPILER_CASES, ids=str)
def test_a_row_built_by_the_other_compiler_is_as_right(
    row: str, act_bits: int, case: Case, other_compiler: str
) -> None:
    with forced(row, other_compiler), poisoned_memory():
        assert toolchain.find_compiler().argv == (other_compiler,)

        @settings(max_examples=EXAMPLES)
        @given(**drawn(case))
        def check(weight, x, bias):
            y = mm(x, packed(weight), bias, act_bits)
            data = (x, weight.q, weight.z, weight.s, case.shape.group)
            if act_bits == 8:
                wanted = w4a8_bits(*data, bias=bias)
                assert same(y.reshape(wanted.shape), wanted)
            else:
                expected(*data, bias=bias, act_bits=16).check(y)

        check()


@int8_rows
@pytest.mark.parametrize("m", [*range(1, 20), 31, 64, 127, 128, 129, 200, 257, 300, 1000])
def test_w4a8_is_the_same_for_every_number_of_rows(row: str, m: int) -> None:
    """Decode and prefill, whole and ragged tiles and chunks: each row of y is what it is alone."""
    torch.manual_seed(m)
    shape = Shape(264, 72, 128)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    z = torch.randint(0, 16, (shape.groups, shape.n), dtype=torch.uint8)
    s = torch.randn(shape.groups, shape.n, dtype=torch.float16) * 0.01
    x = torch.randn(m, shape.k, dtype=torch.bfloat16)
    wanted = w4a8_bits(x, q, z, s, shape.group)
    weight = packed(RawWeight(shape, q, z, s, "fixed"))
    with forced(row), poisoned_memory():
        for count in (1, 2, 3):
            with threads(count):
                assert same(mm(x, weight, None, 8), wanted)


@rows
@settings(max_examples=8)
@given(data=st.data())
def test_a_one_hot_row_reads_one_row_of_the_weight(row: str, act_bits: int, data: st.DataObject) -> None:
    """With scales that are powers of two every product is exact: y is that row of W to the bit."""
    shape = Shape(100, 40, 7)
    weight = data.draw(weights(shape, dtypes=(torch.float32,), scale_kinds=("positive",)))
    s = torch.exp2(torch.floor(torch.log2(weight.s)))
    weight = replace(weight, s=s)
    # 127 is its own int8 value, as amax / 127 = 1.
    x = 127.0 * torch.eye(shape.k)
    rows_of_w = (weight.q.float() - weight.dense_z.repeat_interleave(shape.group, 0)[: shape.k]) * (
        s.repeat_interleave(shape.group, 0)[: shape.k]
    )
    with forced(row):
        for part in (x, x[:3], x[7:8]):
            y = mm(part, packed(weight), None, act_bits)
            assert torch.equal(y, 127 * rows_of_w[part.argmax(1)])


@compiled_rows
def test_one_long_group_is_exact(row: str, act_bits: int) -> None:
    """group_size -1 with many rows: int8 sums beyond 2^24 stay exact, fp32 sums stay within their bound."""
    shape = Shape(28672, 16, 28672)
    torch.manual_seed(5)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    q[:, 0], z = 15, torch.zeros(1, shape.n, dtype=torch.uint8)
    s = torch.full((1, shape.n), 2.0**-10)
    x = torch.full((3, shape.k), 127.0)
    x[1] = torch.randn(shape.k)
    x[2] = -x[2]
    with forced(row), poisoned_memory():
        for repeat in (1, 7):
            y = mm(x.repeat(repeat, 1), packed(RawWeight(shape, q, z, s, "long")), None, act_bits)
            expected(x.repeat(repeat, 1), q, z, s, shape.group, act_bits=act_bits).check(y)
            if act_bits == 8:
                assert same(y, w4a8_bits(x.repeat(repeat, 1), q, z, s, shape.group))


@compiled_rows
@settings(max_examples=4)
@given(seed=SEEDS)
def test_two_runs_give_the_same_bits(row: str, act_bits: int, seed: int) -> None:
    shape = Shape(576, 192, 32)
    torch.manual_seed(seed)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    weight = packed(RawWeight(shape, q, None, torch.rand(shape.groups, shape.n).bfloat16(), "twice"))
    with forced(row):
        for m in (1, 5, 33, 150):
            x = torch.randn(m, shape.k, dtype=torch.bfloat16)
            first = mm(x, weight, None, act_bits)
            for _ in range(5):
                assert torch.equal(mm(x, weight, None, act_bits), first)


@rows
def test_a_row_of_zeros_gives_the_bias(row: str, act_bits: int) -> None:
    shape = Shape(131, 33, 64)
    torch.manual_seed(1)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    bias = torch.randn(shape.n)
    with forced(row):
        for m in (1, 12):
            weight = packed(RawWeight(shape, q, None, torch.randn(shape.groups, shape.n), "zeros"))
            y = mm(torch.zeros(m, shape.k), weight, bias, act_bits)
            assert torch.equal(y, bias.expand(m, -1))


@rows
def test_a_bad_row_spoils_no_other(row: str, act_bits: int) -> None:
    """NaN and infinity stay in their rows, in decode and in prefill."""
    shape = Shape(264, 72, 128)
    torch.manual_seed(2)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    weight = packed(RawWeight(shape, q, None, torch.randn(shape.groups, shape.n), "bad row"))
    with forced(row):
        for m in (2, 8, 40):
            x = torch.randn(m, shape.k)
            clean = mm(x, weight, None, act_bits)
            bad = x.clone()
            bad[1, 200], bad[0, 3] = float("nan"), float("inf")
            y = mm(bad, weight, None, act_bits)
            assert not y[:2].isfinite().any() or act_bits == 16
            assert y[1].isnan().all()
            assert torch.equal(y[2:], clean[2:])


@int8_rows
def test_flush_to_zero_in_some_threads_changes_nothing(row: str) -> None:
    """torch.set_flush_denormal sets one thread's mode, and any thread may run any job."""
    torch.manual_seed(3)
    shape = Shape(264, 72, 128)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    s = torch.randn(shape.groups, shape.n) * 2.0**-126
    x = torch.randn(40, shape.k) * 2.0**-4
    weight = packed(RawWeight(shape, q, None, s, "subnormal results"))
    wanted = w4a8_bits(x, q, None, s, shape.group)
    assert (wanted.abs() < 2.0**-126).any() and wanted.any()
    with forced(row), threads(2):
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU has no such mode")
        try:
            results = [mm(x[:m], weight, None, 8) for m in (1, 5, 40) for _ in range(5)]
            flushed = torch.tensor([2.0**-140]) * torch.tensor([1.0])
        finally:
            torch.set_flush_denormal(False)
        assert flushed.item() == 0, "a kernel has changed the caller's mode"
        assert all(same(y, wanted[: y.shape[0]]) for y in results)


@compiled_rows
@pytest.mark.parametrize("name", ["x", "weight", "scales", "zeros", "bias"])
def test_freed_memory_is_refused(row: str, act_bits: int, name: str) -> None:
    shape = Shape(32, 16, 32)
    q, z = (torch.full(size, 3, dtype=torch.uint8) for size in ((shape.k, shape.n), (1, shape.n)))
    weight = packed(RawWeight(shape, q, z, torch.ones(1, shape.n), "freed"))
    tensors = {"x": torch.ones(2, shape.k), "bias": torch.ones(shape.n)}
    tensors |= {part: getattr(weight, part) for part in ("weight", "scales", "zeros")}
    with forced(row):
        mm(tensors["x"], weight, tensors["bias"], act_bits)
        tensors[name].untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match=f"^{name}: got a tensor whose storage has been freed"):
            mm(tensors["x"], weight, tensors["bias"], act_bits)
