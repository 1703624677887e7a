# SPDX-License-Identifier: Apache-2.0
"""AWQ and GPTQ tensors, bit for bit against an independent packer."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import packers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, RawWeight, Shape, weights
from torch import Tensor

from awqjit.errors import ArgumentError, AwqJitWarning, FormatError
from awqjit.formats.awq import awq_to_standard, standard_to_awq
from awqjit.formats.gptq import gptq_to_standard, standard_to_gptq
from awqjit.weight import QuantizedWeight, pack_nibbles

FORMAT_SHAPES = (Shape(64, 8, 32), Shape(32, 16, 32), Shape(48, 24, 16), Shape(264, 72, 128), Shape(104, 40, 104))
"""K and N are multiples of 8 (both formats' own demand); one short last group, two single groups."""


def format_weights(zero_kinds: tuple[str, ...] = ("by_column", "random", "only_0_and_15", "all_0", "all_15")) -> Any:
    return st.sampled_from(FORMAT_SHAPES).flatmap(lambda shape: weights(shape, zero_kinds=zero_kinds))


def awq_tensors(raw: RawWeight) -> tuple[Tensor, Tensor]:
    qweight, qzeros = packers.pack_awq(raw.q.numpy(), raw.dense_z.numpy())
    return torch.from_numpy(qweight), torch.from_numpy(qzeros)


def gptq_tensors(raw: RawWeight, v2: bool) -> tuple[Tensor, Tensor]:
    qweight, qzeros = packers.pack_gptq(raw.q.numpy(), raw.dense_z.numpy(), v2=v2)
    return torch.from_numpy(qweight), torch.from_numpy(qzeros)


def assert_reads_as(weight: QuantizedWeight, raw: RawWeight) -> None:
    assert torch.equal(weight.values(), raw.q)
    assert weight.zeros is not None and torch.equal(weight.zeros, raw.dense_z)
    assert weight.scales.dtype == raw.s.dtype
    bits = torch.int32 if raw.s.dtype == torch.float32 else torch.int16
    assert torch.equal(weight.scales.view(bits), raw.s.view(bits))
    assert (weight.group_size, weight.in_features, weight.out_features) == (raw.shape.group, raw.shape.k, raw.shape.n)
    exact = packers.dequantize(raw.q.numpy(), raw.dense_z.numpy(), raw.s.double().numpy(), raw.shape.group)
    assert torch.equal(weight.dequantize(torch.float64), torch.from_numpy(exact))


class TestAwq:
    @settings(max_examples=25, deadline=None)
    @given(format_weights())
    def test_reads_what_the_independent_packer_wrote(self, raw: RawWeight) -> None:
        qweight, qzeros = awq_tensors(raw)
        assert_reads_as(awq_to_standard(qweight, raw.s, qzeros, raw.shape.group), raw)

    @settings(max_examples=25, deadline=None)
    @given(format_weights())
    def test_writes_what_the_independent_packer_writes(self, raw: RawWeight) -> None:
        qweight, scales, qzeros = standard_to_awq(raw.quantized())
        want_qweight, want_qzeros = awq_tensors(raw)
        assert torch.equal(qweight, want_qweight) and torch.equal(qzeros, want_qzeros) and torch.equal(scales, raw.s)
        q, z = packers.unpack_awq(qweight.numpy(), qzeros.numpy())
        assert np.array_equal(q, raw.q.numpy()) and np.array_equal(z, raw.dense_z.numpy())

    @pytest.mark.parametrize("nibble, column", list(enumerate([0, 2, 4, 6, 1, 3, 5, 7])))
    def test_each_nibble_is_the_column_of_the_drawing(self, nibble: int, column: int) -> None:
        word = 15 << (4 * nibble)
        signed = torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)
        one_row = torch.cat([torch.zeros(3, 1, dtype=torch.int32), signed, torch.zeros(4, 1, dtype=torch.int32)])
        weight = awq_to_standard(one_row, torch.ones(1, 8), signed, -1)
        want = torch.zeros(8, 8, dtype=torch.uint8)
        want[3, column] = 15
        assert torch.equal(weight.values(), want)
        assert weight.zeros is not None and torch.equal(weight.zeros, want[3:4])

    @pytest.mark.parametrize("k", [1, 13, 130])
    def test_any_in_features_can_be_read_and_written_back(self, k: int) -> None:
        torch.manual_seed(k)
        qweight = torch.randint(-(2**31), 2**31 - 1, (k, 3), dtype=torch.int32)
        qzeros = torch.randint(-(2**31), 2**31 - 1, (1, 3), dtype=torch.int32)
        scales = torch.randn(1, 24).half()
        before = qweight.clone()
        weight = awq_to_standard(qweight, scales, qzeros, -1)
        assert torch.equal(qweight, before)
        assert weight.in_features == weight.group_size == k
        back = standard_to_awq(weight)
        assert torch.equal(back[0], qweight) and torch.equal(back[1], scales) and torch.equal(back[2], qzeros)

    def test_missing_zero_points_are_8(self) -> None:
        raw = RawWeight(Shape(8, 8, 8), torch.full((8, 8), 9, dtype=torch.uint8), None, torch.ones(1, 8), "nines")
        qweight, qzeros = awq_tensors(raw)
        weight = awq_to_standard(qweight, raw.s, None, 8)
        assert weight.zeros is None and bool((weight.dequantize() == 1).all())
        assert torch.equal(standard_to_awq(weight)[2], qzeros)

    def test_out_features_must_be_a_multiple_of_8(self) -> None:
        weight = QuantizedWeight(torch.zeros(1, 12, dtype=torch.int32), torch.ones(1, 12), None, 8, 8, 12)
        with pytest.raises(
            FormatError, match="AWQ packs 8 columns into a word, and out_features 12 is not a multiple of 8"
        ):
            standard_to_awq(weight)

    def test_act_order_cannot_be_written(self) -> None:
        g_idx = torch.tensor([1, 0] * 8, dtype=torch.int32)
        weight = QuantizedWeight(torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 8), None, 8, 16, 8, g_idx)
        with pytest.raises(FormatError, match="AWQ has no act-order"):
            standard_to_awq(weight)
        in_order = dataclasses.replace(weight, g_idx=torch.arange(16, dtype=torch.int32) // 8)
        assert standard_to_awq(in_order)[0].shape == (16, 1)

    @pytest.mark.parametrize(
        "argument, value",
        [
            ("qweight", torch.zeros(16, dtype=torch.int32)),
            ("qweight", torch.zeros(16, 1, dtype=torch.int64)),
            ("qweight", None),
            ("scales", torch.ones(1, 8)),
            ("scales", torch.ones(2, 8, dtype=torch.float64)),
            ("qzeros", torch.zeros(2, 2, dtype=torch.int32)),
            ("qzeros", torch.zeros(2, 1, dtype=torch.uint8)),
            ("group_size", 0),
            ("group_size", -2),
        ],
    )
    def test_a_malformed_layer_names_the_argument(self, argument: str, value: object) -> None:
        layer: dict[str, Any] = {
            "qweight": torch.zeros(16, 1, dtype=torch.int32),
            "scales": torch.ones(2, 8),
            "qzeros": torch.zeros(2, 1, dtype=torch.int32),
            "group_size": 8,
        }
        with pytest.raises(ArgumentError, match=rf"^{argument}: got .*wanted"):
            awq_to_standard(**(layer | {argument: value}))


class TestGptq:
    @settings(max_examples=30, deadline=None)
    @given(format_weights(), st.booleans(), st.sampled_from([None, torch.int32, torch.int64]))
    def test_reads_what_the_independent_packer_wrote(
        self, raw: RawWeight, v2: bool, g_idx_dtype: torch.dtype | None
    ) -> None:
        qweight, qzeros = gptq_tensors(raw, v2)
        g_idx = None if g_idx_dtype is None else (torch.arange(raw.shape.k) // raw.shape.group).to(g_idx_dtype)
        weight = gptq_to_standard(qweight, raw.s, qzeros, raw.shape.group, v2=v2, sym=False, g_idx=g_idx)
        assert weight.g_idx is None
        assert_reads_as(weight, raw)

    @settings(max_examples=30, deadline=None)
    @given(format_weights(), st.booleans())
    def test_writes_what_the_independent_packer_writes(self, raw: RawWeight, v2: bool) -> None:
        qweight, scales, qzeros, g_idx = standard_to_gptq(raw.quantized(), v2=v2)
        want_qweight, want_qzeros = gptq_tensors(raw, v2)
        assert torch.equal(qweight, want_qweight) and torch.equal(qzeros, want_qzeros) and torch.equal(scales, raw.s)
        assert torch.equal(g_idx, torch.arange(raw.shape.k, dtype=torch.int32) // raw.shape.group)
        q, z = packers.unpack_gptq(qweight.numpy(), qzeros.numpy(), v2=v2)
        assert np.array_equal(q, raw.q.numpy()) and np.array_equal(z, raw.dense_z.numpy())

    @pytest.mark.parametrize(
        ("stored", "zeros"),
        [
            ([6, 0, 1, 7, 8, 13, 14, 2], [7, 1, 2, 8, 9, 14, 15, 3]),
            ([15, 4, 9, 14, 3, 8, 13, 2], [0, 6, 10, 15, 4, 9, 14, 3]),  # a 0 borrows from the column above it
            ([15, 13, 14, 14, 14, 14, 14, 14], [0] + [15] * 7),
            ([15, 14, 14, 14, 14, 14, 14, 14], [0] * 8),
            ([14, 14, 14, 14, 14, 14, 14, 15], [15] * 7 + [0]),  # what the last one borrows from is beyond the word
        ],
    )
    def test_version_1_stores_words_minus_one_in_every_nibble(self, stored: list[int], zeros: list[int]) -> None:
        word = sum(value << (4 * i) for i, value in enumerate(stored))
        qzeros = torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)
        weight = gptq_to_standard(
            torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, 8), qzeros, 8, v2=False, sym=False
        )
        assert weight.zeros is not None and weight.zeros.tolist() == [zeros]
        assert torch.equal(standard_to_gptq(weight, v2=False)[2], qzeros)

    @pytest.mark.parametrize("group_size", [-1, 32, 128])
    def test_group_size_minus_one_or_beyond_k_is_one_group(self, group_size: int) -> None:
        weight = gptq_to_standard(
            torch.zeros(4, 8, dtype=torch.int32), torch.ones(1, 8), None, group_size, v2=False, sym=True
        )
        assert weight.group_size == 32 and weight.zeros is None

    @pytest.mark.parametrize("labelled_v2", [False, True])
    @pytest.mark.parametrize("written_v2", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_symmetric_data_is_believed_over_the_label(
        self, labelled_v2: bool, written_v2: bool, dtype: torch.dtype
    ) -> None:
        q = torch.randint(0, 16, (16, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        raw = RawWeight(Shape(16, 8, 8), q, None, torch.full((2, 8), -0.5).to(dtype), "symmetric")
        qweight, qzeros = gptq_tensors(raw, written_v2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weight = gptq_to_standard(qweight, raw.s, qzeros, 8, v2=labelled_v2, sym=True)
        assert_reads_as(weight, raw)
        assert [w.category for w in caught] == ([] if labelled_v2 == written_v2 else [AwqJitWarning])
        assert all("the data is believed" in str(w.message) for w in caught)

    def test_the_label_decides_for_asymmetric_data(self) -> None:
        sevens = torch.full((1, 1), 0x77777777, dtype=torch.int32)
        for v2, z in ((False, 8), (True, 7)):
            weight = gptq_to_standard(
                torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, 8), sevens, 8, v2=v2, sym=False
            )
            assert weight.zeros is not None and bool((weight.zeros == z).all())

    def test_a_symmetric_label_on_asymmetric_data_warns_and_keeps_the_data(self) -> None:
        mixed = torch.tensor([[0x77777776]], dtype=torch.int32)
        with pytest.warns(AwqJitWarning, match="labelled symmetric, but its zero points are not all 8"):
            weight = gptq_to_standard(
                torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, 8), mixed, 8, v2=False, sym=True
            )
        assert weight.zeros is not None and weight.zeros.tolist() == [[7] + [8] * 7]

    def test_act_order_is_refused(self) -> None:
        g_idx = torch.tensor([1, 0] * 8, dtype=torch.int32)
        with pytest.raises(FormatError, match="act-order"):
            gptq_to_standard(
                torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 8), None, 8, v2=False, sym=True, g_idx=g_idx
            )

    @pytest.mark.parametrize("v2", [False, True])
    @pytest.mark.parametrize(("k", "n", "group"), [(12, 8, 12), (8, 12, 8), (100, 44, 32), (13, 1, 4)])
    def test_dimensions_that_do_not_fill_their_words_are_padded(self, k: int, n: int, group: int, v2: bool) -> None:
        rng = np.random.default_rng(k)
        q, z = rng.integers(0, 16, (k, n), dtype=np.uint8), rng.integers(0, 16, (-(-k // group), n), dtype=np.uint8)
        qweight, qzeros = (torch.from_numpy(words) for words in packers.pack_gptq(q, z, v2=v2))
        scales, g_idx = torch.randn(z.shape), torch.arange(k, dtype=torch.int32) // group
        for sizes in ({"in_features": k}, {"g_idx": g_idx}):
            weight = gptq_to_standard(qweight, scales, qzeros, group, v2=v2, sym=False, **sizes)
            assert (weight.in_features, weight.out_features) == (k, n)
            assert torch.equal(weight.values(), torch.from_numpy(q))
            assert weight.zeros is not None and torch.equal(weight.zeros, torch.from_numpy(z))
            written = standard_to_gptq(weight, v2=v2)
            assert all(torch.equal(*pair) for pair in zip(written, (qweight, scales, qzeros, g_idx), strict=True))

    def test_a_g_idx_of_zeros_alone_says_nothing(self) -> None:
        scales = torch.tensor([[1.0], [2.0]]).expand(2, 8).contiguous()
        weight = gptq_to_standard(
            torch.zeros(2, 8, dtype=torch.int32), scales, None, 8, v2=True, sym=True,
            g_idx=torch.zeros(16, dtype=torch.int32),
        )  # fmt: skip
        assert weight.g_idx is None and weight.dequantize()[:, 0].tolist() == [-8.0] * 8 + [-16.0] * 8

    def test_missing_zero_points_are_refused_unless_symmetric(self) -> None:
        with pytest.raises(FormatError, match="qzeros is missing"):
            gptq_to_standard(torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, 8), None, 8, v2=True, sym=False)

    @pytest.mark.parametrize(
        "argument, value",
        [
            ("qweight", torch.zeros(16, dtype=torch.int32)),
            ("qweight", torch.zeros(2, 8, dtype=torch.int64)),
            ("scales", torch.ones(1, 8)),
            ("qzeros", torch.zeros(2, 8, dtype=torch.int32)),
            ("g_idx", torch.zeros(8, dtype=torch.int32)),
            ("g_idx", torch.zeros(16)),
            ("group_size", 0),
        ],
    )
    def test_a_malformed_layer_names_the_argument(self, argument: str, value: object) -> None:
        layer: dict[str, Any] = {
            "qweight": torch.zeros(2, 8, dtype=torch.int32),
            "scales": torch.ones(2, 8),
            "qzeros": torch.zeros(2, 1, dtype=torch.int32),
            "group_size": 8,
        }
        with pytest.raises(ArgumentError, match=rf"^{argument}: got .*wanted"):
            gptq_to_standard(**(layer | {argument: value}), v2=True, sym=False)


def test_awq_and_gptq_tensors_of_one_weight_become_the_same_weight() -> None:
    torch.manual_seed(0)
    q, z = torch.randint(0, 16, (64, 16), dtype=torch.uint8), torch.randint(0, 16, (2, 16), dtype=torch.uint8)
    raw = RawWeight(Shape(64, 16, 32), q, z, torch.randn(2, 16), "one source")
    read = [awq_to_standard(*awq_tensors(raw)[:1], raw.s, awq_tensors(raw)[1], 32)]
    read += [gptq_to_standard(gptq_tensors(raw, v2)[0], raw.s, gptq_tensors(raw, v2)[1], 32, v2=v2, sym=False)
             for v2 in (False, True)]  # fmt: skip
    for weight in read:
        assert torch.equal(weight.qweight, pack_nibbles(q))
        assert torch.equal(weight.dequantize(), read[0].dequantize())
