# SPDX-License-Identifier: Apache-2.0
"""SYCL kernels on Intel's CPU SYCL device: a bounded pool of problems, a packer of its own, guarded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from oracle import TINY_GROUP, expected, w4a8_bits
from strategies import RawWeight, Shape
from torch import Tensor

from awqjit import cache
from awqjit.spec import Problem
from awqjit.xpu import device, kernel
from awqjit.xpu.render import kernels
from awqjit.xpu.spec import (
    DECODE,
    PREFILL,
    XpuKernel,
    XpuTarget,
    launches,
    refusal,
    rows_of,
    scratch,
    shape_of,
)

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
DTYPES = {"int8": torch.int8, "int32": torch.int32, "fp32": torch.float32}
MS = (1, 2, 3, 7, 8, 9, 33)
GUARD = 4096  # elements before and behind what a kernel may write: as far as a wrong row or column would reach


@dataclass(frozen=True)
class Case:
    """What kernels are compiled for, beside the mode."""

    shape: Shape
    x_dtype: torch.dtype
    scale_dtype: torch.dtype
    symmetric: bool
    bias: bool
    lanes: int
    matrix: bool = True

    def __str__(self) -> str:
        flags = f"{'sym' if self.symmetric else 'asym'}{'-bias' if self.bias else ''}"
        row = f"{'dpas' if self.matrix else 'scalar'}{self.lanes}"
        types = f"{NAMES[self.x_dtype]}-s{NAMES[self.scale_dtype]}"
        return f"{self.shape.k}x{self.shape.n}g{self.shape.group}-{types}-{flags}-{row}"

    def problem(self, act_bits: int) -> Problem:
        types = (NAMES[self.x_dtype], NAMES[self.scale_dtype])
        return Problem(self.shape.k, self.shape.n, self.shape.group, *types, self.symmetric, self.bias, act_bits)

    @property
    def target(self) -> XpuTarget:
        return XpuTarget("sycl_dpas", self.lanes, "emulated") if self.matrix else XpuTarget("sycl", self.lanes, None)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_SYM, _BIAS = "sym", "bias"


def _case(k: int, n: int, g: int, x: torch.dtype, s: torch.dtype, lanes: int, *flags: str) -> Case:
    return Case(Shape(k, n, g), x, s, _SYM in flags, _BIAS in flags, lanes, matrix="scalar" not in flags)


# Groups of every size in both 16-bit dtypes; N with and without a tail; K that ends inside a group, a fragment, a word;
# few groups (each is split) and many (each sub-group takes whole ones).
CASES = (
    _case(72, 17, 4, _BF16, _FP16, 16, "scalar"),
    _case(100, 40, 4, _FP16, _FP32, 8, _SYM, _BIAS, "scalar"),
    _case(100, 40, 16, _FP16, _BF16, 16, _BIAS, "scalar"),
    _case(176, 24, 16, _BF16, _BF16, 8, _SYM, "scalar"),
    _case(32, 16, 32, _BF16, _FP32, 16, _SYM),
    _case(576, 200, 32, _FP16, _FP16, 8, _BIAS),
    _case(320, 40, 64, _FP16, _FP32, 16, _BIAS),
    _case(456, 33, 64, _BF16, _BF16, 8),
    _case(300, 24, 100, _FP16, _BF16, 16, "scalar"),
    _case(700, 16, 100, _BF16, _FP16, 8, _BIAS, "scalar"),
    _case(264, 72, 128, _BF16, _FP16, 16, _BIAS),
    _case(1156, 17, 128, _FP16, _BF16, 16),
    _case(520, 24, 256, _FP16, _FP16, 8, _SYM, _BIAS),
    _case(1344, 48, 256, _BF16, _FP32, 16),
    _case(130, 24, 130, _FP16, _FP16, 16),
    _case(416, 9, 416, _BF16, _BF16, 8, _SYM, _BIAS),
    # Without a matrix unit also what one would take, and fp32, which one takes in w4a8 alone.
    _case(264, 72, 128, _BF16, _FP16, 16, _BIAS, "scalar"),
    _case(576, 33, 32, _FP32, _FP32, 8, _SYM, "scalar"),
    _case(130, 24, 130, _FP32, _FP16, 16, "scalar"),
)


def pack(q: Tensor) -> Tensor:
    """int32 [ceil(N / 16), ceil(K / 32), 16, 4]: nibble p of word j of column n is row 32 kb + 8 j + p."""
    k, n = q.shape
    full = F.pad(q, (0, -n % 16, 0, -k % 32)).long().unflatten(1, (-1, 16)).unflatten(0, (-1, 4, 8))  # kb j p nb l
    words = sum(full[:, :, p] << (4 * p) for p in range(8))
    return words.permute(2, 0, 3, 1).to(torch.int32).contiguous()


class Guarded:
    """A tensor to write to, poisoned, between guards that must not change."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        poison = float("nan") if dtype.is_floating_point else -1
        self._all = torch.full((GUARD + torch.Size(shape).numel() + GUARD,), poison, dtype=dtype)
        self._all[:GUARD] = self._all[-GUARD:] = 77
        self.tensor = self._all[GUARD:-GUARD].view(shape)

    def check(self, name: str) -> None:
        ends = torch.cat([self._all[:GUARD], self._all[-GUARD:]])
        assert bool((ends == 77).all()), f"{name}: written beyond its ends"


