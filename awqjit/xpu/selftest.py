# SPDX-License-Identifier: Apache-2.0
"""A small problem with a known result: no kernel of a row is trusted on a device before the row has solved it there."""

from __future__ import annotations

import threading

import torch

from awqjit import reference
from awqjit.errors import SyclError
from awqjit.layout import LAYOUT_GPU, pack
from awqjit.spec import Problem
from awqjit.weight import QuantizedWeight, pack_nibbles
from awqjit.xpu.device import Device, get
from awqjit.xpu.kernel import SyclKernel

K, N, GROUP = 160, 40, 32
ROWS = (1, 3, 40)
"""Decode, several rows of it, prefill: 40 is more than any device decodes."""

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def problem(act_bits: int, x_dtype: str) -> Problem:
    """The small problem of a mode and a dtype: five groups, three column blocks of 16, the last one half full."""
    return Problem(K, N, GROUP, x_dtype, "fp16", symmetric=False, bias=False, act_bits=act_bits)


class Selftests:
    """What is known of the rows of a device. Each combination is tried once a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[Device, str, int, str], str] = {}

    def require(self, device: Device, row: str, act_bits: int, x_dtype: str) -> None:
        """
        Raises:
            SyclError: the row gives wrong results on the device, or cannot run there.
            CompileError and others: see :meth:`awqjit.xpu.kernel.SyclKernel.load`; tried again next time.
        """
        key = (device, row, act_bits, x_dtype)
        with self._lock:
            if key not in self._found:
                self._found[key] = _difference(SyclKernel.load(problem(act_bits, x_dtype), row, device))
            reason = self._found[key]
        if reason:
            raise SyclError(f"the self-test of {row} on {device.facts.name} failed", reason)


def _difference(kernel: SyclKernel) -> str:
    """How the results differ from those that are known, or "".

    All numbers are small integers or powers of two, so that no sum is rounded, in whatever order it is formed: the
    results have to be the same to the last bit.
    """
    small = kernel.problem
    generator = torch.Generator().manual_seed(0)
    groups = small.groups
    weight = QuantizedWeight(
        pack_nibbles(torch.randint(0, 16, (K, N), dtype=torch.uint8, generator=generator)),
        2.0 ** -torch.randint(3, 7, (groups, N), generator=generator).to(torch.float16),
        torch.randint(0, 16, (groups, N), dtype=torch.uint8, generator=generator),
        GROUP,
        K,
        N,
    )
    where = torch.device("cpu") if kernel.device.name == "xpu:cpu" else torch.device(kernel.device.name)
    packed = pack(weight, LAYOUT_GPU)
    assert packed.zeros is not None
    weights, scales, zeros = packed.weight.to(where), packed.scales.to(where), packed.zeros.to(where)
    for rows in ROWS:
        x = torch.randint(-126, 127, (rows, K), generator=generator)
        x[:, ::GROUP] = 127  # the largest of its group: x rounded to int8 is x itself
        x = x.to(DTYPES[small.x_dtype])
        wanted = reference.int4_mm(x, weight, None, small.act_bits)
        found = kernel(x.to(where), weights, scales, zeros, None).cpu()
        wrong = ~(found == wanted)
        if bool(wrong.any()):
            row, column = (int(place) for place in wrong.nonzero()[0])
            return (
                f"{int(wrong.sum())} of {wrong.numel()} results for {rows} rows are wrong; y[{row}, {column}] is "
                f"{found[row, column].item()}, wanted {wanted[row, column].item()} ({small.slug})"
            )
    return ""


SELFTESTS = Selftests()


def load(row: str, of: Problem, device: str) -> SyclKernel:
    """The kernels of a problem, on a device that has shown that it computes the row's small problem right.

    Args:
        row: "sycl_dpas" or "sycl".
        of: the problem.
        device: what the device goes by.

    Raises:
        SyclError, CompileError and others: see :meth:`Selftests.require`.
    """
    on = get(device)
    SELFTESTS.require(on, row, of.act_bits, of.x_dtype)
    return SyclKernel.load(of, row, on)
