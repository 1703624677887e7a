# SPDX-License-Identifier: Apache-2.0
"""Rounding to int4: what a step may cost, and that the search never makes it worse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awqjit.errors import ArgumentError
from awqjit.quantize import quantize_weight, round_trip


def random_weight(n: int, k: int, seed: int, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale


def squared_error(weight: torch.Tensor, **options: object) -> float:
    rounded = quantize_weight(weight, **options)  # type: ignore[arg-type]
    return float((rounded.dequantize(torch.float64).T - weight.double()).square().sum())


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 20),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([1, 8, 32, 128]),
    symmetric=st.booleans(),
    scale=st.sampled_from([1e-5, 0.02, 1.0, 3e4]),
)
def test_the_search_never_raises_the_error(
    seed: int, n: int, groups: int, group_size: int, symmetric: bool, scale: float
) -> None:
    weight = random_weight(n, groups * group_size, seed, scale)
    searched = squared_error(weight, group_size=group_size, symmetric=symmetric)
    plain = squared_error(weight, group_size=group_size, symmetric=symmetric, clip_search=False)
    assert searched <= plain * (1 + 1e-5)


def test_the_search_lowers_the_error_of_normal_weights() -> None:
    weight = random_weight(64, 512, 0)
    assert squared_error(weight, group_size=32) < 0.92 * squared_error(weight, group_size=32, clip_search=False)


def test_without_the_search_no_weight_moves_more_than_a_step() -> None:
    weight = random_weight(16, 256, 1)
    rounded = quantize_weight(weight, group_size=64, clip_search=False)
    moved = (rounded.dequantize(torch.float64).T - weight).abs().reshape(16, 4, 64).amax(2)
    # Half a step for the rounding, up to another half at the ends, for the zero point is rounded too.
    assert bool((moved <= rounded.scales.T * 1.01).all())


def test_weights_on_the_grid_are_kept_exactly() -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randint(0, 16, (8, 4, 32), generator=generator)
    q[..., 0], q[..., 1] = 0, 15  # the whole range is in use
    zeros = torch.randint(1, 15, (8, 4, 1), generator=generator)
    steps = torch.rand(8, 4, 1, generator=generator).add(0.5).half().float()
    weight = ((q - zeros) * steps).reshape(8, 128)
    torch.testing.assert_close(quantize_weight(weight, group_size=32).dequantize().T, weight, rtol=0, atol=0)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_group_of_zeros_stays_zero(symmetric: bool) -> None:
    weight = random_weight(8, 64, 3)
    weight[2, 32:] = 0
    assert not quantize_weight(weight, group_size=32, symmetric=symmetric).dequantize().T[2, 32:].any()


def test_the_result_has_the_promised_form() -> None:
    rounded = quantize_weight(random_weight(24, 96, 4).to(torch.bfloat16), group_size=-1)
    assert (rounded.in_features, rounded.out_features, rounded.group_size) == (96, 24, 96)
    assert rounded.scales.dtype == torch.float16
    assert bool((rounded.scales > 0).all())
    assert quantize_weight(random_weight(24, 96, 4), group_size=32, symmetric=True).zeros is None


def with_value(value: float) -> torch.Tensor:
    weight = random_weight(8, 64, 5)
    weight[3, 7] = value
    return weight


@pytest.mark.parametrize(
    ("weight", "group_size", "message"),
    [
        (with_value(float("nan")), 32, "NaN or infinity"),
        (with_value(float("-inf")), 32, "NaN or infinity"),
        (with_value(1e30), 32, "fits fp16"),
        (with_value(0.0), 48, "a divisor of in_features=64"),
        (with_value(0.0), 0, "a divisor of in_features=64"),
        (with_value(0.0).to(torch.int32), 32, "a floating tensor"),
        (with_value(0.0).flatten(), 32, "a floating tensor"),
    ],
)
def test_what_cannot_be_rounded_is_refused(weight: torch.Tensor, group_size: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        quantize_weight(weight, group_size=group_size)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("factor", [3e5, 1e6, 1e-8])
def test_weights_beyond_the_range_of_fp16_scales_are_refused(symmetric: bool, factor: float) -> None:
    weight = random_weight(16, 64, 1, scale=1.0) * factor
    if factor == 3e5:
        weight[:, 0] = 1.2e6  # the full range is out of reach, though a small part of it is not
    with pytest.raises(ArgumentError, match=r"scales? fits? fp16"):
        quantize_weight(weight, group_size=32, symmetric=symmetric)


def test_a_group_of_tiny_values_beside_normal_ones_becomes_zero_and_harms_nothing() -> None:
    weight = random_weight(8, 64, 2)
    weight[:, :32] = 1e-12
    rounded = quantize_weight(weight, group_size=32).dequantize().T
    assert float((rounded - weight)[:, :32].abs().max()) < 1e-6
    assert float((rounded - weight).abs().max()) < 0.01


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([5, 100]),  # fewer than a group's columns, and more
    group_size=st.sampled_from([16, 32, -1]),
    symmetric=st.booleans(),
)
def test_the_search_with_inputs_never_raises_the_error_that_it_lowers(
    seed: int, tokens: int, group_size: int, symmetric: bool
) -> None:
    weight = random_weight(6, 96, seed)
    inputs = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(seed))
    inputs[:, ::7] *= 20

    def errors(**options: object) -> torch.Tensor:
        """Of each group on its own, in float64: its part of the outputs, and a hundredth of the weights'."""
        rounded = quantize_weight(weight, group_size=group_size, symmetric=symmetric, **options)  # type: ignore[arg-type]
        group = rounded.group_size
        deltas = (rounded.dequantize(torch.float64).T - weight.double()).reshape(6, -1, group)
        columns = inputs.double().reshape(tokens, -1, group)
        mean_square = columns.square().sum((0, 2)) / group
        outputs = torch.einsum("njg,tjg->tnj", deltas, columns).square().sum(0)
        return outputs / mean_square + 0.01 * deltas.square().sum(2)

    plain = errors(clip_search=False)
    assert bool((errors(inputs=inputs) <= plain * (1 + 1e-4) + 1e-12).all())


