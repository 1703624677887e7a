# SPDX-License-Identifier: Apache-2.0
"""The operator on Intel GPUs: which row is chosen and why not, the self-test, and the whole way on a CPU as the device.

No XPU takes part. With the wheels installed, everything from selection to launch runs for real on Intel's CPU SYCL
device; only torch's stream and the matrix unit's own instruction are not what an XPU has.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_select import problems
from torch import Tensor
from xpu_host import needs_wheels

from awqjit import Int4Linear, config, jit, machine, modules, ops, reference, select
from awqjit.backends.dense import DenseKernel
from awqjit.cli.info import explain_problems
from awqjit.errors import ArgumentError, AwqJitWarning, KernelRefusedError, MissingDependencyError, SyclError
from awqjit.layout import LAYOUT_GPU, PackedWeight, pack
from awqjit.machine import Machine, Xpu
from awqjit.spec import Problem
from awqjit.weight import QuantizedWeight, pack_nibbles
from awqjit.xpu import device, selftest, wheels
from awqjit.xpu.kernel import SyclKernel
from awqjit.xpu.spec import XpuTarget, refusal

K, N, G = selftest.K, selftest.N, selftest.GROUP
"""The self-test's sizes: its kernels are compiled anyway."""

BATTLEMAGE, ALCHEMIST = Xpu("Arc B580", 16, True), Xpu("Arc A770", 8, True)
ALDER_LAKE, WITHOUT = Xpu("UHD 770", 8, False), Xpu("Arc B580", 16, True, no_sycl="no wheels")
W4A16 = Problem(4096, 11008, 128, "bf16", "fp16", symmetric=False, bias=False, act_bits=16)


def with_xpu(xpu: Xpu) -> Machine:
    return Machine("x86_64", "Linux", "a CPU", frozenset(), xpu=xpu, no_xpu="")


def rows(problem: Problem, here: Machine) -> dict[str, str | None]:
    verdicts = select.explain(problem, here, "xpu")
    return {verdict.row.name: verdict.reason for verdict in verdicts}


def test_the_table_is_ordered_best_first_with_torch_last() -> None:
    assert list(rows(W4A16, with_xpu(BATTLEMAGE))) == ["sycl_dpas", "sycl", "triton", "torch"]


@pytest.mark.parametrize(
    "xpu, changed, chosen, reason",
    [
        (BATTLEMAGE, {}, "sycl_dpas", None),
        (ALCHEMIST, {"act_bits": 8}, "sycl_dpas", None),
        (BATTLEMAGE, {"group_size": 4096}, "sycl_dpas", None),
        (BATTLEMAGE, {"act_bits": 8, "x_dtype": "fp32"}, "sycl_dpas", None),
        (BATTLEMAGE, {"x_dtype": "fp32"}, "sycl", "the matrix unit takes no fp32 activations"),
        (BATTLEMAGE, {"group_size": 16}, "sycl", "groups of 16 rows are no multiple of 32"),
        (BATTLEMAGE, {"group_size": 100, "act_bits": 8}, "sycl", "groups of 100 rows are no multiple of 32"),
        (ALDER_LAKE, {}, "sycl", "UHD 770 has no DPAS"),
        (WITHOUT, {}, None, "no wheels"),
    ],
)
def test_the_best_row_that_a_device_can_run_is_chosen(
    xpu: Xpu, changed: dict[str, Any], chosen: str | None, reason: str | None
) -> None:
    problem, here = dataclasses.replace(W4A16, **changed), with_xpu(xpu)
    assert rows(problem, here)["sycl_dpas"] == reason
    if chosen is not None:
        assert select.choose(problem, here, "xpu").name == chosen
    else:
        assert rows(problem, here)["sycl"] == reason and rows(problem, here)["torch"] is None


@given(problem=problems(), lanes=st.sampled_from([16, 8]))
def test_selection_and_the_kernels_refuse_the_same_problems(problem: Problem, lanes: int) -> None:
    here = with_xpu(dataclasses.replace(BATTLEMAGE, lanes=lanes))
    for row, leaf in (("sycl_dpas", "visa"), ("sycl", None)):
        assert (rows(problem, here)[row] is None) == (refusal(problem, XpuTarget(row, lanes, leaf)) is None)