@dataclass(frozen=True)
class Outcome:
    """y and the temporaries of one call."""

    y: Tensor
    scratch: dict[str, Tensor]


class Bench:
    """The kernels of a case in one mode, loaded. ``change`` may edit one kernel's text first: a seeded bug."""

    def __init__(
        self, device: device.Device, case: Case, act_bits: int, change: Callable[[XpuKernel], XpuKernel] | None = None
    ) -> None:
        self.device, self.case, self.problem, self.target = device, case, case.problem(act_bits), case.target
        assert refusal(self.problem, self.target) is None
        self._kernels: dict[str, tuple[XpuKernel, int]] = {}
        for one in kernels(self.problem, self.target):
            one = change(one) if change else one
            artifact = cache.fetch(kernel.request(self.problem, self.target, one))
            self._kernels[one.name] = one, device.kernel(artifact.path.read_bytes(), one.function)

    def paths(self, m: int) -> tuple[str, ...]:
        """The kernels that can multiply m rows, whichever of them the plan prefers."""
        whole = self.case.matrix and self.problem.act_bits == 16
        return (DECODE, PREFILL) if not whole or m >= rows_of(self.problem, self.target, PREFILL) else (DECODE,)

    def run(self, path: str, x: Tensor, weight: RawWeight, bias: Tensor | None) -> Outcome:
        m = x.shape[0]
        x = self._apart(x)
        y = Guarded((m, self.problem.n), x.dtype)
        parts = {one.name: Guarded(one.shape, DTYPES[one.dtype]) for one in scratch(self.problem, self.target, m)}
        padding = (0, -self.problem.n % 16)
        tensors = {
            "x": x,
            "weight": pack(weight.q),
            "scales": F.pad(weight.s, padding),
            "zeros": None if weight.z is None else F.pad(weight.z, padding, value=255),
            "bias": None if bias is None else bias.float(),
            "y": y.tensor,
        } | {name: part.tensor for name, part in parts.items()}
        values = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        values |= {"m": m, "x_stride": x.stride(0)}
        queue, shim = self.device.queue(), self.device.shim
        for launch in launches(self.problem, self.target, m, path):
            one, handle = self._kernels[launch.kernel_name]
            scalars = [name in kernel.SCALARS for name in one.arguments]
            ranges = (launch.global_range, launch.local_range)
            shim.launch(queue, handle, ranges, [values[name] for name in one.arguments], scalars)
        shim.wait(queue)
        for name, part in {"y": y, **parts}.items():
            part.check(name)
        return Outcome(y.tensor, {name: part.tensor for name, part in parts.items()})

    def _apart(self, x: Tensor) -> Tensor:
        """x with NaN between its rows, before and behind them, aligned as the kernels ask and no better."""
        step = max(one.x_alignment for one, _ in self._kernels.values())
        m, k = x.shape
        stride = -(-k // step) * step + step
        memory = torch.full((m * stride + 2 * step,), float("nan"), dtype=x.dtype)
        apart = memory[step : step + m * stride].view(m, stride)[:, :k]
        return apart.copy_(x)

    def bits(self, path: str, x: Tensor, weight: RawWeight, bias: Tensor | None) -> Tensor:
        """w4a8: what y must be to the bit. Where sub-groups take whole groups, their parts are added in order."""
        shape, groups, g = shape_of(self.problem, self.target), self.problem.groups, self.problem.group_size
        split = not shape.split_inside and (path == DECODE or not self.case.matrix)
        slices = shape.slices if split else 1
        total: Tensor = torch.zeros(x.shape[0], self.problem.n)
        for one in range(slices):
            low, high = groups * one // slices, groups * (one + 1) // slices
            z = None if weight.z is None else weight.z[low:high]
            rows = slice(low * g, high * g)
            total = total + w4a8_bits(x[:, rows].float(), weight.q[rows], z, weight.s[low:high], g)
        if bias is not None:
            total = total + bias.float()
        return total.to(x.dtype)

    def quantised(self, outcome: Outcome, m: int) -> tuple[Tensor, Tensor]:
        """int8 [m, K] and fp32 [m, G] of a run, out of the order in which kernels keep them."""
        xq, k = outcome.scratch["xq"], self.problem.k
        if self.case.matrix:  # operands A: word w of row r of a tile is in register (8 r + w) // lanes
            lanes = self.case.lanes
            tiles = xq.flatten().view(-1, xq.shape[1] // 32, lanes, 64 // lanes, 4)  # .., .., lane, register, byte
            xq = tiles.transpose(2, 3).reshape(tiles.shape[0], tiles.shape[1], 8, 32).transpose(1, 2).flatten(0, 1)
            xq = xq.flatten(1)
        d = outcome.scratch["xd"].transpose(1, 2).flatten(0, 1)
        return xq[:m, :k], d[:m]


def edge_rows(k: int, dtype: torch.dtype) -> Tensor:
    """Rows that random ones hardly ever are: values half-way between two steps; groups just too small to be used."""
    ties = torch.arange(k) % 126 + 0.5
    ties[::3] *= -1
    ties[::4] = 127  # of every group the largest: a step is 1
    tiny = torch.full((k,), 2.0**-120)
    least = tiny.clone()
    least[::2] = 2.0**-119
    return torch.stack([ties, tiny, least]).to(dtype)


def rows_from(x: Tensor, m: int) -> Tensor:
    """m rows, those of x over and over."""
    return x[torch.arange(m) % x.shape[0]]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit but those of a NaN and the sign of a zero."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def int8_of(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """What w4a8 rounds x [m, K] to, in NumPy's correctly rounded fp32: int8 [m, K] and d, fp32 [m, G]."""
    rows = x.float().numpy()
    xq, d = np.zeros(rows.shape, dtype=np.int8), np.zeros((rows.shape[0], -(-rows.shape[1] // group_size)), np.float32)
    for group in range(d.shape[1]):
        part = rows[:, group * group_size : (group + 1) * group_size]
        amax = np.abs(part).max(axis=1, keepdims=True)
        used = np.isfinite(amax) & (amax >= np.float32(TINY_GROUP))
        safe = np.where(used, amax, np.float32(127))
        scaled = np.where(used, part, np.float32(0)) * (np.float32(127) / safe)
        xq[:, group * group_size : (group + 1) * group_size] = np.rint(scaled)
        value = np.where(used, safe / np.float32(127), np.float32(0))
        d[:, group] = np.where(np.isfinite(amax), value, np.float32(np.nan))[:, 0]
    return torch.from_numpy(xq), torch.from_numpy(d)


def check_everything(bench: Bench, x: Tensor, weight: RawWeight, bias: Tensor | None, ms: tuple[int, ...] = MS) -> None:
    """Every number of rows, in every kernel: y within the oracle's bounds; w4a8's activations and y to the bit."""
    g, act_bits = bench.problem.group_size, bench.problem.act_bits
    for m in ms:
        rows = rows_from(x, m)
        wanted = expected(rows, weight.q, weight.z, weight.s, g, bias=bias, act_bits=act_bits)
        for path in bench.paths(m):
            outcome = bench.run(path, rows, weight, bias)
            wanted.check(outcome.y)
            if act_bits == 8:
                xq, d = bench.quantised(outcome, m)
                of_x = int8_of(rows, g)
                assert torch.equal(xq, of_x[0]), f"{path}, {m} rows: int8 activations differ"
                assert same(d, of_x[1]), f"{path}, {m} rows: steps of the activations differ"
                assert same(outcome.y, bench.bits(path, rows, weight, bias)), f"{path}, {m} rows: other bits"
