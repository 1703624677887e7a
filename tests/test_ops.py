# SPDX-License-Identifier: Apache-2.0
"""The operators called directly: results against the oracle, and an error of its own for every bad argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import packers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, RawWeight, Shape, activations, with_strides
from torch import Tensor

from awqjit.errors import ArgumentError, FormatError
from awqjit.layout import PackedWeight, pack
from awqjit.weight import QuantizedWeight, pack_nibbles

SHAPE = Shape(48, 24, 16)
K, N, G = SHAPE.k, SHAPE.n, SHAPE.group
_rng = np.random.default_rng(7)
RAW = RawWeight(
    SHAPE,
    q=torch.from_numpy(_rng.integers(0, 16, (K, N), dtype=np.uint8)),
    z=torch.from_numpy(_rng.integers(0, 16, (SHAPE.groups, N), dtype=np.uint8)),
    s=torch.from_numpy(_rng.uniform(0.002, 0.03, (SHAPE.groups, N)).astype(np.float32)),
    name="seed 7",
)
PERMUTED = torch.from_numpy(_rng.permutation(K))  # int64: the row of W that each packed row holds
OPS = torch.ops.awqjit
META = torch.device("meta")


def packed_weight() -> PackedWeight:
    return pack(RAW.quantized())


def weight_arguments() -> dict[str, Any]:
    packed = packed_weight()
    return {"weight": packed.weight, "scales": packed.scales, "zeros": packed.zeros}


def mm_arguments(**changed: Any) -> dict[str, Any]:
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((5, K)).astype(np.float32))
    arguments = {"x": x, **weight_arguments(), "bias": torch.linspace(-1, 1, N), "in_features": K, "out_features": N}
    arguments |= {"group_size": G, "act_bits": 16, "perm": None, "layout": 1}
    return arguments | changed


def backward_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {"grad": torch.ones(5, N), **weight_arguments(), "in_features": K, "out_features": N, "group_size": G}
    return arguments | {"perm": None, "layout": 1} | changed


def pack_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {"qweight": pack_nibbles(RAW.q), "scales": RAW.s, "zeros": RAW.z, "g_idx": None, "group_size": G}
    return arguments | {"in_features": K} | changed


def awq_arguments(**changed: Any) -> dict[str, Any]:
    qweight, qzeros = packers.pack_awq(RAW.q.numpy(), RAW.dense_z.numpy())
    arguments = {"qweight": torch.from_numpy(qweight), "scales": RAW.s, "qzeros": torch.from_numpy(qzeros)}
    return arguments | {"group_size": G} | changed


def unpack_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {**weight_arguments(), "perm": None, "in_features": K, "out_features": N, "group_size": G, "layout": 1}
    return arguments | changed


GOOD: dict[str, Callable[..., dict[str, Any]]] = {
    "int4_mm": mm_arguments,
    "int4_linear": mm_arguments,
    "int4_mm_backward": backward_arguments,
    "pack": pack_arguments,
    "pack_awq": awq_arguments,
    "unpack": unpack_arguments,
}


def call(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(OPS, name)(*arguments.values())


def shape_of(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"


# ---- good arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_bits", [16, 8])
@settings(max_examples=60, deadline=None)
@given(x=activations(K, max_rows=20), bias_dtype=st.sampled_from(DTYPES))
def test_x_of_any_strides_rows_and_dtype_gives_a_fresh_contiguous_result(
    act_bits: int, x: Tensor, bias_dtype: torch.dtype
) -> None:
    bias = torch.linspace(-1, 1, N).to(bias_dtype)
    before = x.clone()
    y = call("int4_mm", mm_arguments(x=x, bias=bias, act_bits=act_bits))
    assert y.shape == (*x.shape[:-1], N)
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert y.untyped_storage().nbytes() == y.numel() * y.element_size()  # nobody else's memory, nor a view of more
    assert torch.equal(x.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
    oracle.expected(x, RAW.q, RAW.z, RAW.s, G, bias=bias, act_bits=act_bits).check(y)


@pytest.mark.parametrize("shape", [(K,), (0, K), (3, 0, K), (1, K), (2, 3, K), (1, 1, 1, 2, K)])
def test_x_may_have_any_number_of_dimensions_and_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(shape).astype(np.float32))
    y = call("int4_mm", mm_arguments(x=x))
    assert y.shape == (*shape[:-1], N)
    oracle.expected(x, RAW.q, RAW.z, RAW.s, G, bias=torch.linspace(-1, 1, N)).check(y)


def test_rows_do_not_depend_on_their_strides() -> None:
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((6, K))).to(torch.bfloat16)
    plain = call("int4_mm", mm_arguments(x=x))
    for kind in ("row_gap", "transposed", "every_other"):
        assert torch.equal(call("int4_mm", mm_arguments(x=with_strides(x, kind))), plain), kind


def test_a_lazily_negated_view_is_negated() -> None:
    x = torch.complex(torch.zeros(3, K), torch.linspace(-1, 1, 3 * K).reshape(3, K)).conj().imag
    assert x.is_neg()
    y = call("int4_mm", mm_arguments(x=x, bias=None))
    assert torch.equal(y, call("int4_mm", mm_arguments(x=x.clone().resolve_neg(), bias=None)))
    oracle.expected(x.resolve_neg(), RAW.q, RAW.z, RAW.s, G).check(y)


def test_tensors_that_start_anywhere_in_memory_give_the_same_bits() -> None:
    def shifted(tensor: Tensor) -> Tensor:
        view = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        return view.copy_(tensor)

    for rows in (1, 5, 30):
        for act_bits in (16, 8):
            x = torch.linspace(-2, 2, rows * K).reshape(rows, K).to(torch.bfloat16)
            arguments = mm_arguments(x=x, act_bits=act_bits)
            moved = {n: shifted(a) if isinstance(a, Tensor) else a for n, a in arguments.items()}
            assert torch.equal(call("int4_mm", moved), call("int4_mm", arguments))


def test_zeros_and_perm_without_elements_mean_none() -> None:
    none = call("int4_mm", mm_arguments(zeros=None, perm=None))
    empty = {"zeros": torch.empty(0, dtype=torch.uint8), "perm": torch.empty(0, dtype=torch.int32)}
    assert torch.equal(call("int4_mm", mm_arguments(**empty)), none)
    oracle.expected(mm_arguments()["x"], RAW.q, None, RAW.s, G, bias=torch.linspace(-1, 1, N)).check(none)
    got = call("unpack", unpack_arguments(**empty))
    assert [list(t.shape) for t in got[2:]] == [[0], [0]]
    packed = call("pack", pack_arguments(zeros=torch.empty(0, dtype=torch.uint8), g_idx=torch.empty(0)))
    assert [list(t.shape) for t in packed[2:]] == [[0], [0]]


def test_group_size_minus_one_is_one_group() -> None:
    scales, zeros = RAW.s[:1].contiguous(), RAW.dense_z[:1].contiguous()
    one = QuantizedWeight(pack_nibbles(RAW.q), scales, zeros, K, K, N)
    got = call("pack", pack_arguments(scales=scales, zeros=zeros, group_size=-1))
    wanted = pack(one)
    assert torch.equal(got[0], wanted.weight)
    assert torch.equal(got[1], wanted.scales)
    x = mm_arguments()["x"]
    y = OPS.int4_mm(x, got[0], got[1], got[2], None, K, N, -1)
    assert torch.equal(y, OPS.int4_mm(x, got[0], got[1], got[2], None, K, N, K))
    oracle.expected(x, RAW.q, zeros, scales, K).check(y)


@pytest.mark.parametrize("act_bits", [16, 8])
def test_act_order_gives_what_the_oracle_gives(act_bits: int) -> None:
    g_idx = (torch.argsort(PERMUTED) // G).to(torch.int32)
    weight, scales, zeros, perm = call("pack", pack_arguments(g_idx=g_idx))
    assert perm.numel() == K
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((7, K)).astype(np.float32))
    for rows in (x, with_strides(x, "transposed"), x[0]):
        y = OPS.int4_mm(rows, weight, scales, zeros, None, K, N, G, act_bits, perm)
        oracle.expected(rows, RAW.q, RAW.z, RAW.s, G, act_bits=act_bits, g_idx=g_idx).check(y)
    back = OPS.unpack(weight, scales, zeros, perm, K, N, G)
    assert torch.equal(back[0], pack_nibbles(RAW.q))
    assert torch.equal(back[3], g_idx)


def test_pack_and_pack_awq_agree_and_unpack_inverts_them() -> None:
    straight, canonical = call("pack_awq", awq_arguments()), call("pack", pack_arguments())
    for got, wanted in zip(straight, canonical, strict=False):
        assert torch.equal(got, wanted)
    qweight, scales, zeros, g_idx = call("unpack", unpack_arguments())
    assert torch.equal(qweight, pack_nibbles(RAW.q))
    assert torch.equal(scales, RAW.s)
    assert torch.equal(zeros, RAW.dense_z)
    assert g_idx.numel() == 0


def test_results_share_no_memory_with_arguments() -> None:
    for name in ("pack", "pack_awq", "unpack"):
        arguments = GOOD[name]()
        given = {t.untyped_storage().data_ptr() for t in arguments.values() if isinstance(t, Tensor)}
        for result in call(name, arguments):
            assert result.numel() == 0 or result.untyped_storage().data_ptr() not in given


# ---- bad arguments ----------------------------------------------------------------------------------------------


def column_major(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


_W = packed_weight()
assert _W.zeros is not None
# argument, a bad value, what the message says of it, a part of what it says was wanted
PACKED_FAULTS: list[tuple[str, Any, str, str]] = [
    ("weight", _W.weight.long(), "torch.int64", "torch.int32"),
    ("weight", _W.weight[:1], "[1, 6, 16]", "[2, 6, 16]"),
    ("weight", _W.weight[None], "[1, 2, 6, 16]", "[2, 6, 16]"),
    ("weight", torch.empty(0, dtype=torch.int32), "[0]", "[2, 6, 16]"),
    ("weight", column_major(_W.weight), "strides [96, 1, 6]", "contiguous"),
    ("scales", _W.scales.double(), "torch.float64", "torch.bfloat16"),
    ("scales", _W.scales[:, :1].contiguous(), "[2, 1, 16]", "[2, 3, 16]"),
    ("scales", column_major(_W.scales), "strides [48, 1, 3]", "contiguous"),
    ("scales", _W.scales.to(META), "device meta", "device cpu"),
    ("zeros", _W.zeros.to(torch.int8), "torch.int8", "torch.uint8"),
    ("zeros", _W.zeros[..., :8].contiguous(), "[2, 3, 8]", "[2, 3, 16]"),
    ("zeros", column_major(_W.zeros), "strides [48, 1, 3]", "contiguous"),
    ("zeros", _W.zeros.to(META), "device meta", "device cpu"),
    ("perm", PERMUTED, "torch.int64", "torch.int32"),
    ("perm", PERMUTED[1:].int(), "[47]", "[48]"),
    ("perm", PERMUTED.int()[None], "[1, 48]", "[48]"),
    ("perm", torch.stack([PERMUTED.int()] * 2, dim=1)[:, 0], "strides [2]", "contiguous"),
    ("perm", PERMUTED.int().to(META), "device meta", "device cpu"),
    ("perm", torch.full((K,), K, dtype=torch.int32), f"values {K} to {K}", f"each of 0 to {K - 1} once"),
    ("perm", torch.full((K,), -1, dtype=torch.int32), "values -1 to -1", f"each of 0 to {K - 1} once"),
    ("perm", torch.full((K,), 2**31 - 1, dtype=torch.int32), "2147483647", f"each of 0 to {K - 1} once"),
    ("in_features", 0, "0", "at least 1"),
    ("in_features", -1, "-1", "at least 1"),
    ("in_features", -(2**63), str(-(2**63)), "at least 1"),
    ("out_features", 0, "0", "at least 1"),
    ("out_features", -8, "-8", "at least 1"),
    ("group_size", 0, "0", "1 to in_features=48"),
    ("group_size", -2, "-2", "1 to in_features=48"),
    ("group_size", -(2**63), str(-(2**63)), "1 to in_features=48"),
    ("group_size", K + 1, "49", "1 to in_features=48"),
    ("group_size", 2**63 - 1, str(2**63 - 1), "1 to in_features=48"),
    ("layout", 0, "0", "1 or 2: this version"),
    ("layout", 3, "3", "1 or 2: this version"),
    ("layout", -1, "-1", "1 or 2: this version"),
]
FAULTS: list[tuple[str, str, Any, str, str]] = [
    *((op, *fault) for op in ("int4_mm", "int4_linear", "int4_mm_backward", "unpack") for fault in PACKED_FAULTS),
    *(
        (op, *fault)
        for op in ("int4_mm", "int4_linear")
        for fault in (
            ("x", torch.ones(5, K - 1), shape_of(torch.ones(5, K - 1)), "[..., 48] (in_features)"),
            ("x", torch.ones(5, K + 1), shape_of(torch.ones(5, K + 1)), "[..., 48] (in_features)"),
            ("x", torch.ones(K, 5), shape_of(torch.ones(K, 5)), "[..., 48] (in_features)"),
            ("x", torch.ones(5, 0), "shape [5, 0]", "[..., 48] (in_features)"),
            ("x", torch.ones(0), "shape [0]", "[..., 48] (in_features)"),
            ("x", torch.tensor(1.0), "shape []", "[..., 48] (in_features)"),
            ("x", torch.ones(5, K).double(), "torch.float64", "torch.bfloat16 or torch.float16 or torch.float32"),
            ("x", torch.ones(5, K).int(), "torch.int32", "torch.bfloat16"),
            ("x", torch.ones(5, K).bool(), "torch.bool", "torch.bfloat16"),
            ("x", torch.ones(5, K).to(torch.complex64), "torch.complex64", "torch.bfloat16"),
            ("x", torch.ones(5, K).to(torch.float8_e4m3fn), "torch.float8_e4m3fn", "torch.bfloat16"),
            ("x", torch.ones(5, K, device=META), "device meta", "device cpu"),
            ("bias", torch.ones(N - 1), "[23]", "[24]"),
            ("bias", torch.ones(1), "[1]", "[24]"),
            ("bias", torch.ones(0), "[0]", "[24]"),
            ("bias", torch.tensor(1.0), "shape []", "[24]"),
            ("bias", torch.ones(1, N), "[1, 24]", "[24]"),
            ("bias", torch.ones(N).double(), "torch.float64", "torch.bfloat16"),
            ("bias", torch.ones(N, device=META), "device meta", "device cpu"),
            ("act_bits", 4, "4", "16 (w4a16) or 8 (w4a8)"),
            ("act_bits", 0, "0", "16 (w4a16) or 8 (w4a8)"),
            ("act_bits", -8, "-8", "16 (w4a16) or 8 (w4a8)"),
            ("act_bits", 2**63 - 1, str(2**63 - 1), "16 (w4a16) or 8 (w4a8)"),
            ("in_features", K + 8, "[2, 6, 16]", "[2, 7, 16]"),
            ("in_features", K - 1, "shape [5, 48]", "[..., 47] (in_features)"),  # packs into as many words
            ("in_features", 2**62, "[2, 6, 16]", "16]"),
            ("out_features", N + 16, "[2, 6, 16]", "[3, 6, 16]"),
            ("out_features", N + 1, "[24]", "[25]"),  # packs into as many blocks
            ("out_features", 2**62, "[2, 6, 16]", "16]"),
        )
    ),
    ("int4_mm_backward", "grad", torch.ones(5, K), "shape [5, 48]", "[..., 24] (out_features)"),
    ("int4_mm_backward", "grad", torch.tensor(1.0), "shape []", "[..., 24] (out_features)"),
    ("int4_mm_backward", "grad", torch.ones(5, N).long(), "torch.int64", "torch.bfloat16"),
    ("int4_mm_backward", "grad", torch.ones(5, N, device=META), "device meta", "device cpu"),
    ("int4_mm_backward", "perm", torch.zeros(K, dtype=torch.int32), "1 of them distinct", "each of 0 to 47 once"),
    ("unpack", "perm", torch.zeros(K, dtype=torch.int32), "1 of them distinct", "each of 0 to 47 once"),
    ("pack", "qweight", pack_nibbles(RAW.q).long(), "torch.int64", "torch.int32"),
    ("pack", "qweight", pack_nibbles(RAW.q)[:-1], "[5, 24]", "[6, 24]"),
    ("pack", "qweight", torch.tensor(1, dtype=torch.int32), "shape []", "[6, 24]"),
    ("pack", "qweight", pack_nibbles(RAW.q).to(META), "device cpu", "device meta"),
    ("pack", "scales", RAW.s.double(), "torch.float64", "torch.float16"),
    ("pack", "scales", RAW.s[0], "shape [24]", "[groups, out_features]"),
    ("pack", "scales", RAW.s[:2], "[2, 24]", "[3, 24]"),
    ("pack", "scales", RAW.s[:, :0], "0", "at least 1"),
    ("pack", "scales", RAW.s.to(META), "device meta", "device cpu"),
    ("pack", "zeros", RAW.dense_z.int(), "torch.int32", "torch.uint8"),
    ("pack", "zeros", RAW.dense_z[:, 1:], "[3, 23]", "[3, 24]"),
    ("pack", "zeros", torch.full_like(RAW.dense_z, 16), "a zero point of 16", "0 to 15"),
    ("pack", "zeros", RAW.dense_z.to(META), "device meta", "device cpu"),
    ("pack", "g_idx", PERMUTED, "torch.int64", "torch.int32"),
    ("pack", "g_idx", torch.zeros(K - 1, dtype=torch.int32), "[47]", "[48]"),
    ("pack", "g_idx", torch.full((K,), 3, dtype=torch.int32), "groups 3 to 3", "0 to 2"),
    ("pack", "g_idx", torch.full((K,), -1, dtype=torch.int32), "groups -1 to -1", "0 to 2"),
    ("pack", "g_idx", torch.zeros(K, dtype=torch.int32, device=META), "device meta", "device cpu"),
    ("pack", "group_size", 0, "0", "1 to in_features=48"),
    ("pack", "group_size", -2, "-2", "1 to in_features=48"),
    ("pack", "group_size", 2**63 - 1, str(2**63 - 1), "1 to in_features=48"),
    ("pack", "in_features", 0, "0", "at least 1"),
    ("pack", "in_features", -K, "-48", "at least 1"),
    ("pack", "in_features", 2**63 - 1, "[6, 24]", "24]"),
    ("pack_awq", "qweight", awq_arguments()["qweight"].long(), "torch.int64", "torch.int32"),
    ("pack_awq", "qweight", awq_arguments()["qweight"][0], "[3]", "2-D"),
    ("pack_awq", "qweight", torch.empty(0, 3, dtype=torch.int32), "[0, 3]", "at least 1"),
    ("pack_awq", "scales", RAW.s.int(), "torch.int32", "torch.float16"),
    ("pack_awq", "scales", RAW.s[:2], "[2, 24]", "[3, 24]"),
    ("pack_awq", "scales", RAW.s[0], "[24]", "[3, 24]"),
    ("pack_awq", "scales", RAW.s.to(META), "device meta", "device cpu"),
    ("pack_awq", "qzeros", awq_arguments()["qzeros"].to(torch.uint8), "torch.uint8", "torch.int32"),
    ("pack_awq", "qzeros", awq_arguments()["qzeros"][:, :1], "[3, 1]", "[3, 3]"),
    ("pack_awq", "qzeros", awq_arguments()["qzeros"].to(META), "device meta", "device cpu"),
    ("pack_awq", "group_size", 0, "0", "-1 or at least 1"),
    ("pack_awq", "group_size", -2, "-2", "-1 or at least 1"),
]
# A mismatch is found where two arguments meet: the message may name the other one.
NAMED_INSTEAD = {
    ("in_features", "[2, 6, 16]"): "weight",
    ("in_features", "shape [5, 48]"): "x",
    ("in_features", "[6, 24]"): "qweight",
    ("out_features", "[2, 6, 16]"): "weight",
    ("out_features", "[24]"): "bias",
    ("qweight", "device cpu"): "scales",
    ("scales", "0"): "out_features",
}


def check_refusal(op: str, arguments: dict[str, Any], named: str, got: str, wanted: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(op, arguments)
    name, said_got, said_wanted = caught.value.args
    assert name == named
    assert got in said_got
    assert wanted in said_wanted
    assert str(caught.value) == f"{name}: got {said_got}, wanted {said_wanted}"


@pytest.mark.parametrize(
    ("op", "argument", "bad", "got", "wanted"),
    FAULTS,
    ids=[f"{op}-{argument}-{got[:24]}-{i}" for i, (op, argument, _, got, _) in enumerate(FAULTS)],
)
def test_a_bad_argument_is_named_with_what_it_was_and_what_was_wanted(
    op: str, argument: str, bad: Any, got: str, wanted: str
) -> None:
    named = NAMED_INSTEAD.get((argument, got), argument)
    check_refusal(op, GOOD[op](**{argument: bad}), named, got, wanted)
    # Good calls in between must not make the bad one pass: what was checked before is remembered.
    call(op, GOOD[op]())
    check_refusal(op, GOOD[op](**{argument: bad}), named, got, wanted)


@pytest.mark.parametrize("op", GOOD)
def test_good_arguments_of_every_operator_are_taken(op: str) -> None:
    call(op, GOOD[op]())


# Faults of data, of a device, and of strides that moving to another device would mend.
_NOT_ON_META = ("a zero point", "groups ", "values ", "2147483647", "1 of them distinct", "device ", "strides [2]")
ON_META = [fault for fault in FAULTS if not fault[3].startswith(_NOT_ON_META)]


@pytest.mark.parametrize(
    ("op", "argument", "bad", "got", "wanted"),
    ON_META,
    ids=[f"{op}-{argument}-{got[:24]}-{i}" for i, (op, argument, _, got, _) in enumerate(ON_META)],
)
def test_arguments_without_data_are_checked_alike(op: str, argument: str, bad: Any, got: str, wanted: str) -> None:
    arguments = {
        name: value.to(META) if isinstance(value, Tensor) else value
        for name, value in GOOD[op](**{argument: bad}).items()
    }
    if op == "pack":
        arguments["g_idx"] = arguments["g_idx"] if argument == "g_idx" else None
    check_refusal(op, arguments, NAMED_INSTEAD.get((argument, got), argument), got, wanted)


def test_a_group_of_unequal_size_is_refused_by_pack() -> None:
    with pytest.raises(FormatError, match="g_idx puts"):
        call("pack", pack_arguments(g_idx=torch.zeros(K, dtype=torch.int32)))


# ---- corruptions at random --------------------------------------------------------------------------------------

_FUZZ_INTS = st.one_of(
    st.sampled_from([0, -1, -2, 1, 7, 8, 16, 17, 23, 24, 25, 40, 47, 48, 49, 64, 2**31, 2**62, 2**63 - 1, -(2**63)]),
    st.integers(-(2**63), 2**63 - 1),
)


def _device(tensor: Tensor) -> Tensor:
    return tensor.to(META)


_TENSOR_DAMAGE: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda t: None,
    "empty": lambda t: t.new_empty(0),
    "scalar": lambda t: t.flatten()[0],
    "flat": lambda t: t.flatten(),
    "one more dimension": lambda t: t[None],
    "shorter first": lambda t: t[1:],
    "shorter last": lambda t: t[..., 1:],
    "longer last": lambda t: torch.cat([t, t[..., :1]], dim=-1),
    "doubled": lambda t: torch.cat([t, t]),
    "transposed": lambda t: t.transpose(0, -1),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "expanded": lambda t: t[:1].expand(t.shape),
    "float64": lambda t: t.double(),
    "int32": lambda t: t.int(),
    "uint8": lambda t: t.to(torch.uint8),
    "bf16": lambda t: t.to(torch.bfloat16),
    "fp32": lambda t: t.float(),
    "complex": lambda t: t.to(torch.complex64),
    "meta": _device,
}
# Schemas do not let these be None.
_REQUIRED = ("x", "grad", "weight", "scales", "qweight")


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data(), op=st.sampled_from(sorted(GOOD)))
def test_random_corruptions_are_refused_or_give_what_they_say(data: st.DataObject, op: str) -> None:
    arguments = GOOD[op]()
    for name in data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=3, unique=True)):
        value = arguments[name]
        if isinstance(value, int):
            arguments[name] = data.draw(_FUZZ_INTS, label=name)
            continue
        if value is None:
            value = PERMUTED.int()
        kind = data.draw(st.sampled_from([k for k in _TENSOR_DAMAGE if k != "none" or name not in _REQUIRED]), name)
        arguments[name] = _TENSOR_DAMAGE[kind](value)
    try:
        result = call(op, arguments)
    except (ArgumentError, FormatError):
        return
    if any(isinstance(value, Tensor) and value.is_meta for value in arguments.values()):
        assert all(value.is_meta for value in arguments.values() if isinstance(value, Tensor))
        return
    if op in ("int4_mm", "int4_linear"):
        # What was taken must be a whole, other call: the result is the definition's, computed by other code.
        _check_product(arguments, result)
    elif op == "int4_mm_backward":
        q, z, s, g_idx = _canonical(arguments)
        wanted = arguments["grad"].double() @ dequantized(q, z, s, _group(arguments), g_idx).T
        scale = wanted.abs().max().clamp(min=1e-3) * (0.02 if arguments["grad"].dtype == torch.bfloat16 else 1e-4)
        assert ((result.double() - wanted).abs() <= scale).all()
    else:
        assert result[0].numel() > 0


def _group(arguments: dict[str, Any]) -> int:
    return arguments["in_features"] if arguments["group_size"] == -1 else arguments["group_size"]


def _canonical(arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """q, z, s and g_idx read out of packed tensors, word by word, as layout 1 is documented."""
    k, n, group = arguments["in_features"], arguments["out_features"], _group(arguments)
    words = arguments["weight"].numpy().astype(np.int64) % (1 << 32)
    q = torch.zeros(k, n, dtype=torch.uint8)
    padded = -(-min(group, k) // 8) * 8
    perm = arguments["perm"]
    row_of = torch.arange(k) if perm is None or perm.numel() == 0 else perm.long()
    for j in range(k):
        at = j // group * padded + j % group
        nibble = (0, 4, 1, 5, 2, 6, 3, 7)[at % 8]
        column = (words[:, at // 8, :] >> (4 * nibble)) & 15
        q[row_of[j]] = torch.from_numpy(column.reshape(-1)[:n].astype(np.uint8))

    def rows(blocked: Tensor) -> Tensor:
        return torch.cat(list(blocked), dim=1)[:, :n]

    g_idx = torch.empty(k, dtype=torch.long)
    g_idx[row_of] = torch.arange(k) // group
    zeros = arguments["zeros"]
    return q, None if zeros is None or zeros.numel() == 0 else rows(zeros), rows(arguments["scales"]), g_idx


def dequantized(q: Tensor, z: Tensor | None, s: Tensor, group: int, g_idx: Tensor | None = None) -> Tensor:
    """float64 [K, N], by the definition alone."""
    groups = torch.arange(q.shape[0]) // group if g_idx is None else g_idx
    centred = q.double() - (8.0 if z is None else z[groups].double())
    return centred * s[groups].double()


def _check_product(arguments: dict[str, Any], result: Tensor) -> None:
    q, z, s, g_idx = _canonical(arguments)
    oracle.expected(
        arguments["x"], q, z, s, _group(arguments), bias=arguments["bias"], act_bits=arguments["act_bits"], g_idx=g_idx
    ).check(result)
    assert result.shape == (*arguments["x"].shape[:-1], arguments["out_features"])