def test_without_a_device_every_row_says_so() -> None:
    here = device.describe(machine.detect())
    if here.xpu is not None:
        pytest.skip("NOT TESTED: this machine has an XPU")
    assert set(rows(W4A16, here).values()) == {device.absent()}
    (explained,) = explain_problems([W4A16], "xpu")
    assert [row["kernel"] for row in explained["rows"]] == ["sycl_dpas", "sycl", "triton", "torch"]
    assert all(row["reason"] == device.absent() and not row["chosen"] for row in explained["rows"])
    with pytest.raises(ArgumentError, match=r"^device: got 'npu', wanted cpu or xpu"):
        explain_problems([W4A16], "npu")
    with pytest.raises(SyclError, match="xpu:7"):
        device.get("xpu:7")


@pytest.mark.parametrize(
    "sizes, dpas, lanes", [([16, 32], True, 16), ([8, 16, 32], True, 8), ([8, 16, 32], False, 8), ([32], True, 16)]
)
def test_facts_are_read_from_torchs_properties(sizes: list[int], dpas: bool, lanes: int) -> None:
    given = SimpleNamespace(name="X", sub_group_sizes=sizes, has_subgroup_matrix_multiply_accumulate=dpas)
    assert device.facts_of(given) == Xpu("X", lanes, dpas)
    assert device.facts_of(object()).dpas is False


