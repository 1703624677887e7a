# SPDX-License-Identifier: Apache-2.0
"""Every format's layers: read as an independent packer meant them, written back bit for bit, told by their shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import packers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import RawWeight, Shape, weights
from test_formats import assert_reads_as
from torch import Tensor

from awqjit.errors import ArgumentError, AwqJitWarning, FormatError
from awqjit.formats import MARKS, LayerFormat
from awqjit.formats.table import PACKINGS
from awqjit.layout import pack, unpack
from awqjit.modules import Int4Linear
from awqjit.weight import QuantizedWeight, pack_nibbles

LAYERS = {
    "gemm": LayerFormat("awq", 4, -1, True, "gemm"),
    "gemv": LayerFormat("awq", 4, -1, True, "gemv"),
    "gptq": LayerFormat("gptq", 4, -1, True, "gptq"),
    "gptq_v2": LayerFormat("gptq", 4, -1, True, "gptq_v2"),
    "pack-quantized": LayerFormat("compressed-tensors", 4, -1, True, "pack-quantized"),
    "auto_gptq": LayerFormat("auto-round", 4, -1, True, "auto_round:auto_gptq"),
    "gptqmodel": LayerFormat("auto-round", 4, -1, True, "auto_round:gptqmodel"),
    "auto_awq": LayerFormat("auto-round", 4, -1, True, "auto_round:auto_awq"),
}

ANY = (Shape(64, 8, 32), Shape(48, 24, 16), Shape(72, 17, 1), Shape(100, 40, 7), Shape(131, 33, 64), Shape(40, 1, 40))
SHAPES = {
    # AWQ packs along N (gemm) or K (gemv); a group size of 64 or 32 pads gemv's scales and zero points.
    "gemm": (Shape(64, 8, 32), Shape(48, 24, 16), Shape(131, 32, 64), Shape(13, 8, 1)),
    "gemv": (Shape(64, 8, 32), Shape(64, 5, 64), Shape(640, 3, 64), Shape(320, 17, 32), Shape(48, 24, 16),
             Shape(8, 1, 8)),
}  # fmt: skip
SHAPES["auto_awq"] = SHAPES["gemm"]


def packed(name: str, raw: RawWeight, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """What the format's producer would store."""
    q, z = raw.q.numpy(), raw.dense_z.numpy()
    if name in ("gemm", "auto_awq"):
        qweight, qzeros = packers.pack_awq(q, z)
        return {"qweight": torch.from_numpy(qweight), "scales": raw.s, "qzeros": torch.from_numpy(qzeros)}
    if name == "gemv":
        half = {torch.bfloat16: torch.float32}.get(raw.s.dtype, raw.s.dtype)  # NumPy has no bfloat16
        qweight, qzeros, scales = packers.pack_gemv(q, z, raw.s.to(half).numpy(), raw.shape.group)
        return {
            "qweight": torch.from_numpy(qweight),
            "scales": torch.from_numpy(scales).to(raw.s.dtype),
            "qzeros": torch.from_numpy(qzeros),
        }
    if g_idx is None:
        g_idx = torch.arange(raw.shape.k, dtype=torch.int32) // raw.shape.group
    if name == "pack-quantized":
        weight, zero_point = packers.pack_quantized(q, z)
        tensors = {
            "weight_packed": torch.from_numpy(weight),
            "weight_scale": raw.s.T.contiguous(),
            "weight_zero_point": torch.from_numpy(zero_point),
            "weight_shape": torch.tensor([raw.shape.n, raw.shape.k]),
        }
        return tensors | ({} if bool((g_idx.diff() >= 0).all()) else {"weight_g_idx": g_idx})
    qweight, qzeros = packers.pack_gptq(q, z, v2=name in ("gptq_v2", "gptqmodel"))
    return {
        "qweight": torch.from_numpy(qweight),
        "scales": raw.s,
        "qzeros": torch.from_numpy(qzeros),
        "g_idx": g_idx,
    }


def layer_of(name: str, shape: Shape, **changes: Any) -> LayerFormat:
    return dataclasses.replace(LAYERS[name], group_size=shape.group, **changes)


