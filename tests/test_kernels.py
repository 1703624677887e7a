# SPDX-License-Identifier: Apache-2.0
"""Every kernel row, forced in turn, from gcc and from clang, against the float64 oracle and the definition's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import compilers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expected, w4a8_bits
from rows import ALL, BUILT, CASES, NUMBA, Case, forced, mm, packed, poisoned_memory, threads
from strategies import SEEDS, ZERO_KINDS, RawWeight, Shape, activations, biases, weights

from awqjit import jit, launch, toolchain
from awqjit.errors import ArgumentError

EXAMPLES = 12

# The compiler is a fixture's parameter: tests ask for `built` to have their row, forced, from that compiler.
rows = pytest.mark.parametrize(("row", "act_bits", "kind"), ALL, ids=str)
compiled_rows = pytest.mark.parametrize(("row", "act_bits", "kind"), BUILT, ids=str)
INT8 = tuple((row, kind) for row, act_bits, kind in (*BUILT, *NUMBA) if act_bits == 8)
int8_rows = pytest.mark.parametrize(("row", "kind"), INT8, ids=str)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="session")
def compilers_here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return compilers.by_kind(tmp_path_factory.mktemp("compilers"))


@pytest.fixture
def built(row: str, kind: str, compilers_here: dict[str, str]) -> Iterator[None]:
    """Nothing but the test's row runs, built by its compiler."""
    if kind != "none" and kind not in compilers_here:
        pytest.skip(f"no {kind} here: install g++, clang++ or the package ziglang")
    with forced(row, compilers_here.get(kind)):
        assert kind == "none" or toolchain.find_compiler().kind == kind
        yield


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


@rows
@every_case
def test_a_row_matches_the_oracle(row: str, act_bits: int, kind: str, case: Case, built: None) -> None:
    with poisoned_memory():

        @settings(max_examples=EXAMPLES)
        @given(**drawn(case))
        def check(weight, x, bias):
            y = mm(x, packed(weight), bias, act_bits)
            assert y.dtype == x.dtype and y.is_contiguous() and y.shape == (*x.shape[:-1], case.shape.n)
            z = weight.z
            expected(x, weight.q, z, weight.s, case.shape.group, bias=bias, act_bits=act_bits).check(y)

        check()
        assert {choice.kernel.name for choice in jit.choices()} <= {row}


@int8_rows
@every_case
def test_a_w4a8_row_gives_the_bits_of_the_definition(row: str, kind: str, case: Case, built: None) -> None:
    """So all w4a8 rows agree bit for bit, for any number of rows and threads."""
    with poisoned_memory():

        @settings(max_examples=EXAMPLES)
        @given(count=st.integers(1, 4), **drawn(case))
        def check(weight, x, bias, count):
            with threads(count):
                y = mm(x, packed(weight), bias, 8)
            wanted = w4a8_bits(x, weight.q, weight.z, weight.s, case.shape.group, bias=bias)
            assert same(y.reshape(wanted.shape), wanted)

        check()


@int8_rows
@pytest.mark.parametrize("m", [*range(1, 20), 31, 64, 127, 128, 129, 200, 257, 300, 1000])
def test_w4a8_is_the_same_for_every_number_of_rows(row: str, kind: str, m: int, built: None) -> None:
    """Decode and prefill, whole and ragged tiles and chunks: each row of y is what it is alone."""
    torch.manual_seed(m)
    shape = Shape(264, 72, 128)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    z = torch.randint(0, 16, (shape.groups, shape.n), dtype=torch.uint8)
    s = torch.randn(shape.groups, shape.n, dtype=torch.float16) * 0.01
    x = torch.randn(m, shape.k, dtype=torch.bfloat16)
    wanted = w4a8_bits(x, q, z, s, shape.group)
    weight = packed(RawWeight(shape, q, z, s, "fixed"))
    with poisoned_memory():
        for count in (1, 2, 3):
            with threads(count):
                assert same(mm(x, weight, None, 8), wanted)


@rows
def test_a_one_hot_row_reads_one_row_of_the_weight(row: str, act_bits: int, kind: str, built: None) -> None:
    """With scales that are powers of two every product is exact: y is that row of W to the bit."""
    shape = Shape(100, 40, 7)

    @settings(max_examples=8)
    @given(weight=weights(shape, dtypes=(torch.float32,), scale_kinds=("positive",)))
    def check(weight):
        s = torch.exp2(torch.floor(torch.log2(weight.s)))
        weight = replace(weight, s=s)
        # 127 is its own int8 value, as amax / 127 = 1.
        x = 127.0 * torch.eye(shape.k)
        rows_of_w = (weight.q.float() - weight.dense_z.repeat_interleave(shape.group, 0)[: shape.k]) * (
            s.repeat_interleave(shape.group, 0)[: shape.k]
        )
        for part in (x, x[:3], x[7:8]):
            y = mm(part, packed(weight), None, act_bits)
            assert torch.equal(y, 127 * rows_of_w[part.argmax(1)])

    check()


