# SPDX-License-Identifier: Apache-2.0
"""One int4 layer on a GPU beside the same layer dense in bf16: times and errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from awqjit import jit
from awqjit.modules import Int4Linear
from awqjit.spec import COMPUTE
from awqjit.weight import QuantizedWeight
from benchmarks.common import interleave, relative_error, summary

GROUP = 128
ROTATE_BYTES = 300_000_000  # of one contender's weights: more than a GPU's cache holds
TOLERANCE = 0.02
"""Relative error (Frobenius) that a right result stays below: bf16 rounding is 0.002, int8 activations 0.008."""


def random_weight(k: int, n: int) -> QuantizedWeight:
    """[K, N] with a zero point for each group and column."""
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (k // 8, n), dtype=torch.int32)
    zeros = torch.randint(0, 16, (k // GROUP, n), dtype=torch.uint8)
    return QuantizedWeight(words, (torch.rand(k // GROUP, n) / 100).half(), zeros, GROUP, k, n)


def _synchronize(device: str) -> None:
    backend = getattr(torch, device, None)
    if backend is not None:
        backend.synchronize()


def _timer(calls: list[Callable[[], torch.Tensor]], seconds: float, device: str) -> Callable[[], float]:
    """Seconds a call, each with another copy of the weights than the one before."""

    def measure() -> float:
        count, begin = 0, time.perf_counter()
        while count < 3 or time.perf_counter() - begin < seconds:
            calls[count % len(calls)]()
            count += 1
            if count % 16 == 0:  # launches are queued: without a wait they would run far ahead of the clock
                _synchronize(device)
        _synchronize(device)
        return (time.perf_counter() - begin) / count

    return measure


def measure(device: str, quick: bool = False) -> dict[str, Any]:
    """Both modes and dense bf16 on a device.

    Args:
        device: ``xpu``, ``cuda`` or ``cpu``.
        quick: a small layer and few calls.

    Returns:
        Shape, and for each number of rows and contender: seconds (median, least, most), relative error, the row of the
        selection table that ran, or why there is none.
    """
    k, n, batches, rounds, seconds = (512, 256, (1, 16), 2, 0.01) if quick else (4096, 4096, (1, 16, 64, 512), 7, 0.1)
    weight = random_weight(k, n)
    exact = weight.dequantize().double()
    copies = 2 if quick else -(-ROTATE_BYTES // (k * n // 2))
    layers: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {}
    absent: dict[str, str] = {}
    for mode in COMPUTE:
        try:
            layers[mode] = [Int4Linear.from_quantized(weight, compute=mode).to(device) for _ in range(copies)]
            layers[mode][0](torch.randn(1, k, device=device, dtype=torch.bfloat16))
        except Exception as error:  # recorded: who reads the report cannot try it
            layers.pop(mode, None)
            absent[mode] = f"{type(error).__name__}: {error}"
    dense = [exact.T.contiguous().bfloat16().to(device) for _ in range(max(1, copies // 4))]
    layers["dense bf16"] = [lambda x, w=w: F.linear(x, w) for w in dense]
    cells = []
    for m in batches:
        x = torch.randn(m, k, dtype=torch.bfloat16)
        there, wanted = x.to(device), x.double() @ exact
        cell: dict[str, Any] = {"m": m, "contenders": {}}
        timers = {}
        for name, copied in layers.items():
            error = relative_error(copied[0](there).cpu(), wanted)
            cell["contenders"][name] = {"error": error, "right": error <= TOLERANCE}
            timers[name] = _timer([partial(one, there) for one in copied], seconds, device)
        for name, times in interleave(timers, rounds).items():
            cell["contenders"][name]["seconds"] = summary(times)
        cells.append(cell)
    kernels = sorted({choice.kernel.name for choice in jit.choices()})
    return {"device": device, "k": k, "n": n, "group": GROUP, "kernels": kernels, "absent": absent, "cells": cells}


def wrong(result: dict[str, Any]) -> list[str]:
    """Contenders that computed something else, as ``name at m=...``."""
    return [
        f"{name} at m={cell['m']}"
        for cell in result["cells"]
        for name, found in cell["contenders"].items()
        if not found["right"]
    ]
