# SPDX-License-Identifier: Apache-2.0
"""Whole layers and models in torch.compile, torch.export and AOTInductor, in this process and in another one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_ops import GOOD, RAW, K, N, call, mm_arguments
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from awqjit.errors import ArgumentError
from awqjit.modules import Int4Linear

OPS = torch.ops.awqjit
# Not 1, which torch always compiles as it is. torch gives one symbol to all sizes that are equal at first: no size of a
# weight is among them.
LENGTHS = (5, 7, 2, 3, 4, *range(9, 16), *range(17, 22), 33, 65, 130)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 31) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


class Net(nn.Module):
    """Two int4 layers, one of them in a residual; nothing else that rounds."""

    def __init__(self, compute: str = "w4a16", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = Int4Linear.from_quantized(RAW.quantized(), randn(N, dtype=dtype), compute=compute)
        self.second = Int4Linear.from_quantized(RAW.quantized(), compute=compute)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(torch.relu(x)) + self.second(x)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- torch.compile ----------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "cpp_wrapper": {"options": {"cpp_wrapper": True}},
    "max-autotune": {"mode": "max-autotune"},
    "freezing": {"options": {"freezing": True}},
}


def test_there_are_twenty_lengths() -> None:
    assert len(set(LENGTHS)) == len(LENGTHS) == 20
    assert not {K, N, 1} & set(LENGTHS)


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_a_compiled_module_gives_eager_bits_at_twenty_lengths_without_recompiling(way: str, compute: str) -> None:
    net = Net(compute, torch.bfloat16)
    compiled = torch.compile(net, fullgraph=True, **WAYS[way])
    with torch.no_grad():
        for index, length in enumerate(LENGTHS):
            x = randn(length, K, dtype=torch.bfloat16, seed=length)
            # The first length is compiled as it is, the second one for all.
            with torch._dynamo.config.patch(error_on_recompile=index >= 2):
                found = compiled(x)
            assert torch.equal(found, net(x)), length


def test_one_graph_serves_all_lengths_when_told_that_they_vary() -> None:
    net, counter = Net(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for length in LENGTHS:
            x = randn(2, length, K, seed=length)
            assert torch.equal(compiled(x), net(x))
    assert counter.frame_count == 1


def test_training_through_inductor_gives_eager_gradients() -> None:
    net = Net()
    compiled = torch.compile(net, fullgraph=True, dynamic=True)
    for length in LENGTHS[:3]:
        gradients = []
        for run in (compiled, net):
            x = randn(length, K, seed=length).requires_grad_()
            run(x).square().sum().backward()
            gradients.append(x.grad)
        assert torch.allclose(*gradients, rtol=1e-5, atol=1e-5)


def test_autocast_inside_a_compiled_graph_lowers_as_it_does_in_eager_mode() -> None:
    net = Net()

    def lowered(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    compiled = torch.compile(lowered, fullgraph=True, dynamic=True)
    with torch.no_grad():
        x = randn(5, K)
        assert compiled(x).dtype == torch.bfloat16
        assert torch.equal(compiled(x), lowered(x))


def test_a_graph_of_fx_computes_and_refuses_to_train() -> None:
    net = Net()
    traced = torch.fx.symbolic_trace(net)
    x = randn(5, K)
    with torch.no_grad():
        assert torch.equal(traced(x), net(x))
    with pytest.raises(ArgumentError, match="int4_linear"):
        traced(x.requires_grad_())


@pytest.mark.parametrize("op", sorted(GOOD))
def test_functionalization_changes_nothing(op: str) -> None:
    arguments = GOOD[op]()
    found = torch.func.functionalize(lambda: call(op, arguments))()
    wanted = call(op, arguments)
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else ((found, wanted),)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("op", sorted(GOOD))
def test_the_meta_device_gives_shapes(op: str) -> None:
    arguments = GOOD[op]()
    real = call(op, arguments)
    meta = call(op, {n: a.to("meta") if isinstance(a, Tensor) else a for n, a in arguments.items()})
    many = isinstance(real, tuple)
    for found, wanted in zip(meta if many else (meta,), real if many else (real,), strict=True):
        assert found.is_meta
        assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


# ---- torch.export and AOTInductor -------------------------------------------------------------------------------

BATCH = torch.export.Dim("batch", min=1, max=256)


def exported(net: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    with torch.no_grad():
        return torch.export.export(net.eval(), (randn(5, K, dtype=dtype),), dynamic_shapes=({0: BATCH},))


# Reads a compiled or exported model and what it is to compute, and says whether it does. `import awqjit` is all that a
# process needs to know the operators.
READER = """
import sys
import awqjit, torch
path, cases = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
run = torch._inductor.aoti_load_package(path) if sys.argv[3] == "aoti" else torch.export.load(path).module()
for x, wanted in cases:
    found = run(x)
    assert torch.equal(found, wanted), (x.shape, (found - wanted).abs().max())