def equal(written: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return written.keys() == wanted.keys() and all(
        written[part].dtype == tensor.dtype and torch.equal(written[part], tensor) for part, tensor in wanted.items()
    )


@st.composite
def cases(draw: st.DrawFn, names: tuple[str, ...] = tuple(LAYERS)) -> tuple[str, RawWeight]:
    name = draw(st.sampled_from(names))
    shape = draw(st.sampled_from(SHAPES.get(name, ANY)))
    kinds = ("by_column", "random", "only_0_and_15", "all_0", "all_15", "none")
    return name, draw(weights(shape, zero_kinds=kinds, scale_kinds=("any_sign", "some_subnormal", "some_zero")))


@settings(max_examples=80)
@given(cases())
def test_a_layer_is_read_as_its_packer_meant_it_and_written_back_bit_for_bit(case: tuple[str, RawWeight]) -> None:
    name, raw = case
    layer, tensors, shape = layer_of(name, raw.shape), packed(name, raw), raw.shape
    assert all(tuple(tensor.shape) in layer.shapes(shape.k, shape.n)[part].allowed for part, tensor in tensors.items())
    weight = layer.read(tensors, shape.k, shape.n)
    assert_reads_as(weight, raw)
    assert weight.g_idx is None
    assert equal(layer.write(weight), tensors)
    assert equal(layer.write(weight.symmetric_if_possible()), tensors)


@settings(max_examples=24)
@given(cases(), st.integers(0, 100))
def test_the_state_of_a_linear_layer_is_its_checkpoint_bit_for_bit(case: tuple[str, RawWeight], seed: int) -> None:
    name, raw = case
    layer, tensors, shape = layer_of(name, raw.shape), packed(name, raw), raw.shape
    linear = Int4Linear.from_quantized(layer.read(tensors, shape.k, shape.n), format=layer)
    assert equal(dict(linear.state_dict()), tensors)
    q = torch.from_numpy(np.random.default_rng(seed).integers(0, 16, (shape.k, shape.n), dtype=np.uint8))
    other = Int4Linear.from_quantized(
        QuantizedWeight(pack_nibbles(q), raw.s, None, shape.group, shape.k, shape.n), format=layer
    )
    other.load_state_dict(linear.state_dict())
    assert equal(dict(other.state_dict()), tensors)


@settings(max_examples=30)
@given(cases(("gptq", "gptq_v2", "gptqmodel", "pack-quantized")), st.integers(0, 100), st.booleans())
def test_act_order_is_read_and_written(case: tuple[str, RawWeight], seed: int, equal_groups: bool) -> None:
    name, raw = case
    shape, rng = raw.shape, np.random.default_rng(seed)
    in_order = np.arange(shape.k) // shape.group
    order = rng.permutation(in_order) if equal_groups else rng.integers(0, shape.groups, shape.k)
    g_idx = torch.from_numpy(order.astype(np.int32))
    layer, tensors = layer_of(name, shape), packed(name, raw, g_idx)
    weight = layer.read(tensors, shape.k, shape.n)
    assert torch.equal(weight.row_groups(), g_idx.long())
    exact = packers.dequantize(raw.q.numpy(), raw.dense_z.numpy(), raw.s.double().numpy(), shape.group, order)
    assert torch.equal(weight.dequantize(torch.float64), torch.from_numpy(exact))
    assert torch.equal(layer.dequantize(tensors, shape.k, shape.n).double(), weight.dequantize().double())
    assert equal(layer.write(weight), tensors)
    if np.array_equal(np.sort(order), in_order):
        assert torch.equal(unpack(pack(weight)).dequantize(), weight.dequantize())
    else:
        with pytest.raises(FormatError, match=r"g_idx puts .* rows into a group"):
            pack(weight)


def test_a_g_idx_of_compressed_tensors_with_minus_one_says_that_there_is_no_order() -> None:
    raw = RawWeight(Shape(16, 8, 8), torch.full((16, 8), 3, dtype=torch.uint8), None, torch.rand(2, 8), "threes")
    tensors = packed("pack-quantized", raw) | {"weight_g_idx": torch.full((16,), -1, dtype=torch.int32)}
    assert layer_of("pack-quantized", raw.shape).read(tensors, 16, 8).g_idx is None


def test_a_symmetric_layer_of_compressed_tensors_stores_no_zero_points() -> None:
    raw = RawWeight(Shape(16, 8, 8), torch.full((16, 8), 3, dtype=torch.uint8), None, torch.rand(2, 8), "threes")
    tensors, layer = packed("pack-quantized", raw), layer_of("pack-quantized", raw.shape, zero_point=False)
    del tensors["weight_zero_point"]
    weight = layer.read(tensors, 16, 8)
    assert weight.zeros is None and torch.equal(weight.dequantize(), -5 * raw.s.repeat_interleave(8, 0))
    assert equal(layer.write(weight), tensors)
    with pytest.raises(FormatError, match="weight_zero_point is missing"):
        layer_of("pack-quantized", raw.shape).read(tensors, 16, 8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "pack-quantized"])
