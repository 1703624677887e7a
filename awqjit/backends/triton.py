# SPDX-License-Identifier: Apache-2.0
"""The row for GPUs: kernels that Triton compiles and caches itself, for CUDA and XPU tensors.

The kernels are in :mod:`awqjit.backends.triton_kernels`, how a problem is cut up in
:mod:`awqjit.backends.triton_plan`. Triton is imported when the first kernel is asked for.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from awqjit import config, reference
from awqjit.backends.triton_plan import TABLE, Blocks, Plan, bucket, regime
from awqjit.errors import TritonError
from awqjit.machine import Machine
from awqjit.spec import Problem
from awqjit.weight import QuantizedWeight, ceil_div

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_QUANTIZE_BLOCK = 1024  # elements of x that a program rounds at a time
_ADD_BLOCK = 1024  # elements of y that a program adds the slices of

_EXACT = {"enable_fp_fusion": False}
"""Launch options: the compiler forms no fused multiply-adds but those that the kernels ask for."""

_KEY = ("columns", "depth", "bucket", "GROUP", "INT8")
"""Arguments of a launch that is tuned by itself; Triton adds the dtypes of the tensors."""

_tuning = threading.Lock()
"""Held while Triton tunes: its tuner keeps the arguments of the call in itself."""


@dataclass(frozen=True, eq=False)
class TritonKernel:
    """A problem, run by Triton's kernels. Calling it is thread-safe.

    Attributes:
        problem: what it computes.
        plan: how it is cut up.
        seconds: time that getting Triton ready took.
        tuned: (device index, bucket of rows) -> what was found fastest.
    """

    problem: Problem
    plan: Plan
    seconds: float = 0.0
    tuned: dict[tuple[int | None, int], Blocks] = field(default_factory=dict)
    name: str = "triton"

    @classmethod
    def load(cls, problem: Problem, device: str) -> TritonKernel:
        """Make ready what the problem needs, and try Triton on the device once per process, mode and dtype.

        Args:
            problem: what is to be computed.
            device: the tensors' device, "cuda:0" or "xpu:0" for example.

        Raises:
            TritonError: Triton cannot be imported, fails on the device, or computes something else there; or
                ``AWQJIT_JIT=0``.
        """
        start = time.perf_counter()
        if not config.JIT.read():
            raise TritonError(f"{config.JIT.name}=0 forbids compiling")
        reason = obstacle(device, problem.act_bits, problem.x_dtype)
        if reason is not None:
            raise TritonError(reason)
        return cls(problem, Plan.of(problem), time.perf_counter() - start)

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
        """y = x W + bias, on the stream that is current on the tensors' device. Does not wait for it.

        The first call for a number of rows of another bucket (see :mod:`awqjit.backends.triton_plan`) compiles and
        times what the table holds for it, unless Triton's cache knows the outcome.

        Args:
            x: [M, K] of the problem's dtype, any row stride, unit column stride.
            weight: int32 [B, ceil(K / 32), 16, 4] with B = ceil(N / 16): word j of a column's four holds k = 8 j to
                8 j + 7 of the block's 32, lowest nibble first; nibbles past K are ignored.
            scales: fp16, bf16 or fp32 [G, 16 B], G the number of groups; 0 past column N.
            zeros: uint8 [G, 16 B], or None when each is 8.
            bias: fp32 [N], contiguous, or None.

        Returns:
            [M, N] of x's dtype, contiguous.
        """
        return self.run(x, weight, scales, zeros, bias)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        blocks: Blocks | None = None,
    ) -> Tensor:
        """As a call; ``blocks``, if given, is used instead of what is tuned."""
        problem, plan, rows = self.problem, self.plan, x.shape[0]
        if rows == 0:
            return x.new_empty((0, problem.n))
        kernels = _kernels()
        interpreted = _interpreted()
        # Triton's interpreter rounds to bf16 wrongly; torch does not.
        y = x.new_empty((rows, problem.n), dtype=torch.float32 if interpreted else x.dtype)
        sliced = plan.sliced(rows)
        out = y.new_empty((plan.slices, rows, problem.n), dtype=torch.float32) if sliced else y
        with _on(x.device):
            read, units = self._quantized(x) if problem.act_bits == 8 else (x, None)
            arguments = (
                *(read, read.stride(0), units, weight, scales, zeros, None if sliced else bias, out),
                *(rows, problem.n, scales.shape[1], problem.k, weight.shape[1]),
                *(plan.steps, plan.slice_steps if sliced else plan.steps, bucket(rows)),
            )
            constants = {
                "GROUP": problem.group_size,
                "TILE": plan.tile,
                "TILES": plan.tiles,
                "ALIGNED": plan.aligned,
                "MASK_K": plan.masked,
                "INT8": problem.act_bits == 8,
                "SLICED": sliced,
                "INTERPRETED": interpreted,
            }
            slices = plan.slices if sliced else 1

            def grid(meta: dict[str, Any]) -> tuple[int, int]:
                return ceil_div(rows, meta["BLOCK_M"]) * ceil_div(problem.n, meta["BLOCK_N"]), slices

            blocks = blocks or self._known(x.device, rows)
            if blocks is None:
                self._tune(x.device, rows, grid, arguments, constants)
            else:
                kernels.multiply[grid](*arguments, **constants, **_options(blocks), **_EXACT)
            if sliced:
                size = rows * problem.n
                kernels.add_slices[(ceil_div(size, _ADD_BLOCK),)](
                    out, bias, y, size, problem.n, plan.slices, BLOCK=_ADD_BLOCK, **_EXACT
                )
        return y.to(x.dtype)

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x rounded to int8, [M, at least K], and what a step of each row and group is worth, fp32 [G, M]."""
        problem, rows = self.problem, x.shape[0]
        # Rows a multiple of 16 bytes apart can be loaded 16 bytes at a time.
        rounded = x.new_empty((rows, ceil_div(problem.k, 16) * 16), dtype=torch.int8)
        units = x.new_empty((problem.groups, rows), dtype=torch.float32)
        block = min(1 << (problem.group_size - 1).bit_length(), _QUANTIZE_BLOCK)
        taken = min(1 << (problem.groups - 1).bit_length(), _QUANTIZE_BLOCK // block)
        _kernels().quantize[(rows, ceil_div(problem.groups, taken))](
            *(x, x.stride(0), rounded, rounded.stride(0), units, rows, problem.k, problem.groups),
            GROUP=problem.group_size,
            BLOCK=block,
            TAKEN=taken,
            INTERPRETED=_interpreted(),
            **_EXACT,
        )
        return rounded, units

    def _known(self, device: torch.device, rows: int) -> Blocks | None:
        """The blocks for so many rows, if they need not be looked for now."""
        known = self.tuned.get((device.index, bucket(rows)))
        if known is None and (device.type == "cpu" or _capturing(device)):
            return TABLE[regime(rows)][0]  # nothing can be timed
        return known

    def _tune(self, device: torch.device, rows: int, grid: Any, arguments: tuple[Any, ...], constants: Any) -> None:
        """Run the kernel with all blocks of the table, or as Triton's cache says, and remember which are fastest."""
        with _tuning:
            tuner = _tuner(regime(rows))
            tuner[grid](*arguments, **constants, **_EXACT)
            best = tuner.best_config
        self.tuned[device.index, bucket(rows)] = Blocks(
            best.kwargs["BLOCK_M"], best.kwargs["BLOCK_N"], best.num_warps, best.num_stages
        )


def _options(blocks: Blocks) -> dict[str, int]:
    return {
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.columns,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


@lru_cache(maxsize=len(TABLE))
def _tuner(part: str) -> Any:
    """Triton's own tuner, which keeps its outcomes in Triton's cache, over one part of the table."""
    import triton

    configs = [
        triton.Config({"BLOCK_M": b.rows, "BLOCK_N": b.columns}, num_warps=b.warps, num_stages=b.stages)
        for b in TABLE[part]
    ]
    return triton.autotune(configs=configs, key=list(_KEY), cache_results=True)(_kernels().multiply)


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from awqjit.backends import triton_kernels

    if triton_kernels.triton is None:
        raise TritonError("the package triton is not installed")
    return triton_kernels


@lru_cache(maxsize=1)
def _interpreted() -> bool:
    """Whether Triton interprets its kernels, on the CPU, which it decides when it sees them (``TRITON_INTERPRET``)."""
    from triton.runtime import JITFunction

    return not isinstance(_kernels().multiply, JITFunction)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one, where Triton launches."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def _capturing(device: torch.device) -> bool:
    """Whether calls are being recorded (into a CUDA graph) instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def describe(here: Machine) -> Machine:
    """A machine with what is known of its CUDA devices. Raises nothing."""
    if torch.cuda.is_available():
        return replace(here, no_cuda=None)
    built = torch.backends.cuda.is_built()
    return replace(
        here,
        no_cuda="torch.cuda finds no device" if built else f"this torch ({torch.__version__}) is built without CUDA",
    )


@lru_cache(maxsize=64)
def obstacle(device: str, act_bits: int, x_dtype: str) -> str | None:
    """Why Triton cannot be used on a device, found out by a small problem whose result is exact; None when it can.

    Args:
        device: "cuda:0" or "xpu:0" for example; "cpu" for Triton's interpreter.
        act_bits: 16 or 8.
        x_dtype: "bf16", "fp16" or "fp32".
    """
    # 300 columns and 3 rows give slices of K, 17 rows do not. x of halves up to 127 is rounded, where it is, in steps
    # of 1; ties are among it. All sums are exact.
    k, n, group = 512, 48, 32
    random = torch.Generator().manual_seed(0)
    x = torch.randint(-254, 255, (17, k), generator=random).to(torch.float32) / 2
    x[:, ::group] = 127.0
    qweight = torch.randint(-(2**31), 2**31, (k // 8, n), generator=random).to(torch.int32)
    scales = 2.0 ** torch.randint(-4, 1, (k // group, n), generator=random)
    zeros = torch.randint(0, 16, (k // group, n), generator=random, dtype=torch.uint8)
    weight = QuantizedWeight(qweight, scales, zeros, group, k, n)
    x = x.to(_DTYPES[x_dtype])
    wanted = reference.int4_mm(x, weight, act_bits=act_bits)
    problem = Problem(k, n, group, x_dtype, "fp32", symmetric=False, bias=False, act_bits=act_bits)
    packed = qweight.view(k // 32, 4, n // 16, 16).permute(2, 0, 3, 1).contiguous()
    try:
        words, scales, zeros = (tensor.to(device) for tensor in (packed, scales, zeros))
        for rows in (3, 17):
            kernel = TritonKernel(problem, Plan.of(problem))
            y = kernel.run(x[:rows].to(device), words, scales, zeros, None, TABLE[regime(rows)][0]).to("cpu")
            if not torch.equal(y, wanted[:rows]):
                wrong = int((y != wanted[:rows]).sum())
                return f"{wrong} of {y.numel()} results of a small test problem are wrong on {device}"
    except TritonError as error:
        return str(error.args[0])
    except Exception as error:  # Triton raises anything: of its own, of LLVM's, the driver's, a C compiler's
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None
