# SPDX-License-Identifier: Apache-2.0
"""Layout 2, which GPU kernels read: where each weight, scale and zero point lands, the way back, layers that move."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import SHAPES, RawWeight, Shape, weights
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from awqjit import Int4Linear, jit, layout, modules
from awqjit.errors import ArgumentError
from awqjit.layout import LAYOUT_CPU, LAYOUT_GPU, PackedWeight, pack, unpack
from awqjit.weight import QuantizedWeight, pack_nibbles

GPU_SHAPES = (*SHAPES, Shape(96, 48, 4), Shape(200, 20, 100), Shape(31, 15, 31), Shape(320, 64, 64))
"""Groups under 32, of no multiple of 32, of one fragment and of several; N and K with every kind of tail."""


def read(packed: PackedWeight, k: int, n: int) -> int:
    """q[k, n] out of the packed words, as the drawing has it."""
    word = int(packed.weight[n // 16, k // 32, n % 16, k % 32 // 8]) % 2**32
    return word >> (4 * (k % 8)) & 15


@settings(max_examples=60, deadline=None)
@given(weights(st.sampled_from(GPU_SHAPES)))
def test_unpack_inverts_pack(raw: RawWeight) -> None:
    packed = pack(raw.quantized(), LAYOUT_GPU)
    back = unpack(packed)
    assert torch.equal(back.values(), raw.q) and torch.equal(back.qweight, raw.quantized().qweight)
    assert torch.equal(back.scales, raw.s) and back.scales.dtype == raw.s.dtype
    assert back.zeros is None if raw.z is None else torch.equal(back.zeros, raw.z)  # type: ignore[arg-type]
    assert back.g_idx is None and packed.perm is None and packed.layout == LAYOUT_GPU == 2


@settings(max_examples=60, deadline=None)
@given(weights(st.sampled_from(GPU_SHAPES)), st.data())
def test_everything_is_where_the_drawing_says_and_padding_is_0(raw: RawWeight, data: st.DataObject) -> None:
    shape, packed = raw.shape, pack(raw.quantized(), LAYOUT_GPU)
    blocks, fragments = -(-shape.n // 16), -(-shape.k // 32)
    assert packed.weight.shape == (blocks, fragments, 16, 4) and packed.weight.is_contiguous()
    assert packed.scales.shape == (shape.groups, 16 * blocks) and packed.scales.is_contiguous()
    for _ in range(20):
        k, n = data.draw(st.integers(0, shape.k - 1)), data.draw(st.integers(0, shape.n - 1))
        assert read(packed, k, n) == int(raw.q[k, n])
    assert torch.equal(packed.scales[:, : shape.n], raw.s) and not packed.scales[:, shape.n :].any()
    if raw.z is not None:
        assert packed.zeros is not None
        assert torch.equal(packed.zeros[:, : shape.n], raw.z) and not packed.zeros[:, shape.n :].any()
    everything = sum(read(packed, k, n) for k in range(32 * fragments) for n in range(16 * blocks))
    assert everything == int(raw.q.sum())  # all nibbles beyond K and N are 0


@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_one_hot_weights_land_on_their_nibble(shape: Shape) -> None:
    for k in {0, 7, 8, 15, 16, 24, 30, shape.group - 1, shape.k // 2, shape.k - 1}:
        n = (5 * k + 3) % shape.n
        q = torch.zeros(shape.k, shape.n, dtype=torch.uint8)
        if k >= shape.k:
            continue
        q[k, n] = 15
        packed = pack(
            QuantizedWeight(pack_nibbles(q), torch.ones(shape.groups, shape.n), None, *key(shape)), LAYOUT_GPU
        )
        want = torch.zeros_like(packed.weight)
        value = 15 << (4 * (k % 8))
        want[n // 16, k // 32, n % 16, k % 32 // 8] = value - 2**32 if value >= 2**31 else value
        assert torch.equal(packed.weight, want), (k, n)


def key(shape: Shape) -> tuple[int, int, int]:
    return shape.group, shape.k, shape.n


@settings(max_examples=30, deadline=None)
@given(weights(st.sampled_from([s for s in GPU_SHAPES if s.k % s.group == 0])), st.randoms(use_true_random=False))
def test_act_order_rows_are_sorted_by_group_and_come_back(raw: RawWeight, random: object) -> None:
    shape = raw.shape
    order = list(range(shape.k))
    random.shuffle(order)  # type: ignore[attr-defined]
    g_idx = torch.tensor(order, dtype=torch.int32) // shape.group
    weight = dataclasses.replace(raw.quantized(), g_idx=g_idx)
    packed = pack(weight, LAYOUT_GPU)
    assert torch.equal(unpack(packed).dequantize(), weight.dequantize())
    if packed.perm is not None:
        assert torch.equal(g_idx[packed.perm.long()], torch.arange(shape.k, dtype=torch.int32) // shape.group)
        for row in (0, shape.k // 2, shape.k - 1):
            assert read(packed, row, 0) == int(raw.q[int(packed.perm[row]), 0])


@settings(max_examples=30, deadline=None)
@given(weights(st.sampled_from([s for s in GPU_SHAPES if s.n > 16])), st.sampled_from([LAYOUT_CPU, LAYOUT_GPU]))
def test_some_columns_of_a_packed_weight_are_one(raw: RawWeight, number: int) -> None:
    packed, blocks = pack(raw.quantized(), number), -(-raw.shape.n // 16)
    whole = raw.quantized().dequantize()
    for first, last in ((0, 1), (1, blocks), (blocks - 1, blocks + 3)):
        part = packed.columns(first, last)
        assert torch.equal(unpack(part).dequantize(), whole[:, 16 * first : 16 * last])


def test_nibbles_beyond_the_last_row_may_hold_anything() -> None:
    q = torch.randint(0, 16, (13, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    clean = QuantizedWeight(pack_nibbles(q), torch.ones(1, 5), None, 13, 13, 5)
    words = clean.qweight.clone()
    words[-1] |= -(1 << 20)
    assert torch.equal(
        pack(dataclasses.replace(clean, qweight=words), LAYOUT_GPU).weight, pack(clean, LAYOUT_GPU).weight
    )


def test_strided_sources_pack_as_contiguous_ones() -> None:
    weight = small()
    strided = dataclasses.replace(
        weight, qweight=weight.qweight.t().contiguous().t(), scales=weight.scales.t().clone().t()
    )
    assert torch.equal(pack(strided, LAYOUT_GPU).weight, pack(weight, LAYOUT_GPU).weight)
    assert torch.equal(pack(strided, LAYOUT_GPU).scales, pack(weight, LAYOUT_GPU).scales)


def small() -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (64, 24), dtype=torch.uint8, generator=generator)
    z = torch.randint(0, 16, (2, 24), dtype=torch.uint8, generator=generator)
    return QuantizedWeight(pack_nibbles(q), torch.rand(2, 24, generator=generator).half(), z, 32, 64, 24)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("layout", 3),
        ("weight", torch.zeros(2, 8, 16, dtype=torch.int32)),
        ("weight", torch.zeros(2, 3, 16, 4, dtype=torch.int32)),
        ("weight", torch.zeros(2, 2, 16, 4, dtype=torch.int64)),
        ("weight", torch.zeros(2, 2, 4, 16, dtype=torch.int32).transpose(2, 3)),
        ("scales", torch.zeros(2, 2, 16)),
        ("scales", torch.zeros(2, 24)),
        ("zeros", torch.zeros(2, 32, dtype=torch.int8)),
        ("zeros", torch.zeros(32, 2, dtype=torch.uint8).t()),
        ("perm", torch.zeros(63, dtype=torch.int32)),
    ],
)
def test_a_malformed_packed_weight_names_the_argument(argument: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=rf"^{argument}: got .*wanted"):
        dataclasses.replace(pack(small(), LAYOUT_GPU), **{argument: value})  # type: ignore[arg-type]


def test_a_layout_number_and_tensors_of_the_other_layout_do_not_pass_for_each_other() -> None:
    for made, claimed in ((LAYOUT_CPU, LAYOUT_GPU), (LAYOUT_GPU, LAYOUT_CPU)):
        with pytest.raises(ArgumentError, match=r"^weight: got shape"):
            dataclasses.replace(pack(small(), made), layout=claimed)


def test_every_device_but_the_cpu_gets_layout_2() -> None:
    named = {name: layout.layout_for(torch.device(name)) for name in ("cpu", "meta", "xpu", "xpu:1", "cuda")}
    assert named == {"cpu": 1, "meta": 1, "xpu": 2, "xpu:1": 2, "cuda": 2}


def test_the_operators_take_the_shapes_of_layout_2_apart() -> None:
    packed, weight = pack(small(), LAYOUT_GPU), small()
    ints = (64, 24, 32)
    tensors = (packed.weight, packed.scales, packed.zeros)
    q, s, z, g_idx = torch.ops.awqjit.unpack(*tensors, None, *ints, LAYOUT_GPU)
    assert torch.equal(q, weight.qweight) and torch.equal(s, weight.scales) and torch.equal(z, weight.zeros)
    assert g_idx.numel() == 0
    grad = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    grad_x = torch.ops.awqjit.int4_mm_backward(grad, *tensors, *ints, None, LAYOUT_GPU)
    torch.testing.assert_close(grad_x, grad @ weight.dequantize().t(), rtol=1e-5, atol=1e-5)


def test_compiled_graphs_know_the_shapes_on_an_xpu_without_one() -> None:
    """Fake tensors have a device and no memory: this is what torch.compile sees, not a run on an XPU."""
    weight, device = small(), torch.device("xpu:0")
    assert weight.zeros is not None
    packed = pack(weight, LAYOUT_GPU)
    shapes = [t.to("meta") for t in (weight.qweight, weight.scales, weight.zeros)]
    shapes.append(torch.empty(5, 64, dtype=torch.float16, device="meta"))
    with FakeTensorMode() as mode:
        fakes = [mode.fake_tensor_converter.from_meta_and_device(mode, t, device) for t in shapes]
        *canonical, x = fakes
        w, s, z, perm = torch.ops.awqjit.pack(*canonical, None, 32, 64)
        assert (w.shape, s.shape, z.shape) == (packed.weight.shape, packed.scales.shape, packed.scales.shape)
        assert {t.device for t in (w, s, z)} == {device} and perm.numel() == 0
        y = torch.ops.awqjit.int4_mm(x, w, s, z, None, 64, 24, 32, 16, None, LAYOUT_GPU)
        assert y.shape == (5, 24) and y.dtype == torch.float16 and y.device == device


class Moves:
    """``.to("cpu")`` stands for a move to an XPU while ``gpu`` is on; all but the device itself is as it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = False
        self.prepared: list[str] = []
        monkeypatch.setattr(modules, "layout_for", lambda device: LAYOUT_GPU if self.gpu else LAYOUT_CPU)
        monkeypatch.setattr(jit, "prepare", self.prepared.append)

    def to(self, layer: Int4Linear, gpu: bool) -> Int4Linear:
        self.gpu = gpu
        return layer.to("cpu")


