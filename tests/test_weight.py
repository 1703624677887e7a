# SPDX-License-Identifier: Apache-2.0
"""The canonical weight: its words, its reference dequantization, and every way it can be malformed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packers import dequantize
from strategies import DTYPES, RawWeight, weights
from torch import Tensor

from awqjit.errors import ArgumentError
from awqjit.weight import QuantizedWeight, pack_nibbles, resolve_group_size, unpack_nibbles


def arguments(k: int = 40, n: int = 3, group: int = 16) -> dict[str, object]:
    groups = -(-k // group)
    return {
        "qweight": torch.zeros(-(-k // 8), n, dtype=torch.int32),
        "scales": torch.ones(groups, n),
        "zeros": torch.zeros(groups, n, dtype=torch.uint8),
        "group_size": group,
        "in_features": k,
        "out_features": n,
    }


def make(**change: object) -> QuantizedWeight:
    return QuantizedWeight(**(arguments() | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("row", range(8))
def test_nibble_i_of_a_word_is_row_i(row: int) -> None:
    values = torch.zeros(8, 1, dtype=torch.uint8)
    values[row] = 15
    word = int(pack_nibbles(values)) % 2**32
    assert word == 15 << (4 * row)  # row 7 fills the sign bit
    assert torch.equal(unpack_nibbles(pack_nibbles(values), 8), values)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_packing_words_and_unpacking_them_is_the_identity(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    words = pack_nibbles(values)
    assert words.shape == (-(-rows // 8), columns)
    assert torch.equal(unpack_nibbles(words, rows), values)


def test_words_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ArgumentError, match=r"^values: got a value of 16, wanted values 0 to 15"):
        pack_nibbles(torch.full((8, 1), 16, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match=r"^values: got torch\.int64"):
        pack_nibbles(torch.zeros(8, 1, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"^words: got torch\.int64"):
        unpack_nibbles(torch.zeros(1, 1, dtype=torch.int64), 8)
    with pytest.raises(ArgumentError, match=r"^words: got shape \[1, 1\], wanted shape \[2, 1\]"):
        unpack_nibbles(torch.zeros(1, 1, dtype=torch.int32), 9)


@settings(max_examples=25, deadline=None)
@given(weights())
def test_dequantize_is_q_minus_z_times_s_for_each_weight(raw: RawWeight) -> None:
    exact = dequantize(raw.q.numpy(), raw.dense_z.numpy(), raw.s.double().numpy(), raw.shape.group)
    weight = raw.quantized()
    assert torch.equal(weight.values(), raw.q)
    assert torch.equal(weight.dequantize(torch.float64), torch.from_numpy(exact))
    # A product of a small integer and an fp32 scale, rounded to fp32 once.
    assert torch.equal(weight.dequantize(), torch.from_numpy(exact).float())
    for dtype in DTYPES:
        assert torch.equal(weight.dequantize(dtype), torch.from_numpy(exact).float().to(dtype))


def test_dequantize_takes_rows_in_slices_without_losing_one() -> None:
    torch.manual_seed(0)
    k = 2500
    q = torch.randint(0, 16, (k, 2), dtype=torch.uint8)
    s = torch.randn(-(-k // 100), 2)
    weight = QuantizedWeight(pack_nibbles(q), s, None, 100, k, 2)
    assert torch.equal(weight.dequantize(), (q.float() - 8) * s.repeat_interleave(100, dim=0))


def test_nibbles_beyond_the_last_row_are_ignored() -> None:
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (2, 3), dtype=torch.int32)
    dirty, clean = words.clone(), words.clone()
    dirty[1] |= ~0xFFF
    clean[1] &= 0xFFF
    made = [make(qweight=w, in_features=11, group_size=11, scales=torch.ones(1, 3), zeros=None) for w in (dirty, clean)]
    assert torch.equal(made[0].dequantize(), made[1].dequantize())


def test_act_order_rows_take_the_scale_of_their_group() -> None:
    g_idx = torch.tensor([2, 0, 1, 0, 2, 1], dtype=torch.int32)
    q = torch.arange(6, dtype=torch.uint8)[:, None]
    weight = QuantizedWeight(pack_nibbles(q), torch.tensor([[1.0], [10.0], [100.0]]), None, 2, 6, 1, g_idx)
    assert weight.dequantize()[:, 0].tolist() == [-800.0, -7.0, -60.0, -5.0, -400.0, -30.0]
    assert not weight.in_group_order()
    assert make(g_idx=torch.arange(40, dtype=torch.int32) // 16).in_group_order()


def test_zero_points_are_dropped_only_if_all_are_8() -> None:
    eights = torch.full((3, 3), 8, dtype=torch.uint8)
    symmetric = make(zeros=eights).symmetric_if_possible()
    assert symmetric.zeros is None
    assert torch.equal(symmetric.dequantize(), make(zeros=eights).dequantize())
    eights[2, 2] = 7
    kept = make(zeros=eights)
    assert kept.symmetric_if_possible() is kept


def test_it_survives_pickle_and_deepcopy() -> None:
    weight = make()
    for other in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)):
        assert torch.equal(other.dequantize(), weight.dequantize())


def test_it_can_live_on_the_meta_device() -> None:
    tensors = {name: value.to("meta") for name, value in arguments().items() if isinstance(value, Tensor)}
    assert make(**tensors).device.type == "meta"


@pytest.mark.parametrize(
    "argument, value",
    [
        ("in_features", 0),
        ("out_features", 0),
        ("group_size", 0),
        ("group_size", -1),
        ("group_size", 41),
        ("qweight", None),
        ("qweight", torch.zeros(6, 3, dtype=torch.int32)),
        ("qweight", torch.zeros(5, 4, dtype=torch.int32)),
        ("qweight", torch.zeros(5, 3, dtype=torch.int64)),
        ("qweight", torch.zeros(15, dtype=torch.int32)),
        ("scales", torch.ones(2, 3)),
        ("scales", torch.ones(3, 3, dtype=torch.float64)),
        ("scales", torch.ones(3, 3, dtype=torch.int32)),
        ("scales", torch.ones(3, 3, device="meta")),
        ("zeros", torch.zeros(3, 4, dtype=torch.uint8)),
        ("zeros", torch.zeros(3, 3, dtype=torch.int8)),
        ("zeros", torch.full((3, 3), 16, dtype=torch.uint8)),
        ("g_idx", torch.zeros(39, dtype=torch.int32)),
        ("g_idx", torch.zeros(40, dtype=torch.int64)),
        ("g_idx", torch.full((40,), 3, dtype=torch.int32)),
        ("g_idx", torch.full((40,), -1, dtype=torch.int32)),
    ],
)
def test_a_malformed_weight_names_the_argument(argument: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=rf"^{argument}: got .*wanted"):
        make(**{argument: value})


def test_dequantize_refuses_an_integer_dtype() -> None:
    with pytest.raises(ArgumentError, match=r"^dtype: got torch.int8"):
        make().dequantize(torch.int8)


def test_a_group_size_of_minus_one_or_beyond_k_is_k() -> None:
    assert [resolve_group_size(g, 64) for g in (-1, 1, 32, 64, 128)] == [64, 1, 32, 64, 64]
    for bad in (0, -2):
        with pytest.raises(ArgumentError, match=r"^group_size: got .*wanted -1 or at least 1"):
            resolve_group_size(bad, 64)
