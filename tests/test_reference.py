# SPDX-License-Identifier: Apache-2.0
"""The reference in plain torch against the float64 oracle, and against the rules that need no oracle."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expected, fma, w4a8_bits
from strategies import DTYPES, RawWeight, Shape, activations, biases, weights
from torch import Tensor

from awqjit.errors import ArgumentError
from awqjit.reference import int4_mm
from awqjit.weight import QuantizedWeight, pack_nibbles

ACT_BITS = (16, 8)


def small_weight(k: int = 64, n: int = 8, group: int = 32, seed: int = 0) -> RawWeight:
    torch.manual_seed(seed)
    groups = -(-k // group)
    return RawWeight(
        Shape(k, n, group),
        q=torch.randint(0, 16, (k, n), dtype=torch.uint8),
        z=torch.randint(0, 16, (groups, n), dtype=torch.uint8),
        s=torch.randn(groups, n) * 0.01,
        name="small",
    )


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(ACT_BITS))
def test_agrees_with_the_oracle(data: st.DataObject, act_bits: int) -> None:
    raw = data.draw(weights())
    x = data.draw(activations(raw.shape.k))
    bias = data.draw(biases(raw.shape.n))
    y = int4_mm(x, raw.quantized(), bias, act_bits)
    assert y.shape == (*x.shape[:-1], raw.shape.n)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    expected(x, raw.q, raw.z, raw.s, raw.shape.group, bias=bias, act_bits=act_bits).check(y)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_w4a8_is_bit_for_bit_the_definition_with_the_last_line_unfused(data: st.DataObject) -> None:
    raw = data.draw(weights())
    x = data.draw(activations(raw.shape.k))
    bias = data.draw(biases(raw.shape.n))
    got = int4_mm(x, raw.quantized(), bias, 8).reshape(-1, raw.shape.n)
    want = w4a8_bits(x, raw.q, raw.z, raw.s, raw.shape.group, bias=bias, fused=False)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_w4a8_divides_where_a_product_with_a_reciprocal_would_differ() -> None:
    raw = small_weight(k=64, n=4, group=8)
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))  # 4,000 groups: 1 in 20 would differ
    want = w4a8_bits(x, raw.q, raw.z, raw.s, 8, fused=False)
    assert torch.equal(int4_mm(x, raw.quantized(), None, 8), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_one_hot_row_reads_one_row_of_the_weight(dtype: torch.dtype) -> None:
    raw = small_weight(k=100, n=5, group=7)
    eye = torch.eye(100, dtype=dtype)
    assert torch.equal(int4_mm(eye, raw.quantized()), raw.quantized().dequantize().to(dtype))


@pytest.mark.parametrize("act_bits", ACT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_give_exactly_the_bias(dtype: torch.dtype, act_bits: int) -> None:
    raw = small_weight()
    bias = torch.randn(8)
    y = int4_mm(torch.zeros(3, 64, dtype=dtype), raw.quantized(), bias, act_bits)
    assert torch.equal(y, bias.to(dtype).expand(3, 8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_w4a8_makes_a_row_with_a_non_finite_value_nan_and_leaves_the_others(dtype: torch.dtype, value: float) -> None:
    raw = small_weight()
    x = torch.randn(4, 64).to(dtype)
    clean = int4_mm(x, raw.quantized(), None, 8)
    x[2, 40] = value
    y = int4_mm(x, raw.quantized(), None, 8)
    assert bool(y[2].isnan().all())
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


def test_w4a8_is_exact_on_int8_values() -> None:
    raw = small_weight(k=256, n=16, group=64)
    x = torch.randint(-127, 128, (5, 256)).float()
    x[:, ::64] = 127.0  # amax 127 in every group: d = 1
    assert torch.equal(int4_mm(x, raw.quantized(), None, 8), w4a8_bits_unit_scale(x, raw))


def w4a8_bits_unit_scale(x: Tensor, raw: RawWeight) -> Tensor:
    """With d = 1 each group adds an integer times s: one fp32 product and one fp32 add."""
    y = torch.zeros(x.shape[0], raw.shape.n)
    assert raw.z is not None
    for g in range(raw.shape.groups):
        rows = slice(64 * g, 64 * g + 64)
        y += (x[:, rows].long() @ (raw.q[rows].long() - raw.z[g].long())).float() * raw.s[g]
    return y


@pytest.mark.parametrize("exponent, counts", [(-119, True), (-120, False)])
def test_w4a8_takes_a_group_below_two_to_minus_119_for_zero(exponent: int, counts: bool) -> None:
    weight = QuantizedWeight(pack_nibbles(torch.full((8, 1), 15, dtype=torch.uint8)), torch.ones(1, 1), None, 8, 8, 1)
    y = int4_mm(torch.full((1, 8), 2.0**exponent), weight, None, 8)
    assert bool(y != 0) is counts


def test_w4a8_dot_products_are_exact_over_the_longest_groups() -> None:
    k = 20000  # 127 * 15 * 20000 is beyond 2^24: sums in fp32 would lose bits
    q = torch.full((k, 1), 15, dtype=torch.uint8)
    weight = QuantizedWeight(pack_nibbles(q), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8), k, k, 1)
    x = torch.full((1, k), 127.0)
    x[0, :2] = torch.tensor([126.0, 1.0])
    assert float(int4_mm(x, weight, None, 8)) == float(torch.tensor(15 * (127 * k - 127)).float())


@pytest.mark.parametrize("act_bits", ACT_BITS)
def test_act_order_gives_what_the_sorted_weight_gives(act_bits: int) -> None:
    raw = small_weight(k=96, n=24, group=32)
    perm = torch.randperm(96)
    g_idx = torch.empty(96, dtype=torch.int32)
    g_idx[perm] = torch.arange(96, dtype=torch.int32) // 32
    q = torch.empty_like(raw.q)
    q[perm] = raw.q
    shuffled = QuantizedWeight(pack_nibbles(q), raw.s, raw.z, 32, 96, 24, g_idx)
    x = torch.randint(-8, 9, (4, 96)).float()  # integers: the order of a sum changes nothing
    x_shuffled = torch.empty_like(x)
    x_shuffled[:, perm] = x
    assert torch.equal(int4_mm(x_shuffled, shuffled, None, act_bits), int4_mm(x, raw.quantized(), None, act_bits))


def test_no_setting_of_torch_lowers_the_precision() -> None:
    raw = small_weight(k=512, n=32, group=128)
    x = torch.randn(33, 512)
    before = torch.get_float32_matmul_precision()
    exact = int4_mm(x, raw.quantized())
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(int4_mm(x, raw.quantized()), exact)
    finally:
        torch.set_float32_matmul_precision(before)


def test_inputs_are_not_modified() -> None:
    raw, x, bias = small_weight(), torch.randn(3, 64), torch.randn(8)
    copies = (x.clone(), bias.clone())
    for act_bits in ACT_BITS:
        int4_mm(x, raw.quantized(), bias, act_bits)
    assert torch.equal(x, copies[0])
    assert torch.equal(bias, copies[1])


@pytest.mark.parametrize(
    "change, argument",
    [
        ({"x": torch.randn(2, 63)}, "x"),
        ({"x": torch.randn(2, 64, dtype=torch.float64)}, "x"),
        ({"x": torch.tensor(1.0)}, "x"),
        ({"x": torch.randn(2, 64, device="meta")}, "x"),
        ({"bias": torch.randn(9)}, "bias"),
        ({"bias": torch.randint(0, 2, (8,))}, "bias"),
        ({"act_bits": 4}, "act_bits"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], argument: str) -> None:
    arguments: dict[str, object] = {"x": torch.randn(2, 64), "weight": small_weight().quantized()}
    with pytest.raises(ArgumentError, match=rf"^{argument}: got .*wanted"):
        int4_mm(**(arguments | change))  # type: ignore[arg-type]


class TestTheOracleItself:
    """An oracle that accepts anything proves nothing: it must refuse results that are slightly wrong."""

    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def test_the_exact_w4a8_definition_is_inside_its_bounds(self, data: st.DataObject) -> None:
        raw = data.draw(weights())
        x = data.draw(activations(raw.shape.k))
        bias = data.draw(biases(raw.shape.n))
        y = w4a8_bits(x, raw.q, raw.z, raw.s, raw.shape.group, bias=bias)
        expected(x, raw.q, raw.z, raw.s, raw.shape.group, bias=bias, act_bits=8).check(y)

    @pytest.mark.parametrize("act_bits", ACT_BITS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_it_refuses_a_weight_that_is_off_by_one(self, dtype: torch.dtype, act_bits: int) -> None:
        raw = small_weight(k=512, n=16, group=128)
        x = torch.randn(6, 512).to(dtype)
        wrong = raw.q.clone()
        wrong[3] = (wrong[3] + 1) % 16
        y = int4_mm(x, RawWeight(raw.shape, wrong, raw.z, raw.s, "wrong").quantized(), None, act_bits)
        with pytest.raises(AssertionError, match="out of bounds"):
            expected(x, raw.q, raw.z, raw.s, 128, act_bits=act_bits).check(y)

    def test_it_tells_the_two_modes_apart(self) -> None:
        raw = small_weight(k=512, n=16, group=128)
        x = torch.randn(6, 512)
        for given_bits, judged_bits in ((16, 8), (8, 16)):
            y = int4_mm(x, raw.quantized(), None, given_bits)
            with pytest.raises(AssertionError, match="out of bounds"):
                expected(x, raw.q, raw.z, raw.s, 128, act_bits=judged_bits).check(y)

    def test_it_refuses_a_finite_number_for_nan(self) -> None:
        raw, x = small_weight(), torch.randn(2, 64)
        x[1, 0] = torch.nan
        y = int4_mm(x, raw.quantized(), None, 8)
        y[1] = 0.0
        with pytest.raises(AssertionError, match="out of bounds"):
            expected(x, raw.q, raw.z, raw.s, 32, act_bits=8).check(y)

    def test_it_refuses_one_ulp_more_than_its_bound_in_bf16(self) -> None:
        raw = small_weight()
        x = torch.randint(-8, 9, (4, 64)).bfloat16()
        y = int4_mm(x, raw.quantized())
        oracle = expected(x, raw.q, raw.z, raw.s, 32)
        oracle.check(y)
        two_up = (y.view(torch.int16) + 2).view(torch.bfloat16)
        with pytest.raises(AssertionError, match="out of bounds"):
            oracle.check(two_up)

    def test_its_fused_multiply_add_rounds_once(self) -> None:
        rng = np.random.default_rng(3)
        a, b = (rng.standard_normal(3000).astype(np.float32) for _ in range(2))
        c = (-a * b * (1 + rng.choice([0, 1e-7, 1e-3, 1.0], 3000))).astype(np.float32)
        for x, y, z, got in zip(a, b, c, fma(a, b, c), strict=True):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            beside = [got, np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))]
            errors = [abs(Fraction(float(value)) - exact) for value in beside]
            assert errors[0] == min(errors)