def test_inputs_decide_which_weights_are_kept_best() -> None:
    weight = random_weight(32, 64, 7)
    weight[:, 9] = 0.3  # far from the rest: keeping it makes all others coarse
    inputs = torch.randn(200, 64, generator=torch.Generator().manual_seed(8))
    for size, kept in ((100.0, True), (0.0, False)):
        inputs[:, 9] *= size
        rounded = quantize_weight(weight, group_size=64, inputs=inputs).dequantize().T
        moved = float((rounded - weight)[:, 9].abs().mean())
        assert (moved < 0.02) == kept


def test_zero_points_start_at_the_lowest_that_is_allowed() -> None:
    weight = random_weight(16, 64, 9).abs()  # 0 would be the zero point of every group
    assert not quantize_weight(weight, group_size=32).zeros.any()  # type: ignore[union-attr]
    rounded = quantize_weight(weight, group_size=32, lowest_zero=1)
    assert bool((rounded.zeros == 1).all())  # type: ignore[union-attr]
    assert float((rounded.dequantize().T - weight).abs().max()) < float(weight.max()) / 14 * 0.9


@pytest.mark.parametrize("inputs", [torch.zeros(3, 63), torch.zeros(64), torch.full((3, 64), float("nan"))])
def test_inputs_that_do_not_fit_are_refused(inputs: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="inputs: got"):
        quantize_weight(random_weight(8, 64, 0), group_size=32, inputs=inputs)


@pytest.mark.parametrize(("group_size", "symmetric"), [(32, False), (-1, False), (32, True)])
def test_the_round_trip_is_plain_rounding(group_size: int, symmetric: bool) -> None:
    weight = random_weight(24, 96, 10)
    plain = quantize_weight(weight, group_size=group_size, symmetric=symmetric, clip_search=False)
    torch.testing.assert_close(
        round_trip(weight, group_size=group_size, symmetric=symmetric), plain.dequantize().T, rtol=1e-6, atol=0
    )
