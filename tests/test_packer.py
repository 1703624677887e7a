# SPDX-License-Identifier: Apache-2.0
"""The compiled packer gives the bits that packing in torch gives, whatever the form, the shape and the strides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SEEDS, RawWeight, Shape, shapes, weights

from awqjit import config, packer
from awqjit.errors import FormatError, LostScaleError
from awqjit.formats.awq import AwqWeight, standard_to_awq
from awqjit.layout import PackedWeight, unpack
from awqjit.packer import CompiledPacker, in_torch, packer_for
from awqjit.weight import QuantizedWeight

LARGE = packer.WORTH_COMPILING


@pytest.fixture(scope="module")
def compiled() -> CompiledPacker:
    found = packer_for(LARGE)
    if not isinstance(found, CompiledPacker):
        pytest.skip("no compiler")
    return found


def strided(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values in memory with other strides; what lies between them is poison."""
    if kind == "contiguous":
        return tensor.contiguous()
    if kind == "transposed":
        return tensor.t().contiguous().t()
    gaps = torch.full((2 * tensor.shape[0], 3 * tensor.shape[1]), 99).to(tensor.dtype)
    if tensor.is_floating_point():
        gaps.fill_(float("nan"))
    view = gaps[::2, ::3]
    view.copy_(tensor)
    return view


STRIDES = st.sampled_from(("contiguous", "transposed", "gaps"))


def same(one: PackedWeight, other: PackedWeight) -> bool:
    """Whether two packed weights are equal bit for bit."""
    for field in dataclasses.fields(PackedWeight):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            if left.dtype != right.dtype or not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
                return False
        elif left is not right and left != right:
            return False
    return True


def changed(weight: Any, **tensors: str) -> Any:
    """A weight whose tensors have other strides."""
    values = {name: getattr(weight, name) for name in tensors}
    return dataclasses.replace(
        weight, **{name: None if value is None else strided(value, tensors[name]) for name, value in values.items()}
    )


@given(raw=weights(), strides=st.tuples(STRIDES, STRIDES, STRIDES))
@settings(max_examples=150)
def test_canonical_weights_pack_as_in_torch(
    compiled: CompiledPacker, raw: RawWeight, strides: tuple[str, str, str]
) -> None:
    weight = changed(raw.quantized(), **dict(zip(("qweight", "scales", "zeros"), strides, strict=True)))
    packed = compiled(weight)
    assert same(packed, in_torch(raw.quantized()))
    assert torch.equal(unpack(packed).values(), raw.q)


@given(raw=weights(shapes(multiple_of_8=True)), strides=st.tuples(STRIDES, STRIDES, STRIDES))
@settings(max_examples=150)
def test_awq_weights_pack_straight_from_the_checkpoints_tensors(
    compiled: CompiledPacker, raw: RawWeight, strides: tuple[str, str, str]
) -> None:
    qweight, scales, qzeros = standard_to_awq(raw.quantized())
    stored = AwqWeight(qweight, scales, None if raw.z is None else qzeros, raw.shape.group)
    weight = changed(stored, **dict(zip(("qweight", "scales", "qzeros"), strides, strict=True)))
    packed = compiled(weight)
    assert same(packed, in_torch(stored))
    assert torch.equal(unpack(packed).values(), raw.q)


@pytest.mark.parametrize("shape", [Shape(100, 40, 7), Shape(131, 48, 64), Shape(13, 8, 13), Shape(264, 1032, 128)])
def test_awq_rows_and_columns_that_fill_no_words_and_tiles(compiled: CompiledPacker, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(shape.k)

    def words(rows: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (rows, shape.n // 8), generator=generator).to(torch.int32)

    scales = torch.randn(shape.groups, shape.n, generator=generator).half()
    weight = AwqWeight(words(shape.k), scales, words(shape.groups), shape.group)
    assert same(compiled(weight), in_torch(weight))


@given(raw=weights(shapes().filter(lambda shape: shape.k % shape.group == 0)), seed=SEEDS)
@settings(max_examples=60)
def test_act_order_packs_as_in_torch(compiled: CompiledPacker, raw: RawWeight, seed: int) -> None:
    order = torch.randperm(raw.shape.k, generator=torch.Generator().manual_seed(seed))
    weight = dataclasses.replace(raw.quantized(), g_idx=(order // raw.shape.group).to(torch.int32))
    assert same(compiled(weight), in_torch(weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("column", [0, 23])
def test_a_scale_that_is_no_number_is_refused_by_both(
    compiled: CompiledPacker, value: float, dtype: torch.dtype, column: int
) -> None:
    scales = torch.full((2, 24), torch.finfo(dtype).max, dtype=dtype)
    weight = QuantizedWeight(torch.zeros(8, 24, dtype=torch.int32), scales, None, 32, 64, 24)
    assert same(compiled(weight), in_torch(weight))  # the largest number is one
    scales[1, column] = value
    for pack in (compiled, in_torch):
        with pytest.raises(LostScaleError, match="NaN or infinite"):
            pack(weight)


def test_unequal_groups_are_refused_by_both(compiled: CompiledPacker) -> None:
    g_idx = torch.zeros(64, dtype=torch.int32)
    g_idx[:8] = 1
    weight = QuantizedWeight(torch.zeros(8, 16, dtype=torch.int32), torch.ones(2, 16), None, 32, 64, 16, g_idx)
    for pack in (compiled, in_torch):
        with pytest.raises(FormatError, match="equal size"):
            pack(weight)


def test_small_models_and_machines_that_may_not_compile_pack_in_torch(tmp_path: Path) -> None:
    assert packer_for(LARGE - 1) is in_torch
    with config.override(cache_dir=str(tmp_path), cache_path=None, jit="0"):
        assert packer_for(LARGE) is in_torch