@pytest.mark.parametrize("g_idx", [False, True], ids=["in order", "act-order"])
def test_a_layer_is_repacked_when_it_moves_and_says_the_same(g_idx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moves, weight = Moves(monkeypatch), small()
    if g_idx:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
        weight = dataclasses.replace(weight, g_idx=(order // 32).int())
    layer = Int4Linear.from_quantized(weight, torch.ones(24))
    before, state = layer.packed(), None if g_idx else layer.state_dict()
    assert layer.layout == LAYOUT_CPU
    moves.to(layer, gpu=True)
    assert layer.layout == LAYOUT_GPU and layer.packed_weight.shape == (2, 2, 16, 4)
    assert torch.equal(layer.quantized().dequantize(), weight.dequantize())
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.layout == LAYOUT_GPU and torch.equal(copied.packed_weight, layer.packed_weight)
    if state is not None:
        assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
        layer.load_state_dict(state)
    moves.to(layer, gpu=False)
    after = layer.packed()
    assert after.layout == LAYOUT_CPU and torch.equal(after.weight, before.weight)
    assert torch.equal(after.scales, before.scales) and torch.equal(after.zeros, before.zeros)  # type: ignore[arg-type]


def test_a_move_that_fails_leaves_the_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, layer = Moves(monkeypatch), Int4Linear.from_quantized(small())
    before, moves.gpu = layer.packed_weight, True

    def fail(tensor: Tensor) -> Tensor:
        if tensor.numel():
            raise RuntimeError("out of memory")
        return tensor

    with pytest.raises(RuntimeError, match="out of memory"):
        layer._apply(fail)
    assert layer.layout == LAYOUT_CPU and layer.packed_weight is before


def test_changing_the_dtype_repacks_nothing() -> None:
    layer = Int4Linear.from_quantized(small())
    before = layer.packed_weight
    assert layer.half().packed_weight is before and layer.packed_scales.dtype == torch.float16
