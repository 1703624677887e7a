# SPDX-License-Identifier: Apache-2.0
"""Problems for the Triton row, and what its kernels must give for them: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import torch
from oracle import expected, w4a8_bits
from strategies import RawWeight, Shape, _row
from torch import Tensor

from awqjit.backends.triton import TritonKernel
from awqjit.backends.triton_plan import Blocks, Plan
from awqjit.spec import Problem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DEVICE = (
    "cpu" if INTERPRETED else "cuda:0" if torch.cuda.is_available() else "xpu:0" if torch.xpu.is_available() else None
)
"""Where the kernels run: the interpreter's are on the CPU; None where there is neither it nor a GPU."""

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ROWS = (1, 2, 3, 7, 8, 9, 33)
GROUPS = (4, 16, 32, 64, 100, 128, 256, -1)
HOSTILE = ("normal", "zero", "plus_minus_127", "outlier", "subnormal_span", "edge_of_tiny", "one_hot", "nan", "inf")


def gpu_layout(weight: RawWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """The packed tensors, element by element as the layout's description has it; no code of the library."""
    shape = weight.shape
    columns, blocks = -(-shape.n // 16), -(-shape.k // 32)
    q = np.zeros((blocks * 32, columns * 16), dtype=np.uint32)
    q[: shape.k, : shape.n] = weight.q.numpy()
    words = np.zeros((columns, blocks, 16, 4), dtype=np.uint32)
    for lane in range(16):
        for word in range(4):
            for nibble in range(8):
                words[:, :, lane, word] |= q[8 * word + nibble :: 32, lane::16].T << np.uint32(4 * nibble)
    scales = torch.zeros(shape.groups, columns * 16, dtype=weight.s.dtype)
    scales[:, : shape.n] = weight.s
    zeros = None
    if weight.z is not None:
        zeros = torch.zeros(shape.groups, columns * 16, dtype=torch.uint8)
        zeros[:, : shape.n] = weight.z
    return torch.from_numpy(words.view(np.int32)), scales, zeros


def problem_of(weight: RawWeight, x: Tensor, bias: Tensor | None, act_bits: int) -> Problem:
    shape = weight.shape
    return Problem(
        shape.k,
        shape.n,
        shape.group,
        NAMES[x.dtype],
        NAMES[weight.s.dtype],
        symmetric=weight.z is None,
        bias=bias is not None,
        act_bits=act_bits,
    )


def mm(weight: RawWeight, x: Tensor, bias: Tensor | None, act_bits: int, blocks: Blocks | None = None) -> Tensor:
    """y [M, N] of the Triton kernels for x [..., K], taken as rows as the operator takes them."""
    problem = problem_of(weight, x, bias, act_bits)
    rows = x.reshape(-1, weight.shape.k)
    if rows.stride(1) != 1 and weight.shape.k != 1:
        rows = rows.contiguous()
    return run(problem, rows, *gpu_layout(weight), None if bias is None else bias.float(), blocks)


def run(
    problem: Problem,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None = None,
    blocks: Blocks | None = None,
    kernel: TritonKernel | None = None,
) -> Tensor:
    """y on the CPU; tensors that are not where the kernels run are copied there."""
    kernel = kernel or TritonKernel(problem, Plan.of(problem))
    there = [None if tensor is None else tensor.to(DEVICE) for tensor in (x, weight, scales, zeros, bias)]
    return kernel.run(*there, blocks).cpu()  # type: ignore[arg-type]


def bits(weight: RawWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """w4a8, to the bit: each slice of K as the definition has it, the slices added in order, then the bias."""
    problem = problem_of(weight, x, bias, 8)
    plan, x = Plan.of(problem), x.reshape(-1, weight.shape.k)
    if not plan.sliced(x.shape[0]):
        return w4a8_bits(x, weight.q, weight.z, weight.s, weight.shape.group, bias=bias)
    total = torch.zeros(x.shape[0], weight.shape.n)
    for first in range(0, plan.steps, plan.slice_steps):
        groups = slice(first, first + plan.slice_steps)
        k = slice(first * weight.shape.group, (first + plan.slice_steps) * weight.shape.group)
        z = None if weight.z is None else weight.z[groups]
        # float32 x, so that the slice's result is not rounded to the dtype of x
        total += w4a8_bits(x[:, k].float(), weight.q[k], z, weight.s[groups], weight.shape.group)
    if bias is not None:
        total = total + bias.float()
    return total.to(x.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit but those of a NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check(weight: RawWeight, x: Tensor, bias: Tensor | None, act_bits: int, blocks: Blocks | None = None) -> None:
    """Assert that the kernels are right: within the oracle's bound, and to the bit in w4a8."""
    y = mm(weight, x, bias, act_bits, blocks)
    assert y.is_contiguous() and y.dtype == x.dtype
    shape = weight.shape
    expected(x, weight.q, weight.z, weight.s, shape.group, bias=bias, act_bits=act_bits).check(y)
    if act_bits == 8:
        assert same(y, bits(weight, x, bias)), "w4a8 differs from the definition's bits"


def random_weight(shape: Shape, seed: int = 0, zeros: bool = True, dtype: torch.dtype = torch.float16) -> RawWeight:
    rng = np.random.default_rng(seed)
    q = torch.from_numpy(rng.integers(0, 16, (shape.k, shape.n), dtype=np.uint8))
    z = torch.from_numpy(rng.integers(0, 16, (shape.groups, shape.n), dtype=np.uint8)) if zeros else None
    s = torch.from_numpy(rng.standard_normal((shape.groups, shape.n)) * 0.01).to(dtype)
    return RawWeight(shape, q, z, s, f"seed {seed}")


def hostile_rows(count: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """x [count, K] with each kind of row in turn; the last are ties of the rounding to int8, and of 2^-120."""
    rng = np.random.default_rng(seed)
    rows = [_row(rng, HOSTILE[(i + seed) % len(HOSTILE)], k, dtype) for i in range(count)]
    ties = torch.arange(k) % 64 + 0.5
    ties[::4] = 127.0
    tiny = torch.where(torch.arange(k) < k // 2, 2.0**-120, 2.0**-118)
    return torch.stack([*rows, ties.to(dtype), tiny.to(dtype)][-count:])
