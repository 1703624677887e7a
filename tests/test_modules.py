# SPDX-License-Identifier: Apache-2.0
"""Int4Linear as a torch module: what it saves and loads, what moving and copying it changes (nothing), training."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import packers
import pytest
import torch
from test_ops import PERMUTED, RAW, G, K, N
from torch import Tensor, nn

from awqjit import jit
from awqjit.errors import ArgumentError
from awqjit.formats import FormatConfig
from awqjit.modules import Int4Linear, from_checkpoint
from awqjit.weight import QuantizedWeight, pack_nibbles

AWQ = FormatConfig("awq", 4, G, zero_point=True, version="gemm")
GPTQ_V1 = FormatConfig("gptq", 4, G, zero_point=True, version="gptq")
GPTQ_V2 = FormatConfig("gptq", 4, G, zero_point=True, version="gptq_v2")
FORMATS = {"awq": AWQ, "gptq": GPTQ_V1, "gptq_v2": GPTQ_V2}
ZEROS = {"any": RAW.dense_z.numpy(), "all 8": np.full(RAW.s.shape, 8, dtype=np.uint8)}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 21) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def checkpoint(name: str, zeros: str = "any", scale_dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """The tensors of one layer, by a packer that shares no code with the library."""
    if name == "awq":
        qweight, qzeros = packers.pack_awq(RAW.q.numpy(), ZEROS[zeros])
        extra = {}
    else:
        qweight, qzeros = packers.pack_gptq(RAW.q.numpy(), ZEROS[zeros], v2=name == "gptq_v2")
        extra = {"g_idx": (torch.arange(K) // G).int()}
    scales = RAW.s.to(scale_dtype)
    return {"qweight": torch.from_numpy(qweight), "scales": scales, "qzeros": torch.from_numpy(qzeros), **extra}


def layer_of(name: str, zeros: str = "any", bias: Tensor | None = None, **options: Any) -> Int4Linear:
    weight = from_checkpoint(checkpoint(name, zeros), FORMATS[name], G)
    return Int4Linear.from_quantized(weight, bias, format=FORMATS[name], **options)


def other_layer(name: str = "awq", bias: Tensor | None = None) -> Int4Linear:
    """A layer of the same shape with another weight."""
    weight = QuantizedWeight(pack_nibbles(15 - RAW.q), RAW.s.half() * 3, None, G, K, N)
    return Int4Linear.from_quantized(weight, bias, format=FORMATS[name])


X = randn(5, K)


# ---- what is saved and loaded -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", sorted(ZEROS))
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_state_dict_is_the_checkpoint_bit_for_bit(name: str, zeros: str) -> None:
    layer = layer_of(name, zeros, bias=randn(N))
    assert (layer.packed_zeros is None) == (zeros == "all 8")
    saved, wanted = layer.state_dict(), checkpoint(name, zeros) | {"bias": randn(N)}
    assert saved.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert saved[key].dtype == tensor.dtype, key
        assert torch.equal(saved[key], tensor), key


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_loading_a_state_dict_gives_the_same_answers(name: str, assign: bool) -> None:
    source, target = layer_of(name, bias=randn(N)), other_layer(name, bias=torch.zeros(N))
    assert not torch.equal(source(X), target(X))
    result = target.load_state_dict(source.state_dict(), assign=assign)
    assert result.missing_keys == []
    assert result.unexpected_keys == []
    assert torch.equal(source(X), target(X))
    assert torch.equal(target.state_dict()["qweight"], source.state_dict()["qweight"])


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("key", ["qweight", "scales", "qzeros"])
def test_a_missing_tensor_is_named_and_leaves_the_layer_as_it_was(name: str, key: str) -> None:
    layer = other_layer(name)
    before = layer(X)
    state = checkpoint(name)
    del state[key]
    with pytest.raises(RuntimeError, match=f'Missing key.*"0.{key}"'):
        nn.Sequential(layer).load_state_dict({f"0.{n}": t for n, t in state.items()})
    assert layer.load_state_dict(state, strict=False).missing_keys == [key]
    assert torch.equal(layer(X), before)


@pytest.mark.parametrize(("name", "key"), [("awq", "g_idx"), ("awq", "weight"), ("gptq", "weight"), ("gptq", "bias")])
def test_a_tensor_too_many_is_named(name: str, key: str) -> None:
    state = checkpoint(name) | {key: torch.zeros(K)}
    with pytest.raises(RuntimeError, match=f'Unexpected key.*"{key}"'):
        other_layer(name).load_state_dict(state)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("key", ["qweight", "scales", "qzeros"])
def test_a_tensor_of_a_wrong_shape_or_dtype_is_named_with_its_layer(name: str, key: str) -> None:
    layer = other_layer(name)
    before = layer(X)
    good = checkpoint(name)
    for bad in (good[key][:-1], good[key].to(torch.int64)):
        with pytest.raises(RuntimeError, match=r"up\.proj: ") as caught:
            model = nn.ModuleDict({"up": nn.ModuleDict({"proj": layer})})
            model.load_state_dict({f"up.proj.{n}": t for n, t in (good | {key: bad}).items()})
        assert "got " in str(caught.value)
        assert "wanted " in str(caught.value)
        assert torch.equal(layer(X), before)


def test_a_weight_of_another_size_is_refused() -> None:
    q = np.zeros((2 * K, N), dtype=np.uint8)
    qweight, qzeros = packers.pack_awq(q, np.zeros((2 * K // G, N), dtype=np.uint8))
    state = {"qweight": torch.from_numpy(qweight), "qzeros": torch.from_numpy(qzeros)}
    with pytest.raises(RuntimeError, match=f"got a weight of {2 * K} x {N}, wanted {K} x {N}"):
        other_layer().load_state_dict(state | {"scales": torch.ones(2 * K // G, N)})


def test_a_model_goes_through_a_file_with_weights_only(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LayerNorm(K), layer_of("awq", bias=randn(N)), nn.Linear(N, K), layer_of("gptq"))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh = nn.Sequential(nn.LayerNorm(K), other_layer(bias=torch.zeros(N)), nn.Linear(N, K), other_layer("gptq"))
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    with torch.no_grad():
        assert torch.equal(fresh(X), model(X))


def test_loading_from_memoryless_tensors_is_refused_by_a_layer_with_memory() -> None:
    layer = layer_of("awq")
    before = layer(X)
    with pytest.raises((RuntimeError, NotImplementedError)):
        layer.load_state_dict({n: t.to("meta") for n, t in checkpoint("awq").items()})
    assert torch.equal(layer(X), before)


# ---- moving, casting, copying -----------------------------------------------------------------------------------


def cast(how: str) -> Any:
    return {
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "double": lambda m: m.double(),
        "float": lambda m: m.float(),
        "to dtype": lambda m: m.to(torch.bfloat16),
        "to device and dtype": lambda m: m.to("cpu", torch.float16),
        "to cpu": lambda m: m.to("cpu"),
        "type": lambda m: m.type(torch.float16),
    }[how]


@pytest.mark.parametrize(
    "how", ["half", "bfloat16", "double", "float", "to dtype", "to device and dtype", "to cpu", "type"]
)
@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_casting_a_module_does_not_change_a_bit_of_the_answers(how: str, compute: str) -> None:
    layer = layer_of("awq", bias=randn(N), compute=compute)
    before, saved, bias = layer(X), layer.state_dict(), layer.bias
    model = cast(how)(nn.Sequential(nn.Sequential(layer)))
    assert torch.equal(model(X), before)
    assert layer.bias is bias  # an optimizer that holds it still does
    for name, tensor in layer.state_dict().items():
        assert tensor.dtype == saved[name].dtype
        assert torch.equal(tensor, saved[name])


def test_casting_keeps_the_gradient_of_the_bias() -> None:
    layer = layer_of("awq", bias=randn(N))
    layer.bias.requires_grad_()
    layer(X).sum().backward()
    layer.half()
    assert layer.bias.requires_grad
    assert layer.bias.grad is not None
    assert layer.bias.grad.dtype == torch.float32
    assert torch.equal(layer.bias.grad, torch.full((N,), 5.0))


@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_gives_the_same_bits_and_shares_no_memory(how: str, compute: str) -> None:
    layer = layer_of("gptq", bias=randn(N), compute=compute)
    if how == "deepcopy":
        copied = copy.deepcopy(layer)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert torch.equal(copied(X), layer(X))
    assert copied.extra_repr() == layer.extra_repr()
    assert copied.packed_weight.data_ptr() != layer.packed_weight.data_ptr()
    before = layer(X)
    copied.packed_weight.zero_()
    assert torch.equal(layer(X), before)


def test_an_act_order_layer_survives_a_copy() -> None:
    g_idx = (torch.argsort(PERMUTED) // G).int()
    layer = Int4Linear.from_quantized(QuantizedWeight(pack_nibbles(RAW.q), RAW.s, RAW.z, G, K, N, g_idx))
    oracle.expected(X, RAW.q, RAW.z, RAW.s, G, g_idx=g_idx).check(layer(X))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(X), layer(X))


def test_a_copy_with_an_unknown_layout_is_refused() -> None:
    layer = pickle.loads(pickle.dumps(layer_of("awq")))
    layer.layout = 99
    with pytest.raises(ArgumentError, match="layout: got 99"):
        layer(X)


def test_a_layer_without_memory_gets_it_from_to_empty_and_its_weight_from_a_state_dict() -> None:
    source = layer_of("awq", bias=randn(N))
    skeleton = copy.deepcopy(source).to("meta")
    assert skeleton.packed_weight.is_meta
    assert skeleton(X.to("meta")).shape == (5, N)
    filled = skeleton.to_empty(device="cpu")
    filled.load_state_dict(source.state_dict())
    assert torch.equal(filled(X), source(X))


LAYERS: dict[str, Any] = {
    "asymmetric": lambda: layer_of("awq", bias=randn(N)),
    "symmetric": lambda: layer_of("gptq", "all 8", bias=randn(N, dtype=torch.bfloat16), compute="w4a8"),
    "no bias": lambda: layer_of("gptq_v2"),
    "act-order": lambda: Int4Linear.from_quantized(
        QuantizedWeight(pack_nibbles(RAW.q), RAW.s, RAW.z, G, K, N, (torch.argsort(PERMUTED) // G).int()),
        randn(N, dtype=torch.float16),
        format=GPTQ_V1,
    ),
}


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_one_change_after_another_leaves_the_answers_as_they_were(kind: str) -> None:
    model = nn.Sequential(LAYERS[kind]())
    before, saved = model(X), model.state_dict()
    for change in (
        lambda m: m.half(),
        copy.deepcopy,
        lambda m: m.to(torch.bfloat16),
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.double().share_memory(),
        lambda m: refilled(copy.deepcopy(m).to("meta").to_empty(device="cpu"), m.state_dict()),
        lambda m: refilled(m.to_empty(device="cpu"), saved),
        lambda m: m.requires_grad_().eval().float().requires_grad_(False),
    ):
        model = change(model)
        assert torch.equal(model(X), before)
        for name, tensor in model.state_dict().items():
            assert tensor.dtype == saved[name].dtype
            assert torch.equal(tensor, saved[name])


def refilled(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    model.load_state_dict(state)
    return model


def test_other_libraries_find_the_device_of_a_layer_by_its_packed_weight() -> None:
    layer = layer_of("awq")
    assert layer.qweight is layer.packed_weight
    assert "qweight" not in dict(layer.named_buffers())


# ---- in use -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_the_layer_computes_the_definition(compute: str, dtype: torch.dtype) -> None:
    bias = randn(N, dtype=torch.bfloat16)
    layer = layer_of("awq", bias=bias, compute=compute)
    x = randn(2, 3, K, dtype=dtype)
    assert layer(x).dtype == dtype
    bits = {"w4a16": 16, "w4a8": 8}[compute]
    oracle.expected(x, RAW.q, RAW.z, RAW.s.half(), G, bias=bias, act_bits=bits).check(layer(x))
    assert (layer.act_bits, layer.compute) == (bits, compute)


def test_the_layer_says_what_it_is() -> None:
    text = repr(nn.Sequential(layer_of("gptq", bias=randn(N), compute="w4a8")))
    said = f"in_features={K}, out_features={N}, group_size={G}, bias=True, compute=w4a8, format=gptq"
    assert f"Int4Linear({said})" in text


def test_a_wrong_compute_mode_or_bias_is_refused() -> None:
    with pytest.raises(ArgumentError, match="compute: got 'w8a8', wanted 'w4a16' or 'w4a8'"):
        layer_of("awq", compute="w8a8")
    with pytest.raises(ArgumentError, match=r"bias: got shape \[23\]"):
        layer_of("awq", bias=torch.zeros(N - 1))
    with pytest.raises(ArgumentError, match=r"dtype: got torch\.float64"):
        layer_of("awq").problem(torch.float64)


def test_only_the_bias_is_a_parameter_and_it_trains_when_asked() -> None:
    layer = layer_of("awq", bias=randn(N))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert not layer(X).requires_grad
    layer.bias.requires_grad_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(X).sum().backward()
    optimizer.step()
    assert torch.allclose(layer.bias.detach(), randn(N) - 0.5 * 5)


def test_gradients_flow_through_a_frozen_layer_to_what_is_below_it() -> None:
    torch.manual_seed(0)
    below, frozen = nn.Linear(K, K), layer_of("awq")
    dense = nn.Linear(K, N, bias=False)
    dense.weight = nn.Parameter(frozen.quantized().dequantize().t().contiguous(), requires_grad=False)
    gradients = []
    for top in (frozen, dense):
        below.zero_grad()
        top(below(X)).square().sum().backward()
        assert below.weight.grad is not None
        gradients.append(below.weight.grad.clone())
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-4)
    assert not any(buffer.requires_grad for buffer in frozen.buffers())


def test_the_problems_of_a_model_are_those_of_its_layers() -> None:
    model = nn.Sequential(nn.LayerNorm(K), layer_of("awq", bias=randn(N)), nn.Linear(N, K), layer_of("awq"))
    problems = jit.problems(model, torch.bfloat16)
    assert problems == (model[1].problem(torch.bfloat16), model[3].problem(torch.bfloat16))
    assert {p.x_dtype for p in jit.problems(model)} == {"fp32"}  # as the parameters
    (only,) = jit.problems(nn.Sequential(layer_of("awq"), layer_of("awq")), torch.float16)
    assert (only.k, only.n, only.group_size, only.scale_dtype, only.symmetric, only.bias) == (
        K,
        N,
        G,
        "fp16",
        False,
        False,
    )
    with pytest.raises(ArgumentError, match="the model has no parameter"):
        jit.problems(nn.Sequential(layer_of("awq")))


def test_an_act_order_gptq_layer_reads_what_it_writes() -> None:
    g_idx = (torch.argsort(PERMUTED) // G).int()
    weight = QuantizedWeight(pack_nibbles(RAW.q), RAW.s, RAW.z, G, K, N, g_idx)
    layer = Int4Linear.from_quantized(weight, format=GPTQ_V1)
    other = other_layer("gptq")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.state_dict()["g_idx"], g_idx)
    assert torch.equal(other(X), layer(X))


@pytest.mark.parametrize(("one", "two"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_a_state_of_another_gptq_version_is_refused(one: str, two: str) -> None:
    """Both versions have tensors of the same names and shapes; their zero points differ by one."""
    layer = other_layer(two)
    before = layer(X)
    with pytest.raises(RuntimeError, match=r"the state is of gptq .*wanted gptq"):
        layer.load_state_dict(layer_of(one).state_dict())
    assert torch.equal(layer(X), before)