@compiled_rows
def test_one_long_group_is_exact(row: str, act_bits: int, kind: str, built: None) -> None:
    """group_size -1 with many rows: int8 sums beyond 2^24 stay exact, fp32 sums stay within their bound."""
    shape = Shape(28672, 16, 28672)
    torch.manual_seed(5)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    q[:, 0], z = 15, torch.zeros(1, shape.n, dtype=torch.uint8)
    s = torch.full((1, shape.n), 2.0**-10)
    x = torch.full((3, shape.k), 127.0)
    x[1] = torch.randn(shape.k)
    x[2] = -x[2]
    with poisoned_memory():
        for repeat in (1, 7):
            y = mm(x.repeat(repeat, 1), packed(RawWeight(shape, q, z, s, "long")), None, act_bits)
            expected(x.repeat(repeat, 1), q, z, s, shape.group, act_bits=act_bits).check(y)
            if act_bits == 8:
                assert same(y, w4a8_bits(x.repeat(repeat, 1), q, z, s, shape.group))


@compiled_rows
def test_two_runs_give_the_same_bits(row: str, act_bits: int, kind: str, built: None) -> None:
    shape = Shape(576, 192, 32)

    @settings(max_examples=4)
    @given(seed=SEEDS)
    def check(seed):
        torch.manual_seed(seed)
        q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
        weight = packed(RawWeight(shape, q, None, torch.rand(shape.groups, shape.n).bfloat16(), "twice"))
        for m in (1, 5, 33, 150):
            x = torch.randn(m, shape.k, dtype=torch.bfloat16)
            first = mm(x, weight, None, act_bits)
            for _ in range(5):
                assert torch.equal(mm(x, weight, None, act_bits), first)

    check()


@rows
def test_a_row_of_zeros_gives_the_bias(row: str, act_bits: int, kind: str, built: None) -> None:
    shape = Shape(131, 33, 64)
    torch.manual_seed(1)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    bias = torch.randn(shape.n)
    for m in (1, 12):
        weight = packed(RawWeight(shape, q, None, torch.randn(shape.groups, shape.n), "zeros"))
        y = mm(torch.zeros(m, shape.k), weight, bias, act_bits)
        assert torch.equal(y, bias.expand(m, -1))


@rows
def test_a_bad_row_spoils_no_other(row: str, act_bits: int, kind: str, built: None) -> None:
    """NaN and infinity stay in their rows, in decode and in prefill."""
    shape = Shape(264, 72, 128)
    torch.manual_seed(2)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    weight = packed(RawWeight(shape, q, None, torch.randn(shape.groups, shape.n), "bad row"))
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
def test_flush_to_zero_in_some_threads_changes_nothing(row: str, kind: str, built: None) -> None:
    """torch.set_flush_denormal sets one thread's mode, and any thread may run any job."""
    torch.manual_seed(3)
    shape = Shape(264, 72, 128)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8)
    s = torch.randn(shape.groups, shape.n) * 2.0**-126
    x = torch.randn(40, shape.k) * 2.0**-4
    weight = packed(RawWeight(shape, q, None, s, "subnormal results"))
    wanted = w4a8_bits(x, q, None, s, shape.group)
    assert (wanted.abs() < 2.0**-126).any() and wanted.any()
    with threads(2):
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
@every_case
def test_nothing_beside_the_output_is_written(row: str, act_bits: int, kind: str, case: Case, built: None) -> None:
    """Nor beside the scratch memory. A store that is too wide is invisible where the next row is written over it."""
    shape, margin = case.shape, 256
    torch.manual_seed(4)
    q, z = (torch.randint(0, 16, size, dtype=torch.uint8) for size in ((shape.k, shape.n), (shape.groups, shape.n)))
    s = torch.randn(shape.groups, shape.n).to(case.scale_dtype)
    weight = packed(RawWeight(shape, q, None if case.symmetric else z, s, "margins"))
    bias = torch.randn(shape.n) if case.bias else None
    with threads(2):
        for m in (1, 2, 5, 40):
            x = torch.randn(m, shape.k).to(case.x_dtype)
            kept: list[torch.Tensor] = []

            def roomy(size, dtype, device, kept=kept):
                kept.append(
                    torch.full(
                        (
                            torch.Size(size if isinstance(size, tuple) else (size,)).numel() * dtype.itemsize
                            + 2 * margin,
                        ),
                        0x5A,
                        dtype=torch.uint8,
                    )
                )
                return kept[-1][margin:-margin].view(dtype).reshape(size)

            with mock.patch.object(launch.torch, "empty", roomy):
                mm(x, weight, bias, act_bits)
            assert len(kept) == 2  # the output and the scratch memory
            for memory in kept:
                assert (memory[:margin] == 0x5A).all() and (memory[-margin:] == 0x5A).all()


@compiled_rows
@pytest.mark.parametrize("name", ["x", "weight", "scales", "zeros", "bias"])
def test_freed_memory_is_refused(row: str, act_bits: int, kind: str, name: str, built: None) -> None:
    shape = Shape(32, 16, 32)
    q, z = (torch.full(size, 3, dtype=torch.uint8) for size in ((shape.k, shape.n), (1, shape.n)))
    weight = packed(RawWeight(shape, q, z, torch.ones(1, shape.n), "freed"))
    tensors = {"x": torch.ones(2, shape.k), "bias": torch.ones(shape.n)}
    tensors |= {part: getattr(weight, part) for part in ("weight", "scales", "zeros")}
    mm(tensors["x"], weight, tensors["bias"], act_bits)
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=f"^{name}: got a tensor whose storage has been freed"):
        mm(tensors["x"], weight, tensors["bias"], act_bits)