def test_zero_points_that_are_not_packed_are_read_as_they_are(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    z = torch.from_numpy(rng.integers(0, 16, (3, 20), dtype=np.uint8))
    raw = RawWeight(Shape(24, 20, 8), torch.from_numpy(rng.integers(0, 16, (24, 20), dtype=np.uint8)), z,
                    torch.rand(3, 20), "distinct")  # fmt: skip
    tensors, part = packed(name, raw), "weight_zero_point" if name == "pack-quantized" else "qzeros"
    tensors[part] = (z.T.contiguous().to(torch.int8) - 8 if name == "pack-quantized" else z).to(dtype)
    layer = layer_of(name, raw.shape)
    assert tuple(tensors[part].shape) in layer.shapes(24, 20)[part].allowed
    assert_reads_as(layer.read(tensors, 24, 20), raw)
    if dtype.is_floating_point:
        for bad, message in ((0.5, "not whole numbers"), (16, "beyond"), (-9, "beyond")):
            tensors[part] = tensors[part].clone()
            tensors[part][0, 0] = bad
            with pytest.raises(FormatError, match=message):
                layer.read(tensors, 24, 20)


class TestLabels:
    def test_a_symmetric_label_on_other_data_gives_one_note_and_keeps_the_data(self) -> None:
        raw = RawWeight(Shape(16, 8, 8), torch.zeros(16, 8, dtype=torch.uint8),
                        torch.arange(16, dtype=torch.uint8).reshape(2, 8), torch.rand(2, 8), "distinct")  # fmt: skip
        for name in ("gptq", "gptq_v2", "pack-quantized"):
            layer, tensors, notes = layer_of(name, raw.shape, zero_point=False), packed(name, raw), []
            assert_reads_as(layer.read(tensors, 16, 8, notes=notes), raw)
            assert len(notes) == 1 and "labelled symmetric" in notes[0]
            with pytest.warns(AwqJitWarning, match="labelled symmetric") as caught:
                weight = layer.read(tensors, 16, 8)
            assert len(caught) == 1
            assert equal(layer.write(weight), tensors)

    @pytest.mark.parametrize("stored", ["gemm", "gemv", "gptq"])
    @pytest.mark.parametrize("labelled", ["gemm", "gemv", "gptq", "auto_gptq", "auto_awq"])
    def test_shapes_tell_a_wrong_order_and_a_wrong_group_size(self, stored: str, labelled: str) -> None:
        raw = RawWeight(Shape(128, 64, 64), torch.ones(128, 64, dtype=torch.uint8), None, torch.rand(2, 64), "ones")
        tensors = packed(stored, raw)
        shapes = {part: tuple(tensor.shape) for part, tensor in tensors.items()}
        label = layer_of(labelled, raw.shape)
        found, note = label.fit(shapes, 128, 64)
        assert found.packing.shapes is LAYERS[stored].packing.shapes and found.group_size == 64
        assert (found == label) == (note is None)
        if note:
            assert "they are believed" in note
            assert torch.equal(found.read(tensors, 128, 64, notes=[]).values(), raw.q)
        if stored != "gemv":  # whose padding hides how many groups there are
            found, note = dataclasses.replace(label, group_size=32).fit(shapes, 128, 64)
            assert found.group_size == 64 and note is not None

    @pytest.mark.parametrize("name", ["gptq", "pack-quantized"])
    def test_shapes_tell_how_many_bits_a_layer_has(self, name: str) -> None:
        for bits, other in ((4, 8), (8, 4)):
            layer = dataclasses.replace(LAYERS[name], group_size=32, bits=bits)
            shapes = {part: entry.allowed[0] for part, entry in layer.shapes(64, 16).items()}
            found, note = dataclasses.replace(layer, bits=other).fit(shapes, 64, 16)
            assert found == layer and note is not None and f"with {bits} bits" in note

    def test_a_square_layer_is_told_by_its_scales(self) -> None:
        raw = RawWeight(Shape(64, 64, 32), torch.ones(64, 64, dtype=torch.uint8), None, torch.rand(2, 64), "ones")
        for stored, labelled in (("gemm", "gemv"), ("gemv", "gemm")):
            shapes = {part: tuple(tensor.shape) for part, tensor in packed(stored, raw).items()}
            assert layer_of(labelled, raw.shape).fit(shapes, 64, 64)[0].version == stored

    def test_shapes_that_fit_two_other_readings_change_nothing(self) -> None:
        layer = LayerFormat("gptq", 4, 1, True, "gptq")
        shapes = {"qweight": (64, 8), "scales": (64, 64), "qzeros": (64, 8)}
        for version in ("gemm", "gemv"):
            assert LayerFormat("awq", 4, 1, True, version).fits(shapes, 64, 64)
        assert layer.fit(shapes, 64, 64) == (layer, None)

    def test_shapes_that_fit_nothing_change_nothing(self) -> None:
        layer = LayerFormat("awq", 4, 32, True, "gemm")
        for shapes in ({}, {"qweight": (64, 7), "scales": (2, 64)}, {"qweight": (64, 8), "scales": (3, 64)},
                       {"qweight": (64,), "scales": ()}):  # fmt: skip
            assert layer.fit(shapes, 64, 64) == (layer, None)


class TestRefusals:
    def test_marks_are_those_of_all_formats(self) -> None:
        assert MARKS == ("qweight", "weight_packed")
        assert {packing.mark for packing in PACKINGS.values()} == set(MARKS)

    @pytest.mark.parametrize("name", sorted(LAYERS))
    def test_a_layer_that_lacks_its_weight_or_scales_or_has_another_size_is_refused(self, name: str) -> None:
        shape = Shape(64, 8, 32)
        raw = RawWeight(shape, torch.ones(64, 8, dtype=torch.uint8), None, torch.rand(2, 8), "ones")
        layer, tensors = layer_of(name, shape), packed(name, raw)
        for part in layer.tensor_names[:2]:
            with pytest.raises(ArgumentError, match=part):
                layer.read({key: tensor for key, tensor in tensors.items() if key != part}, 64, 8)
        for sizes in ((72, 8), (64, 16)):
            with pytest.raises(ArgumentError, match=r"got .*wanted"):
                layer.read(tensors, *sizes)
        scales = layer.tensor_names[1]
        with pytest.raises(FormatError, match="NaN or infinite"):
            layer.read(tensors | {scales: torch.full_like(tensors[scales], torch.nan)}, 64, 8)

    def test_a_layer_that_is_not_int4_says_so(self) -> None:
        eight = LayerFormat("awq", 8, 32, True, "gemm")
        assert eight.refused == "it has 8 bits, only 4 are read" and not eight.dequantizable
        other = LayerFormat("gptq", 4, 32, True, "gptq", reason="it is of format fp8")
        for layer in (eight, other):
            with pytest.raises(FormatError, match="the layer cannot be read: it"):
                layer.read({}, 8, 8)
            with pytest.raises(FormatError, match="the layer cannot be read: it"):
                layer.dequantize({}, 8, 8)

    def test_gemv_says_what_it_cannot_store(self) -> None:
        layer = LayerFormat("awq", 4, 4, True, "gemv")
        with pytest.raises(FormatError, match="in_features 12 is not a multiple of 8"):
            layer.write(QuantizedWeight(torch.zeros(2, 3, dtype=torch.int32), torch.ones(3, 3), None, 4, 12, 3))
        g_idx = torch.tensor([1, 0] * 4, dtype=torch.int32)
        with pytest.raises(FormatError, match="AWQ has no act-order"):
            layer.write(QuantizedWeight(torch.zeros(1, 3, dtype=torch.int32), torch.ones(2, 3), None, 4, 8, 3, g_idx))


class TestEightBits:
    @pytest.mark.parametrize("name", ["gptq", "gptq_v2", "pack-quantized"])
    @pytest.mark.parametrize(("k", "n", "group"), [(24, 12, 8), (30, 7, 16), (16, 4, -1)])
    @pytest.mark.parametrize("order", [False, True])
    def test_a_layer_with_8_bits_is_dequantized(self, name: str, k: int, n: int, group: int, order: bool) -> None:
        rng = np.random.default_rng(k)
        size = k if group == -1 else group
        groups = -(-k // size)
        q, z = rng.integers(0, 256, (k, n)), rng.integers(0, 256, (groups, n))
        z[0, :2] = 0, 255
        s = torch.from_numpy(rng.uniform(-1, 1, (groups, n))).float()
        g_idx = rng.integers(0, groups, k).astype(np.int32) if order else (np.arange(k) // size).astype(np.int32)
        layer = dataclasses.replace(LAYERS[name], bits=8, group_size=group)
        if name == "pack-quantized":
            weight, zero_point = packers.pack_quantized(q, z, bits=8)
            tensors = {"weight_packed": weight, "weight_zero_point": zero_point, "weight_g_idx": g_idx}
            scales = {"weight_scale": s.T.contiguous()}
        else:
            qweight, qzeros = packers.pack_gptq(q, z, v2=name == "gptq_v2", bits=8)
            tensors, scales = {"qweight": qweight, "qzeros": qzeros, "g_idx": g_idx}, {"scales": s}
        stored = {part: torch.from_numpy(words) for part, words in tensors.items()} | scales
        assert layer.refused and layer.dequantizable
        shapes = layer.shapes(k, n)
        assert all(tuple(tensor.shape) in shapes[part].allowed for part, tensor in stored.items())
        exact = packers.dequantize(q, z, s.double().numpy(), size, g_idx)
        assert torch.equal(layer.dequantize(stored, k, n), torch.from_numpy(exact).float())
        symmetric = dataclasses.replace(layer, zero_point=False)
        del stored[layer.tensor_names[2]]
        exact = packers.dequantize(q, np.full_like(z, 128), s.double().numpy(), size, g_idx)
        assert torch.equal(symmetric.dequantize(stored, k, n), torch.from_numpy(exact).float())
