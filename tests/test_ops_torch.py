# SPDX-License-Identifier: Apache-2.0
"""The operators inside torch: opcheck, gradients, compile, export, autocast, vmap, fake tensors, inference mode."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from test_ops import GOOD, PERMUTED, RAW, G, K, N, backward_arguments, call, mm_arguments, pack_arguments
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from awqjit.errors import ArgumentError
from awqjit.modules import Int4Linear

OPS = torch.ops.awqjit
PERM = PERMUTED.int()
W = RAW.quantized().dequantize(torch.float64)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 11) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


# ---- opcheck ----------------------------------------------------------------------------------------------------

OPCHECKS: list[tuple[str, dict[str, Any]]] = [
    *((name, arguments()) for name, arguments in GOOD.items()),
    ("int4_mm", mm_arguments(x=randn(2, 3, K, dtype=torch.bfloat16), zeros=None, bias=None, act_bits=8)),
    ("int4_mm", mm_arguments(x=randn(0, K), perm=PERM)),
    ("int4_mm", mm_arguments(x=randn(K, 4).t())),
    ("int4_linear", mm_arguments(x=randn(4, K).requires_grad_(), bias=None)),
    ("int4_linear", mm_arguments(x=randn(4, K).requires_grad_(), bias=randn(N).requires_grad_(), perm=PERM)),
    ("int4_linear", mm_arguments(x=randn(2, 2, K, dtype=torch.float16), bias=randn(N).requires_grad_(), act_bits=8)),
    ("int4_mm_backward", backward_arguments(grad=randn(3, N).requires_grad_(), perm=PERM)),
    ("pack", pack_arguments(zeros=None, g_idx=(PERMUTED // G).int())),
    ("pack", pack_arguments(g_idx=(torch.arange(K) // G).int())),
]


@pytest.mark.parametrize(("op", "arguments"), OPCHECKS, ids=[f"{op}-{i}" for i, (op, _) in enumerate(OPCHECKS)])
def test_opcheck_is_green(op: str, arguments: dict[str, Any]) -> None:
    results = torch.library.opcheck(getattr(OPS, op).default, tuple(arguments.values()))
    assert set(results.values()) == {"SUCCESS"}


# ---- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("perm", [None, PERM], ids=["in order", "act-order"])
def test_the_gradient_of_int4_linear_is_that_of_the_dequantized_product(act_bits: int, perm: Tensor | None) -> None:
    x, bias, grad = randn(2, 3, K).requires_grad_(), randn(N).requires_grad_(), randn(2, 3, N, seed=12)
    y = call("int4_linear", mm_arguments(x=x, bias=bias, act_bits=act_bits, perm=perm))
    assert torch.equal(y, call("int4_mm", mm_arguments(x=x.detach(), bias=bias.detach(), act_bits=act_bits, perm=perm)))
    y.backward(grad)
    dense = W
    if perm is not None:  # row j of the packed weight multiplies x[perm[j]]
        dense = torch.empty_like(W)
        dense[perm.long()] = W
    assert x.grad is not None
    assert bias.grad is not None
    wanted = grad.double() @ dense.t()
    # N fp32 products and sums of |grad| |W|: gamma(N) of their magnitude, and one rounding of W itself.
    bound = (N + 2) * 2.0**-24 * (grad.double().abs() @ dense.abs().t())
    assert ((x.grad.double() - wanted).abs() <= bound).all()
    assert torch.allclose(bias.grad.double(), grad.double().sum((0, 1)), rtol=1e-6, atol=1e-6)


def test_a_second_derivative_is_right_too() -> None:
    x, upstream = randn(3, K).requires_grad_(), randn(3, N, seed=5).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = call("int4_linear", mm_arguments(x=x))
        (grad_x,) = torch.autograd.grad(y, x, upstream, create_graph=True)
        (again,) = torch.autograd.grad(grad_x.square().sum(), upstream)
    wanted = 2 * grad_x.detach().double() @ W
    assert torch.allclose(again.double(), wanted, rtol=1e-5, atol=1e-5)


def test_int4_mm_refuses_a_gradient_and_names_the_operator_that_has_one() -> None:
    for name, changed in (("x", {"x": randn(2, K).requires_grad_()}), ("bias", {"bias": randn(N).requires_grad_()})):
        with pytest.raises(ArgumentError, match="int4_linear") as caught:
            call("int4_mm", mm_arguments(**changed))
        assert caught.value.args[0] == name
        with torch.no_grad():
            assert not call("int4_mm", mm_arguments(**changed)).requires_grad
        with torch.inference_mode():
            call("int4_mm", mm_arguments(**changed))


@pytest.mark.parametrize("op", ["int4_mm", "int4_linear", "int4_mm_backward"])
def test_scales_get_no_gradient_and_say_so(op: str) -> None:
    arguments = GOOD[op]()
    arguments["scales"].requires_grad_()
    with pytest.raises(ArgumentError, match="the weight gets no gradient"):
        call(op, arguments)


@pytest.mark.parametrize("op", ["int4_mm", "int4_linear"])
def test_a_forward_mode_derivative_is_refused_not_taken_for_zero(op: str) -> None:
    x = randn(2, K)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ArgumentError, match="no forward mode"):
            call(op, mm_arguments(x=dual))
        call(op, mm_arguments(x=x))  # no tangent, no complaint
    with pytest.raises(ArgumentError, match="no forward mode"):
        torch.func.jvp(lambda x: call(op, mm_arguments(x=x)), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("op", ["int4_mm", "int4_linear"])
def test_torch_func_grad_is_refused_with_a_way_out(op: str) -> None:
    way = {"int4_mm": "int4_linear", "int4_linear": "torch.autograd.grad"}[op]
    with pytest.raises(ArgumentError, match=way):
        torch.func.grad(lambda x: call(op, mm_arguments(x=x)).sum())(randn(2, K))


def test_int4_linear_without_gradients_is_int4_mm() -> None:
    wanted = call("int4_mm", mm_arguments())
    assert torch.equal(call("int4_linear", mm_arguments()), wanted)
    with torch.no_grad():
        assert torch.equal(call("int4_linear", mm_arguments()), wanted)
    with torch.inference_mode():
        assert torch.equal(call("int4_linear", mm_arguments()), wanted)
        assert torch.equal(call("int4_mm", mm_arguments()), wanted)


# ---- compile ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, compute: str, train: bool) -> None:
        super().__init__()
        self.first = Int4Linear.from_quantized(RAW.quantized(), randn(N), compute=compute)
        self.dense = nn.Linear(N, N).requires_grad_(train)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x)) + self.dense(self.first(torch.tanh(x)))


# torch gives one symbol to all sizes that are equal at first: no size of a weight begins these.
BATCHES = (5, 2, 3, 8, 9, 20, 65)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_one_graph_serves_every_batch(backend: str, compute: str) -> None:
    torch._dynamo.reset()
    block = Block(compute, train=False)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch in BATCHES:
            x = randn(batch, K, seed=batch)
            assert torch.allclose(compiled(x), block(x), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("act_bits", [16, 8])
def test_a_compiled_operator_gives_the_bits_of_the_eager_one(backend: str, act_bits: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    fixed = mm_arguments(act_bits=act_bits, perm=PERM)
    rest = list(fixed.values())[1:]

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def product(x: Tensor) -> Tensor:
        return OPS.int4_mm(x, *rest)

    for batch in BATCHES:
        x = randn(batch, K, seed=batch)
        assert torch.equal(product(x), call("int4_mm", {**fixed, "x": x}))
    assert counter.frame_count == 1
    strided = randn(K, 7).t()
    assert torch.equal(product(strided), call("int4_mm", {**fixed, "x": strided}))


def test_training_compiles_into_one_graph_with_the_eager_gradients() -> None:
    torch._dynamo.reset()
    block = Block("w4a16", train=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for batch in BATCHES[:3]:
        gradients = []
        for run in (compiled, block):
            x = randn(batch, K, seed=batch).requires_grad_()
            block.zero_grad()
            run(x).square().sum().backward()
            gradients.append((x.grad, block.dense.weight.grad.clone()))
        for got, wanted in zip(*gradients, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_a_bad_call_is_refused_while_it_is_traced() -> None:
    torch._dynamo.reset()
    rest = list(mm_arguments().values())[1:]
    with pytest.raises(Exception, match=r"x.*shape \[2, 49\].*\[\.\.\., 48\] \(in_features\)"):
        torch.compile(lambda x: OPS.int4_mm(x, *rest), fullgraph=True, backend="eager")(randn(2, K + 1))


# ---- export -----------------------------------------------------------------------------------------------------


def test_an_exported_program_runs_with_any_batch_and_survives_a_file(tmp_path: Any) -> None:
    block = Block("w4a16", train=False).eval()
    batch = torch.export.Dim("batch", min=1, max=512)
    with torch.no_grad():
        program = torch.export.export(block, (randn(4, K),), dynamic_shapes=({0: batch},))
    names = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert OPS.int4_mm.default in names
    path = tmp_path / "block.pt2"
    torch.export.save(program, path)
    for run in (program.module(), torch.export.load(path).module()):
        for size in (1, 4, 33):
            x = randn(size, K, seed=size)
            assert torch.allclose(run(x), block(x), rtol=1e-5, atol=1e-6)


# ---- autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["int4_mm", "int4_linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_x_and_bias_and_nothing_else(op: str, dtype: torch.dtype) -> None:
    arguments = mm_arguments()
    with torch.autocast("cpu", dtype):
        y = call(op, arguments)
        with torch.autocast("cpu", enabled=False):
            assert call(op, arguments).dtype == torch.float32
    assert y.dtype == dtype
    lowered = {**arguments, "x": arguments["x"].to(dtype), "bias": arguments["bias"].to(dtype)}
    assert torch.equal(y, call(op, lowered))  # with the scales as they were, fp32


@pytest.mark.parametrize("bad", [torch.float64, torch.int32, torch.bool])
def test_autocast_does_not_make_a_wrong_dtype_right(bad: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match=f"x: got {bad}"):
        call("int4_mm", mm_arguments(x=torch.ones(2, K, dtype=bad)))


def test_autocast_keeps_the_gradient_in_the_dtype_of_x() -> None:
    x = randn(3, K).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = call("int4_linear", mm_arguments(x=x))
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    wanted = W.sum(1).expand(3, K)
    assert torch.allclose(x.grad.double(), wanted, rtol=2.0**-7, atol=1e-6)


# ---- vmap -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["int4_mm", "int4_linear", "int4_mm_backward"])
def test_vmap_over_the_activations_is_a_batch(op: str) -> None:
    name, width = ("grad", N) if op == "int4_mm_backward" else ("x", K)
    rows = randn(4, 3, width)

    def one(x: Tensor) -> Tensor:
        return call(op, GOOD[op](**{name: x}))

    assert torch.equal(torch.func.vmap(one)(rows), one(rows))
    assert torch.equal(torch.func.vmap(one, in_dims=1)(rows), one(rows).movedim(1, 0))
    assert torch.equal(torch.func.vmap(torch.func.vmap(one))(rows), one(rows))


@pytest.mark.parametrize("op", ["int4_mm", "int4_linear"])
@pytest.mark.parametrize("argument", ["weight", "scales", "bias"])
def test_vmap_over_a_weight_is_refused(op: str, argument: str) -> None:
    stacked = torch.stack([mm_arguments()[argument]] * 2)
    with pytest.raises(ArgumentError, match="only x batched"):
        torch.func.vmap(lambda value: call(op, mm_arguments(**{argument: value})))(stacked)


# ---- fake tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(GOOD))
def test_fake_tensors_get_the_shapes_dtypes_and_strides_of_real_ones(op: str) -> None:
    real_arguments = GOOD[op]()
    real = call(op, real_arguments)
    with FakeTensorMode() as mode:
        fake = call(op, {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in real_arguments.items()})
    many = isinstance(real, tuple)
    for got, wanted in zip(fake if many else (fake,), real if many else (real,), strict=True):
        assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert got.stride() == wanted.stride()


def test_a_default_device_does_not_reach_into_the_operators() -> None:
    wanted = call("int4_mm", mm_arguments())
    arguments = mm_arguments()
    with torch.device("meta"):
        assert torch.equal(call("int4_mm", arguments), wanted)
