# SPDX-License-Identifier: Apache-2.0
"""What the operator costs beyond the kernel it calls.

    python -m benchmarks.dispatch [--quick] [--calls N] [--output FILE]

One int4 layer at M = 1 is called directly (the compiled function, on buffers made before, with torch's thread pool), as
the operator in eager mode, as the operator implemented in Python, and inside compiled graphs with and without
inductor's C++ wrapper. All of it in turns, within one process. At last the operator is called `--calls` times, and what
the process grew by is reported.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from awqjit import jit, launch
from awqjit.layout import pack
from awqjit.ops import dispatcher, matmul
from awqjit.weight import QuantizedWeight
from benchmarks.common import interleave, print_stamp, print_table, stamp, summary, write_result

TARGETS = {"eager": 2.5, "compiled, C++ wrapper": 1.5}
"""Largest acceptable cost beyond the kernel, in microseconds: difference of minima."""

SHAPES = ((64, 64, 64), (576, 576, 64))
CHAIN = 65  # operators of the longer compiled graph; that of the shorter one is 1


def seconds_each(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def layer(k: int, n: int, group: int) -> tuple[Tensor, tuple[Any, ...]]:
    """x [1, K] and the other arguments of int4_mm, w4a8."""
    words = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int32)
    zeros = torch.randint(0, 16, (k // group, n), dtype=torch.uint8)
    packed = pack(QuantizedWeight(words, torch.rand(k // group, n) / 100, zeros, group, k, n))
    return torch.randn(1, k), (packed.weight, packed.scales, packed.zeros, None, k, n, group, 8, None, packed.layout)


def direct(x: Tensor, arguments: tuple[Any, ...]) -> tuple[Callable[[], object], Callable[[], object]]:
    """The compiled function on ready buffers, and an empty function called in the same way."""
    kernel = jit.choices()[-1].kernel
    assert isinstance(kernel, launch.CompiledKernel)
    weight, scales, zeros, _, k, n = arguments[:6]
    threads = torch.get_num_threads()
    y = torch.empty(1, n)
    scratch = torch.empty(kernel.library.awqjit_scratch_bytes(1, threads), dtype=torch.uint8)
    pool = launch._torch_parallel_for() if threads > 1 else None
    call = launch._Call(
        x.data_ptr(),
        weight.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        None,
        y.data_ptr(),
        scratch.data_ptr(),
        k,
        1,
        threads,
        pool,
    )
    pointer, keep = ctypes.byref(call), (y, scratch)
    function, nothing = kernel.library.awqjit_int4_mm, kernel.library.awqjit_slug
    return (lambda: (function(pointer), keep)), (lambda: (nothing(), keep))


def chains(x: Tensor, arguments: tuple[Any, ...], cpp_wrapper: bool) -> tuple[Callable[[], Tensor], ...]:
    """Compiled graphs of 1 and of CHAIN operators, each fed with the one before; K and N have to be equal."""
    import torch._inductor.config as inductor

    op = torch.ops.awqjit.int4_mm.default

    def graph(length: int) -> Callable[[], Tensor]:
        def run(x: Tensor, *tensors: Tensor) -> Tensor:
            for _ in range(length):
                x = op(x, *tensors, *arguments[3:])
            return x

        compiled = torch.compile(run, fullgraph=True)
        compiled(x, *arguments[:3])
        return lambda: compiled(x, *arguments[:3])

    torch._dynamo.reset()  # graphs made with the other wrapper
    with inductor.patch(cpp_wrapper=cpp_wrapper):
        return graph(1), graph(CHAIN)


def measure(k: int, n: int, group: int, rounds: int, calls: int) -> dict[str, Any]:
    x, arguments = layer(k, n, group)
    op = torch.ops.awqjit.int4_mm.default
    for _ in range(2):
        op(x, *arguments)
    kernel, nothing = direct(x, arguments)
    contenders = {
        "kernel": kernel,
        "empty call": nothing,
        "eager": lambda: op(x, *arguments),
        "eager, in Python": lambda: matmul.int4_mm(x, *arguments),
    }
    measured = {
        name: (lambda function=function: seconds_each(function, calls)) for name, function in contenders.items()
    }
    for name, wrapper in (("compiled, Python wrapper", False), ("compiled, C++ wrapper", True)):
        one, many = chains(x, arguments, wrapper)

        def per_operator(one: Callable[[], Tensor] = one, many: Callable[[], Tensor] = many) -> float:
            few = max(calls // CHAIN, 1)
            return (seconds_each(many, few) - seconds_each(one, few)) / (CHAIN - 1)

        measured[name] = per_operator
    results = {name: [1e6 * value for value in values] for name, values in interleave(measured, rounds).items()}
    bare = min(results["kernel"]) - min(results["empty call"])
    beyond = {name: min(values) - bare for name, values in results.items() if name.startswith(("eager", "compiled"))}
    return {
        "microseconds": {name: summary(values) for name, values in results.items()},
        "kernel": bare,
        "beyond": beyond,
    }


def grown(calls: int) -> dict[str, float]:
    """Resident bytes that the process grew by over many calls."""
    x, arguments = layer(64, 64, 64)
    bias = torch.ones(64, dtype=torch.bfloat16)
    op = torch.ops.awqjit.int4_mm.default
    every = (*arguments[:3], bias, *arguments[4:])

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(10_000):
        op(x, *every)
    before = resident()
    for _ in range(calls):
        op(x, *every)
    return {"calls": calls, "bytes": resident() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds; not for publication")
    parser.add_argument("--calls", type=int, default=10_000_000, help="calls of the leak check")
    parser.add_argument("--output", type=Path, help="file to write (default: benchmarks/results/dispatch-<cpu>.json)")
    options = parser.parse_args()
    rounds, calls, many = (3, 300, 10_000) if options.quick else (41, 2000, options.calls)
    before = stamp()
    with torch.no_grad():
        shapes = {f"{k}x{n}": measure(k, n, group, rounds, calls) for k, n, group in SHAPES}
        leak = grown(many) if Path("/proc/self/statm").exists() else None
    result = {
        "benchmark": "dispatch",
        "machine": before,
        "machine_after": stamp(),
        "dispatcher": dispatcher.state() or "C++",
        "targets": TARGETS,
        "shapes": shapes,
        "leak": leak,
    }
    print_stamp(before, result["machine_after"])
    columns = ("beyond the kernel, µs", *shapes)
    names = next(iter(shapes.values()))["beyond"]
    rows = [("kernel alone", *(shape["kernel"] for shape in shapes.values()))]
    rows += [(name, *(shape["beyond"][name] for shape in shapes.values())) for name in names]
    print_table("int4_mm at M = 1, differences of minima", columns, rows)
    print(f"dispatcher: {result['dispatcher']}; growth over {many:,} calls: {leak and leak['bytes']} bytes")
    print(write_result("dispatch", result, options.output or (Path("/dev/null") if options.quick else None)))


if __name__ == "__main__":
    main()