print("equal", len(cases))
"""


def read_elsewhere(package: Path, kind: str, net: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Run a package in a process of its own, and compare the bits."""
    with torch.no_grad():
        cases = [(x, net(x)) for x in (randn(size, K, dtype=dtype, seed=size) for size in (1, 5, 64, 256))]
    torch.save(cases, folder / "cases.pt")
    done = subprocess.run(
        [sys.executable, "-c", READER, str(package), str(folder / "cases.pt"), kind],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal", "4"]


@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_an_exported_model_computes_the_same_bits_in_another_process(compute: str, tmp_path: Path) -> None:
    net = Net(compute, torch.bfloat16)
    program = exported(net, torch.bfloat16)
    assert sum(node.target is OPS.int4_mm.default for node in program.graph.nodes) == 2
    torch.export.save(program, tmp_path / "net.pt2")
    read_elsewhere(tmp_path / "net.pt2", "export", net, tmp_path, torch.bfloat16)


@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_an_ahead_of_time_compiled_model_computes_the_same_bits_here_and_in_another_process(
    compute: str, tmp_path: Path
) -> None:
    net = Net(compute, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        package = torch._inductor.aoti_compile_and_package(
            exported(net, torch.bfloat16), package_path=str(tmp_path / "net.pt2")
        )
    run = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for size in (1, 2, 33):
            x = randn(size, K, dtype=torch.bfloat16, seed=size)
            assert torch.equal(run(x), net(x))
    read_elsewhere(Path(package), "aoti", net, tmp_path, torch.bfloat16)


def test_a_model_of_another_layout_is_refused_wherever_it_runs(tmp_path: Path) -> None:
    """As a file would be that a later version wrote."""
    program = exported(Net())
    for node in program.graph.nodes:
        if node.target is OPS.int4_mm.default:
            node.kwargs = {**node.kwargs, "layout": 99}
    torch.export.save(program, tmp_path / "net.pt2")
    later = torch.export.load(tmp_path / "net.pt2").module()
    with pytest.raises(ArgumentError, match="layout: got 99"):
        later(randn(5, K))
    with pytest.raises(Exception, match=r"ArgumentError\W+layout\W+(got )?99"):  # in torch's words
        torch.compile(later, fullgraph=True)(randn(5, K))


@pytest.mark.parametrize("layout", [0, 99])
@pytest.mark.parametrize("op", ["int4_mm", "int4_linear", "int4_mm_backward", "unpack"])
def test_operators_refuse_a_layout_they_do_not_know(op: str, layout: int) -> None:
    arguments = GOOD[op]() | {"layout": layout}
    with pytest.raises(ArgumentError, match=f"layout: got {layout}"):
        call(op, arguments)
    with pytest.raises(ArgumentError, match=f"layout: got {layout}"):
        call(op, {n: a.to("meta") if isinstance(a, Tensor) else a for n, a in arguments.items()})


# ---- whole models -----------------------------------------------------------------------------------------------


def test_a_whole_model_compiles_without_recompiling_after_the_second_length(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from int4_folders import write_int4
    from models import write_float

    import awqjit

    folder = write_int4(
        write_float(tmp_path / "float", num_hidden_layers=1, vocab_size=160, max_position_embeddings=512),
        tmp_path / "int4",
    )
    model = awqjit.from_pretrained(folder, dtype=torch.float32, progress=False)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for index, length in enumerate(LENGTHS):
            ids = torch.randint(0, 160, (1, length), generator=torch.Generator().manual_seed(length))
            # As of a module: the first two lengths may compile, and none after them.
            with torch._dynamo.config.patch(error_on_recompile=index >= 2):
                found = compiled(ids, use_cache=False).logits
            assert torch.allclose(found, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_mm_arguments_are_those_of_the_schema() -> None:
    names = [argument.name for argument in OPS.int4_mm.default._schema.arguments]
    assert [name for name in names if name in mm_arguments()] == list(mm_arguments())
