# SPDX-License-Identifier: Apache-2.0
"""The Triton row's arithmetic: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed")
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import poisoned_memory
from strategies import DTYPES, Shape, activations, biases, weights
from triton_cases import (
    DEVICE,
    GROUPS,
    ROWS,
    check,
    gpu_layout,
    hostile_rows,
    mm,
    problem_of,
    random_weight,
    run,
    same,
)

from awqjit.backends import triton as backend
from awqjit.backends.triton_plan import FEW_ROWS, TABLE, Blocks, Plan, regime
from awqjit.errors import TritonError
from awqjit.layout import LAYOUT_GPU, pack

if DEVICE is None:
    pytest.skip("no GPU, and Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_every_number_of_rows_with_hostile_rows_among_them(group: int, dtype: torch.dtype, act_bits: int) -> None:
    k = {4: 70, 16: 136, 32: 264, 64: 264}.get(group, 520)  # no multiple of the group: the last one is short
    shape = Shape(k, 88 if dtype == torch.float16 else 67, k if group == -1 else group)
    seed = 10 * group + act_bits
    weight = random_weight(shape, seed & 0xFF, zeros=group % 3 != 1, dtype=DTYPES[(group + act_bits) % 3])
    x, bias = hostile_rows(33, k, dtype, seed & 7), torch.randn(shape.n, generator=torch.Generator().manual_seed(1))
    for m in ROWS:
        check(weight, x[33 - m :], bias if m % 2 else None, act_bits)


@settings(max_examples=60)
@given(data=st.data(), act_bits=st.sampled_from([16, 8]))
def test_any_weight_times_any_activations(data: st.DataObject, act_bits: int) -> None:
    """Groups of 1, 7 and 130 rows, K that is no multiple of 8, N of 1 and 17; every dtype of x, scales and bias."""
    weight = data.draw(weights())
    x, bias = data.draw(activations(weight.shape.k)), data.draw(biases(weight.shape.n))
    if x.numel() == 0:
        assert mm(weight, x, bias, act_bits).shape == (0, weight.shape.n)
        return
    check(weight, x, bias, act_bits)


@pytest.mark.parametrize("group", [1, 3, 7, 13, 33, 130, 260])
def test_groups_that_start_inside_a_word(group: int) -> None:
    weight = random_weight(Shape(261 if group > 7 else 61, 24, group))
    for act_bits, dtype in ((16, torch.bfloat16), (8, torch.float16), (16, torch.float32)):
        for m in (3, 18):
            check(weight, hostile_rows(m, weight.shape.k, dtype), None, act_bits)


@pytest.mark.parametrize("part", TABLE)
@pytest.mark.parametrize("act_bits", [16, 8])
def test_all_blocks_of_the_table_are_right(part: str, act_bits: int) -> None:
    """w4a8: to the bit, so that they agree with one another too."""
    rows = {"few rows": 9, "many rows": 70}[part]
    assert regime(rows) == part
    weight = random_weight(Shape(320, 150, 64), seed=3)
    x = hostile_rows(rows, 320, torch.bfloat16)
    for blocks in TABLE[part]:
        check(weight, x, None, act_bits, blocks)


def test_few_rows_are_summed_in_slices_of_k_and_many_are_not() -> None:
    weight = random_weight(Shape(1024, 48, 32))
    x = torch.randn(40, 1024, generator=torch.Generator().manual_seed(2))
    plan = Plan.of(problem_of(weight, x, None, 16))
    assert plan.slices > 1 and plan.sliced(FEW_ROWS) and not plan.sliced(FEW_ROWS + 1)
    for act_bits in (16, 8):
        few = mm(weight, x[:FEW_ROWS], None, act_bits)
        for m in (1, 5):
            assert same(mm(weight, x[:m], None, act_bits), few[:m]), "a row depends on how many there are"
        many = mm(weight, x, None, act_bits)
        assert not same(few, many[:FEW_ROWS])
        if act_bits == 8:  # w4a16: the interpreter multiplies with BLAS, whose sums depend on M
            assert same(mm(weight, x[:20], None, act_bits), many[:20])


def test_long_groups_have_exact_int32_sums() -> None:
    """127 * 15 * 17000 is over 2^24: an odd sum would be lost in fp32."""
    weight = random_weight(Shape(17000, 16, 17000))
    weight.q[:, 0], weight.z[:] = 15, 0  # type: ignore[index]
    x = torch.full((2, 17000), 127.0)
    x[0, -1] = 1.0
    x[1] = torch.randn(17000, generator=torch.Generator().manual_seed(3))
    for act_bits in (16, 8):
        check(weight, x, None, act_bits)


def test_rounding_of_activations_is_the_definitions_ties_included() -> None:
    """xq and d themselves, for rows of ties, of tiny and of subnormal numbers, and rows that are not finite."""
    k, group = 96, 40
    weight = random_weight(Shape(k, 16, group))
    ties = torch.arange(k) % 64 + 0.5
    ties[::group] = 127.0
    x = torch.stack([ties, -ties, *hostile_rows(18, k, torch.float32)])
    problem = problem_of(weight, x, None, 8)
    xq, units = (out.cpu() for out in backend.TritonKernel(problem, Plan.of(problem))._quantized(x.to(DEVICE)))
    assert xq.shape == (20, 96) and units.shape == (3, 20)
    for row in range(20):
        for g in range(3):
            part = x[row, g * group : (g + 1) * group].numpy()
            amax = np.abs(part).max()
            if not np.isfinite(amax):
                assert units[g, row].isnan()
                continue
            tiny = amax < 2.0**-119
            unit = np.float32(0) if tiny else amax / np.float32(127)
            wanted = np.rint(part * (np.float32(127) / amax)) if not tiny else np.zeros_like(part)
            assert units[g, row].item() == unit
            assert np.array_equal(xq[row, g * group : (g + 1) * group].numpy(), wanted.astype(np.int8))
    assert xq[0, 1:5].tolist() == [2, 2, 4, 4]  # 1.5, 2.5, 3.5, 4.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_that_are_no_ordinary_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    named = [0.0, -0.0, info.tiny, -info.tiny / 4, info.max, -info.max, -1.5, torch.inf, -torch.inf, torch.nan]
    s = torch.tensor(named).to(dtype).reshape(1, -1)
    weight = random_weight(Shape(8, s.shape[1], 8), zeros=False)
    weight = replace(weight, q=torch.full_like(weight.q, 9), s=s)
    x = torch.zeros(1, 8)
    x[0, 0] = 127.0
    for act_bits in (16, 8):
        assert same(mm(weight, x, None, act_bits), 127.0 * s.float())


def test_neither_weight_nor_activations_are_read_past_their_end() -> None:
    """What lies behind them is NaN, or nibbles and scales of an absurd kind."""
    for shape in (Shape(100, 33, 100), Shape(131, 16, 64), Shape(61, 16, 7)):
        weight = random_weight(shape)
        moved = []
        for tensor, absurd in zip(gpu_layout(weight), (-1, torch.nan, 255), strict=True):
            assert tensor is not None
            wide = torch.full((tensor.numel() + 512,), absurd, dtype=tensor.dtype, device=DEVICE)
            wide[: tensor.numel()] = tensor.flatten()
            moved.append(wide[: tensor.numel()].view(tensor.shape))
        for act_bits in (16, 8):
            wide = torch.full((22, shape.k + 9), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            x = wide[1:20, 5 : 5 + shape.k]
            x.copy_(torch.randn(19, shape.k, generator=torch.Generator().manual_seed(4)))
            problem = problem_of(weight, x, None, act_bits)
            y = run(problem, x, *moved)
            assert same(y, mm(weight, x.cpu(), None, act_bits)) and not y.isnan().any()


def test_nibbles_past_k_are_ignored() -> None:
    weight = random_weight(Shape(45, 16, 15))
    words, scales, zeros = gpu_layout(weight)
    dirty = words.clone()
    dirty[:, 1, :, 1] |= -1 << 20  # rows 45 to 47 of word 5
    dirty[:, 1, :, 2:] = -1
    x = torch.randn(3, 45, generator=torch.Generator().manual_seed(5))
    for act_bits in (16, 8):
        problem = problem_of(weight, x, None, act_bits)
        assert same(run(problem, x, dirty, scales, zeros), run(problem, x, words, scales, zeros))


@pytest.mark.parametrize("shape", [Shape(100, 33, 32), Shape(131, 16, 64), Shape(61, 7, 7)], ids=str)
def test_the_library_packs_what_the_kernels_read(shape: Shape) -> None:
    for weight in (random_weight(shape), random_weight(shape, zeros=False)):
        packed = pack(weight.quantized(), LAYOUT_GPU)
        for ours, wanted in zip((packed.weight, packed.scales, packed.zeros), gpu_layout(weight), strict=True):
            assert (ours is None) == (wanted is None)
            assert ours is None or torch.equal(ours, wanted)


# ---- before it is trusted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_self_test_passes(dtype: str, act_bits: int) -> None:
    assert backend.obstacle(DEVICE, act_bits, dtype) is None


@pytest.fixture
def fresh() -> Iterator[None]:
    backend.obstacle.cache_clear()
    yield
    backend.obstacle.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_device_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = backend.TritonKernel.run

    def wrong(*args: object) -> torch.Tensor:
        y = right(*args)  # type: ignore[arg-type]
        y[1, 7] += 1
        return y

    monkeypatch.setattr(backend.TritonKernel, "run", wrong)
    weight = random_weight(Shape(64, 16, 32))
    problem = problem_of(weight, torch.zeros(1, 64), None, 16)
    with pytest.raises(TritonError, match="1 of 144 results of a small test problem are wrong on "):
        backend.TritonKernel.load(problem, DEVICE)


@pytest.mark.usefixtures("fresh")
def test_whatever_triton_raises_becomes_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(backend.TritonKernel, "run", fail)
    problem = problem_of(random_weight(Shape(64, 16, 32)), torch.zeros(1, 64), None, 8)
    with pytest.raises(TritonError, match=r"^triton does not work here: RuntimeError: Failed to find C compiler\.$"):
        backend.TritonKernel.load(problem, DEVICE)


def test_blocks_are_tuned_once_a_bucket_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[tuple[str, int]] = []

    class Tuner:
        def __init__(self, part: str) -> None:
            self.part = part

        def __getitem__(self, grid: object) -> object:
            def run(*args: object, **constants: object) -> None:
                best = TABLE[self.part][1]
                tuned.append((self.part, args[15]))  # type: ignore[arg-type]
                self.best_config = SimpleNamespace(
                    kwargs={"BLOCK_M": best.rows, "BLOCK_N": best.columns},
                    num_warps=best.warps,
                    num_stages=best.stages,
                )
                backend._kernels().multiply[grid](*args, **constants, **backend._options(best))

            return run

    monkeypatch.setattr(backend, "_tuner", Tuner)
    monkeypatch.setattr(
        backend.TritonKernel, "_known", lambda self, device, rows: self.tuned.get((device.index, backend.bucket(rows)))
    )
    weight = random_weight(Shape(64, 16, 32))
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(6))
    problem = problem_of(weight, x, None, 8)
    kernel = backend.TritonKernel(problem, Plan.of(problem))
    for m in (1, 16, 3, 17, 32, 70, 65):
        assert same(
            run(problem, x[:m], *gpu_layout(weight), kernel=kernel), mm(weight, x[:m], None, 8, Blocks(64, 64, 4, 3))
        )
    assert tuned == [("few rows", 16), ("many rows", 32), ("many rows", 128)]
