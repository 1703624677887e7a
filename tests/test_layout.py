# SPDX-License-Identifier: Apache-2.0
"""The packed layout: where each weight, scale and zero point lands, and the way back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, SHAPES, RawWeight, Shape, shapes, weights
from torch import Tensor

from awqjit.errors import ArgumentError, FormatError
from awqjit.layout import LAYOUT_CPU, PackedWeight, pack, packed_rows, padded_group_rows, unpack
from awqjit.weight import QuantizedWeight, pack_nibbles

NIBBLE_OF_ROW = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}
"""Where row k % 8 of a word stands, written down from the drawing, not from the code."""


def packed_row(shape: Shape, k: int) -> int:
    """The packed row of row k, counted by hand: whole words for each group before it."""
    row = 0
    for _ in range(k // shape.group):
        row += shape.group + -shape.group % 8
    return row + k % shape.group


def read(packed: PackedWeight, shape: Shape, k: int, n: int) -> int:
    row = packed_row(shape, k)
    word = int(packed.weight[n // 16, row // 8, n % 16]) % 2**32
    return word >> (4 * NIBBLE_OF_ROW[row % 8]) & 15


@settings(max_examples=40, deadline=None)
@given(weights())
def test_unpack_inverts_pack(raw: RawWeight) -> None:
    weight = raw.quantized()
    packed = pack(weight)
    back = unpack(packed)
    assert torch.equal(back.values(), raw.q)
    assert torch.equal(back.qweight, weight.qweight)
    assert torch.equal(back.scales, raw.s)
    assert back.scales.dtype == raw.s.dtype
    if raw.z is None:
        assert back.zeros is None
    else:
        assert back.zeros is not None
        assert torch.equal(back.zeros, raw.z)
    assert back.g_idx is None and packed.perm is None
    assert packed.layout == LAYOUT_CPU == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_hot_weights_land_on_their_nibble(shape: Shape) -> None:
    torch.manual_seed(1)
    s = torch.ones(shape.groups, shape.n)
    for k in {0, 1, 2, 3, 4, 5, 6, 7, shape.group - 1, shape.k // 2, shape.k - 1}:
        n = int(torch.randint(shape.n, (1,)))
        q = torch.zeros(shape.k, shape.n, dtype=torch.uint8)
        q[k, n] = 15
        packed = pack(QuantizedWeight(pack_nibbles(q), s, None, shape.group, shape.k, shape.n))
        row = packed_row(shape, k)
        want = torch.zeros_like(packed.weight)
        value = 15 << (4 * NIBBLE_OF_ROW[row % 8])
        want[n // 16, row // 8, n % 16] = value - 2**32 if value >= 2**31 else value
        assert torch.equal(packed.weight, want), (k, n)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_weight_scale_and_zero_point_is_where_the_drawing_says(data: st.DataObject) -> None:
    raw = data.draw(weights(data.draw(shapes())))
    shape, packed = raw.shape, pack(raw.quantized())
    blocks = -(-shape.n // 16)
    rows = sum(size + -size % 8 for size in group_sizes(shape))
    assert packed.weight.shape == (blocks, rows // 8, 16)
    assert packed.scales.shape == (blocks, shape.groups, 16)
    for k in range(0, shape.k, 1 + shape.k // 40):
        for n in range(0, shape.n, 1 + shape.n // 20):
            assert read(packed, shape, k, n) == int(raw.q[k, n])
    for n in range(shape.n):
        assert torch.equal(packed.scales[n // 16, :, n % 16], raw.s[:, n])
        if raw.z is not None:
            assert packed.zeros is not None
            assert torch.equal(packed.zeros[n // 16, :, n % 16], raw.z[:, n])
    assert not bool(packed.scales[-1, :, (shape.n - 1) % 16 + 1 :].any())  # padding columns weigh nothing


def group_sizes(shape: Shape) -> list[int]:
    return [min(shape.group, shape.k - start) for start in range(0, shape.k, shape.group)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_rows_counts_whole_words_for_each_group(shape: Shape) -> None:
    assert packed_rows(shape.k, shape.group) == sum(size + -size % 8 for size in group_sizes(shape))
    assert padded_group_rows(shape.k, shape.group) == shape.group + -shape.group % 8


@pytest.mark.parametrize("group", [3, 11, 8])
def test_padding_holds_zero_whatever_the_checkpoint_holds_there(group: int) -> None:
    words = torch.full((2, 3), -1, dtype=torch.int32)  # 11 rows of 15, and 5 nibbles of nothing
    packed = pack(QuantizedWeight(words, torch.ones(-(-11 // group), 3), None, group, 11, 3))
    nibbles = torch.stack([(packed.weight >> (4 * i)) & 15 for i in range(8)])
    assert set(nibbles.unique().tolist()) == {0, 15}
    assert int((nibbles == 15).sum()) == 11 * 3
    assert int(words.min()) == -1  # the source is not touched


@settings(max_examples=25, deadline=None)
@given(raw=weights(), seed=st.integers(0, 2**32 - 1))
def test_act_order_is_sorted_once_and_perm_says_how(raw: RawWeight, seed: int) -> None:
    shape = raw.shape
    perm = torch.randperm(shape.k, generator=torch.Generator().manual_seed(seed))
    g_idx = (torch.arange(shape.k, dtype=torch.int32) // shape.group)[perm]
    weight = dataclasses.replace(raw.quantized(), g_idx=g_idx)
    packed = pack(weight)
    back = unpack(packed)
    assert torch.equal(back.values(), raw.q)
    assert torch.equal(back.row_groups(), weight.row_groups())
    if packed.perm is None:
        assert weight.in_group_order()
    else:
        order = packed.perm.long()
        assert packed.perm.dtype == torch.int32
        assert torch.equal(g_idx[order], torch.arange(shape.k, dtype=torch.int32) // shape.group)
        assert all(
            a < b for a, b, g, h in zip(order, order[1:], g_idx[order], g_idx[order][1:], strict=False) if g == h
        )
        for j in range(0, shape.k, 1 + shape.k // 40):
            assert read(packed, shape, j, 0) == int(raw.q[order[j], 0])


def test_groups_of_unequal_size_are_refused() -> None:
    g_idx = torch.tensor([0] * 10 + [1] * 6, dtype=torch.int32)
    weight = QuantizedWeight(torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), None, 8, 16, 1, g_idx)
    with pytest.raises(FormatError, match="g_idx puts 6 or 10 rows into a group, where group_size is 8"):
        pack(weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_scale_changes_a_bit(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)  # every 16-bit number, NaNs included
    s = patterns.view(torch.float16 if dtype == torch.float16 else torch.bfloat16).reshape(-1, 16).to(dtype)
    g = s.shape[0]
    packed = pack(QuantizedWeight(torch.zeros(g, 16, dtype=torch.int32), s, None, 8, 8 * g, 16))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(packed.scales[0].view(bits), s.view(bits))


def test_results_are_contiguous_and_share_no_memory_with_the_source() -> None:
    raw = RawWeight(Shape(64, 16, 32), *small(64, 16, 2), "small")
    weight = raw.quantized()
    packed = pack(weight)
    assert packed.zeros is not None and packed.weight.is_contiguous() and packed.scales.is_contiguous()
    before = packed.weight.clone()
    back = unpack(packed)
    assert torch.equal(packed.weight, before)
    owners = [t.untyped_storage().data_ptr() for t in (weight.qweight, weight.scales, packed.weight, packed.scales)]
    owners += [back.qweight.untyped_storage().data_ptr(), back.scales.untyped_storage().data_ptr()]
    assert len(set(owners)) == len(owners)


def small(k: int, n: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=generator),
        torch.randint(0, 16, (groups, n), dtype=torch.uint8, generator=generator),
        torch.randn(groups, n, generator=generator),
    )


def test_strided_sources_pack_as_contiguous_ones() -> None:
    raw = RawWeight(Shape(64, 16, 32), *small(64, 16, 2), "small")
    weight = raw.quantized()
    strided = dataclasses.replace(
        weight, qweight=weight.qweight.t().contiguous().t(), scales=weight.scales.t().clone().t()
    )
    assert torch.equal(pack(strided).weight, pack(weight).weight)
    assert torch.equal(pack(strided).scales, pack(weight).scales)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("layout", 3),
        ("in_features", 0),
        ("out_features", 0),
        ("group_size", 65),
        ("weight", torch.zeros(1, 8, 15, dtype=torch.int32)),
        ("weight", torch.zeros(1, 8, 16, dtype=torch.int64)),
        ("weight", torch.zeros(1, 16, 8, dtype=torch.int32).transpose(1, 2)),
        ("scales", torch.zeros(1, 3, 16)),
        ("scales", torch.zeros(1, 2, 16, dtype=torch.float64)),
        ("scales", torch.zeros(1, 2, 16, device="meta")),
        ("zeros", torch.zeros(1, 2, 16, dtype=torch.int8)),
        ("perm", torch.zeros(63, dtype=torch.int32)),
        ("perm", torch.zeros(64, dtype=torch.int64)),
    ],
)
def test_a_malformed_packed_weight_names_the_argument(argument: str, value: object) -> None:
    good = pack(RawWeight(Shape(64, 16, 32), *small(64, 16, 2), "small").quantized())
    with pytest.raises(ArgumentError, match=rf"^{argument}: got .*wanted"):
        dataclasses.replace(good, **{argument: value})  # type: ignore[arg-type]