def weight(zeros: bool = True, g_idx: bool = False, scales: torch.dtype = torch.float16) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(3)
    groups = -(-K // G)
    return QuantizedWeight(
        pack_nibbles(torch.randint(0, 16, (K, N), dtype=torch.uint8, generator=generator)),
        (torch.rand(groups, N, generator=generator) * 0.02 - 0.01).to(scales),
        torch.randint(0, 16, (groups, N), dtype=torch.uint8, generator=generator) if zeros else None,
        G,
        K,
        N,
        (torch.randperm(K, generator=generator) // G).int() if g_idx else None,
    )


def activations(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)


def mm(x: Tensor, packed: PackedWeight, act_bits: int, bias: Tensor | None = None) -> Tensor:
    tensors = (packed.weight, packed.scales, packed.zeros, bias)
    y: Tensor = torch.ops.awqjit.int4_mm(x, *tensors, K, N, G, act_bits, packed.perm, LAYOUT_GPU)
    return y


def close(found: Tensor, x: Tensor, of: QuantizedWeight, act_bits: int, bias: Tensor | None = None) -> None:
    wanted = reference.int4_mm(x, of, bias, act_bits)
    assert found.dtype == x.dtype and found.shape == wanted.shape and found.is_contiguous()
    step = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-7}[x.dtype]
    size = (x.abs().float() @ of.dequantize().abs()).clamp(min=1e-6)
    assert ((found.float() - wanted.float()).abs() <= step * size).all()


def test_the_cpu_does_not_take_layout_2() -> None:
    with pytest.raises(ArgumentError, match=r"^layout: got 2 on the CPU, wanted 1"):
        mm(activations(1, torch.float32), pack(weight(), LAYOUT_GPU), 16)


# ---- without the wheels: an invented device, so that what happens around the kernels is tested everywhere


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> Iterator[device.Device]:
    """CPU tensors in layout 2 are taken for an XPU's, whose wheels seem to be there. It cannot run anything."""
    monkeypatch.setattr(wheels, "find", lambda: None)
    monkeypatch.setattr(selftest, "SELFTESTS", selftest.Selftests())
    made = device.Device(device.CPU, BATTLEMAGE, 1)
    monkeypatch.setitem(device._devices, device.CPU, made)
    yield made
    ops.forget()


def test_a_missing_wheel_is_the_one_error_of_every_use(
    invented: device.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise MissingDependencyError("intel-sycl-rt", wheels.FEATURE, wheels.INSTALL)

    monkeypatch.setattr(wheels, "find", missing)
    packed = pack(weight(), LAYOUT_GPU)
    monkeypatch.setattr(modules, "layout_for", lambda _: LAYOUT_GPU)
    layer = Int4Linear.from_quantized(weight())
    for use in (lambda: mm(activations(1, torch.float16), packed, 16), lambda: jit.prepare(device.CPU)):
        with pytest.raises(MissingDependencyError, match=r"pip install awqjit\[xpu\]"):
            use()
    assert layer.layout == 1
    with config.override(kernel="torch"):  # asked for by name, it needs no wheel
        x = activations(3, torch.float16)
        close(mm(x, packed, 16), x, weight(), 16)


@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_last_row_dequantises_and_multiplies(invented: device.Device, act_bits: int, dtype: torch.dtype) -> None:
    bias = torch.linspace(-1, 1, N)
    with config.override(kernel="torch"):
        for rows in (0, 1, 9):
            x = activations(rows, dtype)
            close(mm(x, pack(weight(), LAYOUT_GPU), act_bits, bias), x, weight(), act_bits, bias)
        assert {type(choice.kernel) for choice in jit.choices()} == {DenseKernel}


class Wrong:
    """Kernels that compute right but for one element of a large batch."""

    name, origin, seconds = "sycl_dpas", "built", 0.0

    def __init__(self, problem: Problem, row: str, on: device.Device) -> None:
        self.problem, self.row, self.device = problem, row, on

    def __call__(self, x: Tensor, *packed: Tensor | None) -> Tensor:
        y = DenseKernel(self.problem, "")(x, *packed)  # type: ignore[arg-type]
        if self.row == "sycl_dpas" and x.shape[0] > 8:
            y[-1, -1] += 1
        return y


def test_a_row_that_fails_its_self_test_is_passed_over_with_one_warning(
    invented: device.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest.SyclKernel, "load", Wrong)
    packed, x = pack(weight(), LAYOUT_GPU), activations(3, torch.float16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jit.prepare(device.CPU)
        for _ in range(2):
            close(mm(x, packed, 16), x, weight(), 16)
    (text,) = [str(entry.message) for entry in caught if entry.category is AwqJitWarning]
    assert (
        "the self-test of sycl_dpas on Arc B580 failed: 1 of 1600 results for 40 rows are wrong; y[39, 39] is" in text
    )
    assert "sycl is used" in text
    assert {choice.kernel.row for choice in jit.choices()} == {"sycl"}  # type: ignore[attr-defined]


def test_when_no_row_passes_the_weight_is_dequantised_and_the_warning_says_why(
    invented: device.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(problem: Problem, row: str, on: device.Device) -> Any:
        raise SyclError("the device does not take the kernel", f"{row} is beyond it")

    monkeypatch.setattr(selftest.SyclKernel, "load", broken)
    x = activations(3, torch.bfloat16)
    with pytest.warns(AwqJitWarning, match="in plain torch .*sycl_dpas is beyond it.*sycl is beyond it") as caught:
        close(mm(x, pack(weight(), LAYOUT_GPU), 16), x, weight(), 16)
    assert len(caught) == 1
    with config.override(kernel="sycl"), pytest.raises(SyclError, match="sycl is beyond it"):
        ops.forget()
        mm(x, pack(weight(), LAYOUT_GPU), 16)


def test_rows_of_the_cpu_cannot_be_forced_on_an_xpu(invented: device.Device) -> None:
    with config.override(kernel="avx2"), pytest.raises(KernelRefusedError, match="no such row; rows: sycl_dpas, sycl"):
        mm(activations(1, torch.float16), pack(weight(), LAYOUT_GPU), 16)


def test_gradients_come_through_layout_2(invented: device.Device) -> None:
    packed, x = pack(weight(), LAYOUT_GPU), activations(4, torch.float32).requires_grad_()
    with config.override(kernel="torch"):
        tensors = (packed.weight, packed.scales, packed.zeros, None)
        torch.ops.awqjit.int4_linear(x, *tensors, K, N, G, 16, None, LAYOUT_GPU).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight().dequantize().sum(1).expand(4, K), rtol=1e-4, atol=1e-4)


# ---- with the wheels: the whole way


ROWS_AND_MODES = [
    ("sycl_dpas", 16, torch.float16, 16), ("sycl_dpas", 8, torch.bfloat16, 16), ("sycl", 16, torch.float32, 16),
    ("sycl", 8, torch.float16, 16), ("sycl_dpas", 16, torch.bfloat16, 8),
]  # fmt: skip
IDS = [f"{row}-w4a{bits}-{jit.DTYPE_NAMES[dtype]}-{lanes}" for row, bits, dtype, lanes in ROWS_AND_MODES]
every_row = pytest.mark.parametrize("row, act_bits, dtype, lanes", ROWS_AND_MODES, ids=IDS)


@needs_wheels
@every_row
def test_the_whole_way_on_a_cpu(row: str, act_bits: int, dtype: torch.dtype, lanes: int) -> None:
    of = weight()
    packed = pack(of, LAYOUT_GPU)
    with device.cpu_as_xpu(lanes, dpas=row == "sycl_dpas"):
        ops.forget()
        for rows in (0, 1, 2, 7, 33):
            x = activations(rows, dtype)
            close(mm(x, packed, act_bits), x, of, act_bits)
        (choice,) = jit.choices()
        assert choice.kernel.name == row and choice.device == device.CPU and isinstance(choice.kernel, SyclKernel)
        assert choice.origin in ("built", "cache")
        # Strides, rows that begin anywhere, more dimensions: what the operator takes on the CPU it takes here.
        wide = activations(7, dtype).repeat(1, 3)
        by_column = activations(7, dtype).t().contiguous().t()
        for x in (wide[:, 1 : K + 1], wide[::2, :K], wide[:1, 3 : K + 3], wide[:1].expand(5, -1)[:, :K], by_column):
            close(mm(x, packed, act_bits), x.contiguous(), of, act_bits)
        many = activations(6, dtype).view(2, 3, K)
        assert torch.equal(mm(many, packed, act_bits).view(6, N), mm(many.view(6, K), packed, act_bits))
        lost = activations(3, dtype)
        lost[1, 5] = torch.nan
        y = mm(lost, packed, act_bits)
        assert y[1].isnan().all() and torch.equal(y[::2], mm(lost[::2], packed, act_bits))


@needs_wheels
def test_results_of_both_sycl_rows_and_the_cpus_are_the_same_in_w4a8() -> None:
    of, x, found = weight(), activations(9, torch.float16), []
    for dpas in (True, False):
        with device.cpu_as_xpu(16, dpas):
            ops.forget()
            found.append(mm(x, pack(of, LAYOUT_GPU), 8))
    cpu = pack(of)
    assert cpu.zeros is not None
    found.append(torch.ops.awqjit.int4_mm(x, cpu.weight, cpu.scales, cpu.zeros, None, K, N, G, 8))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@needs_wheels
def test_a_layer_moves_computes_and_moves_back(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Int4Linear.from_quantized(weight(g_idx=True)), activations(5, torch.float16)
    monkeypatch.setattr(modules, "layout_for", lambda _: LAYOUT_GPU)
    with device.cpu_as_xpu() as on:
        layer.to("cpu")  # stands for an XPU
        assert layer.computes_on == device.CPU and layer.packed_perm is not None
        (choice,) = jit.warm(layer, dtype=torch.float16, show_progress=False)
        assert choice.kernel.device is on  # type: ignore[attr-defined]
        close(layer(x), x, weight(g_idx=True), 16)
        monkeypatch.undo()
    assert layer.to("cpu").layout == 1


@needs_wheels
def test_freed_memory_is_refused() -> None:
    packed = pack(weight(), LAYOUT_GPU)
    packed.scales.untyped_storage().resize_(0)
    with device.cpu_as_xpu(), pytest.raises(ArgumentError, match=r"^scales: got a tensor whose storage has been freed"):
        mm(activations(2, torch.float16), packed, 16)
