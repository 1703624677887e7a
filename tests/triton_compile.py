# SPDX-License-Identifier: Apache-2.0
"""Compiles what the Triton row would launch, for a GPU that is not there; run in a process of its own.

A driver that only names its GPU is put in Triton's place for one, and launches end after the compiler: what is compiled
has the types, divisibilities and constants of real calls. Prints one JSON object a kernel: what its machine code uses.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from awqjit.backends import triton as backend
from awqjit.backends.triton_plan import FEW_ROWS, TABLE, Blocks, Plan
from awqjit.spec import Problem


class NamedGpu:
    """As much of a driver as the compiler asks for, and a stopwatch that always shows the fastest for some blocks."""

    def __init__(self, capability: int, fastest: Blocks) -> None:
        self._target, self._fastest = GPUTarget("cuda", capability, 32), fastest

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def time(call: Callable[[], None], quantiles: object) -> list[float]:
            call()
            options = last["options"]
            return [0.5 if options == backend._options(self._fastest) else 1.0] * 3

        return time


compiled: list[dict[str, Any]] = []
last: dict[str, Any] = {}
_compile = JITFunction.run


def stop_after_compiling(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    last["options"] = {
        name: options[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages") if name in options
    }
    kernel = _compile(self, *args, grid=grid, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    compiled.append(
        {
            "kernel": self.__name__,
            "options": last["options"],
            "shared": kernel.metadata.shared,
            "matrix": sorted(set(re.findall(r"\b(?:wg)?mma\.\S*", ptx))),
            "fma": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
            "div": sorted(set(re.findall(r"\bdiv\.\S*", ptx))),
            "ftz": ptx.count(".ftz"),
            "widest": max((int(v) for v in re.findall(r"ld\.global\S*\.v(\d)\.b32", ptx)), default=1),
            "machine_code": len(kernel.asm["cubin"]),
        }
    )
    return kernel


def launch(problem: Problem, rows: int, blocks: Blocks | None) -> backend.TritonKernel:
    columns, blocks_k = -(-problem.n // 16), -(-problem.k // 32)
    kernel = backend.TritonKernel(problem, Plan.of(problem))
    dtypes = backend._DTYPES
    scales = torch.zeros(problem.groups, columns * 16, dtype=dtypes[problem.scale_dtype])
    kernel.run(
        torch.zeros(rows, problem.k, dtype=dtypes[problem.x_dtype]),
        torch.zeros(columns, blocks_k, 16, 4, dtype=torch.int32),
        scales,
        None if problem.symmetric else torch.zeros(scales.shape, dtype=torch.uint8),
        torch.zeros(problem.n) if problem.bias else None,
        blocks,
    )
    return kernel


def problem(
    act_bits: int, x: str, scale: str = "fp16", k: int = 4096, group: int = 128, plain: bool = False
) -> Problem:
    return Problem(k, 4096, group, x, scale, symmetric=plain, bias=not plain, act_bits=act_bits)


def every_shape(capability: int) -> None:
    """All of the table for both modes; then each other kind of kernel once."""
    for act_bits in (16, 8):
        for part, rows in (("few rows", FEW_ROWS), ("many rows", 40)):
            for blocks in TABLE[part]:
                launch(problem(act_bits, "bf16"), rows, blocks)
    few_shapes(capability)


def few_shapes(capability: int) -> None:
    for act_bits in (16, 8):
        for rows, blocks in ((1, TABLE["few rows"][0]), (40, TABLE["many rows"][-1])):
            for x, scale, k, group, plain in (
                ("fp16", "bf16", 4096, 128, True),
                ("fp32", "fp32", 4096, 128, False),
                ("bf16", "fp16", 4096, 4096, True),
                ("fp16", "fp16", 1000, 100, False),
                ("bf16", "bf16", 64, 7, False),
                ("fp16", "fp32", 4096, 16, True),
            ):
                if x != "fp32" or rows == 1 or act_bits == 8:  # fp32 times 256 rows takes the compiler half a minute
                    launch(problem(act_bits, x, scale, k, group, plain), rows, blocks)
                else:
                    launch(problem(act_bits, x, scale, k, group, plain), rows, TABLE["many rows"][0])


def tuned(capability: int) -> None:
    """What Triton's own tuner makes of the table: each of its entries is compiled, and the fastest kept."""
    backend.TritonKernel._known = lambda self, device, rows: self.tuned.get((device.index, backend.bucket(rows)))  # type: ignore[method-assign]
    kernel = launch(problem(16, "bf16"), 3, None)
    assert list(kernel.tuned.values()) == [FASTEST], kernel.tuned
    first = len(compiled)
    again = launch(problem(16, "bf16"), 5, None)
    # Another kernel of the same shape: the tuner remembers.
    assert list(again.tuned.values()) == [FASTEST]
    assert [one["options"] for one in compiled[first:] if one["kernel"] == "multiply"] == [backend._options(FASTEST)]


FASTEST = TABLE["few rows"][3]


if __name__ == "__main__":
    what, capability = sys.argv[1], int(sys.argv[2])
    JITFunction.run = stop_after_compiling
    driver.set_active(NamedGpu(capability, FASTEST))
    backend._on = lambda device: contextlib.nullcontext()  # type: ignore[assignment]
    {"every_shape": every_shape, "few_shapes": few_shapes, "tuned": tuned}[what](capability)
    for one in compiled:
        print(json.dumps(one))
