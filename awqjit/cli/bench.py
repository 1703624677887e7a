# SPDX-License-Identifier: Apache-2.0
"""``awqjit bench``: one linear layer in both modes, beside dense torch and torch's own int4 kernel, on this machine.

Each contender has copies of its weights that together exceed any cache, and uses them in rotation; contenders take
turns call by call. Outputs lie in memory that held NaN before and are compared with float64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

from awqjit import jit, progress
from awqjit.cli.common import table_of
from awqjit.errors import ArgumentError
from awqjit.spec import COMPUTE, Problem
from awqjit.weight import QuantizedWeight, pack_nibbles, resolve_group_size

DENSE, INT4PACK = "dense torch", "torch int4pack"
ROTATE_BYTES = 300_000_000
LEAST_CALLS, MOST_CALLS = 5, 500

TOLERANCE = {"w4a16": 0.01, "w4a8": 0.02}
"""Relative error that a right result stays below: bf16 rounding is 0.002, int8 activations 0.008."""

_CHECKED_COLUMNS = 256  # of either end


@dataclass(frozen=True)
class Row:
    """One contender on one layer and batch size.

    Attributes:
        k: in features.
        n: out features.
        m: rows of x.
        contender: ``w4a16``, ``w4a8``, :data:`DENSE` or :data:`INT4PACK`.
        kernel: the row of the selection table that ran; empty for torch's own.
        seconds: median time of a call.
        over_dense: dense torch's median time over this one; above 1 it is faster.
        gbs: 10^9 bytes of weights read a second.
        gops: 10^9 operations a second, a multiplication and an addition counted as two.
        error: relative error against float64, Frobenius.
        right: the error is within what the mode's arithmetic allows; always true for torch's own.
    """

    k: int
    n: int
    m: int
    contender: str
    kernel: str
    seconds: float
    over_dense: float
    gbs: float
    gops: float
    error: float
    right: bool


@dataclass(frozen=True)
class Result:
    """Everything a run found.

    Attributes:
        rows: in the order of shapes, batch sizes and contenders.
        absent: contender -> why it is not there.
        threads: of torch.
        group_size: of all layers.
        dtype: of x, ``bf16``, ``fp16`` or ``fp32``.
    """

    rows: tuple[Row, ...]
    absent: dict[str, str]
    threads: int
    group_size: int
    dtype: str

    @property
    def right(self) -> bool:
        return all(row.right for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Contender:
    name: str
    kernel: str
    call: Callable[[torch.Tensor, int], torch.Tensor]  # x and the number of a copy
    copies: int
    size: int  # bytes of one copy


def read_shape(text: str) -> tuple[int, int]:
    """``4096x11008`` -> (4096, 11008).

    Raises:
        ArgumentError: not two positive whole numbers with an x between them.
    """
    k, _, n = text.lower().partition("x")
    if not (k.isdecimal() and n.isdecimal() and int(k) and int(n)):
        raise ArgumentError("SHAPES", repr(text), "in and out features, for example 4096x11008")
    return int(k), int(n)


def run(
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    group_size: int,
    dtype: torch.dtype,
    seconds: float,
    *,
    quiet: bool,
) -> Result:
    """Measure.

    Args:
        shapes: (in features, out features) of each layer.
        batches: rows of x, each at least 1.
        group_size: of all layers; -1 for their in features.
        dtype: of x and of the dense layer.
        seconds: of calls, for each contender, shape and batch size.
        quiet: show no progress.
    """
    rows: list[Row] = []
    absent: dict[str, str] = {}
    with progress.bar("measuring", len(shapes) * len(batches), not quiet) as step, torch.inference_mode():
        for k, n in shapes:
            weight = _random_weight(k, n, resolve_group_size(group_size, k))
            contenders = [*(_int4(mode, weight, dtype) for mode in COMPUTE), _dense(weight, dtype)]
            other = _int4pack(weight, dtype)
            if isinstance(other, str):
                absent[INT4PACK] = other
            else:
                contenders.append(other)
            for m in batches:
                rows += _measure(contenders, weight, m, dtype, seconds)
                step()
    return Result(tuple(rows), absent, torch.get_num_threads(), group_size, jit.DTYPE_NAMES[dtype])


def _random_weight(k: int, n: int, group_size: int) -> QuantizedWeight:
    """Int4 values and zero points at random; bf16 and fp16 hold each scale exactly."""
    generator = torch.Generator().manual_seed(k * 31 + n)
    groups = -(-k // group_size)
    values = torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8)
    scales = torch.randint(64, 128, (groups, n), generator=generator).float().div_(2**14)
    zeros = torch.randint(5, 11, (groups, n), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(pack_nibbles(values), scales.to(torch.float16), zeros, group_size, k, n)


def _rotation(tensors: tuple[torch.Tensor, ...]) -> tuple[list[tuple[torch.Tensor, ...]], int]:
    """The tensors and clones of them, together more than :data:`ROTATE_BYTES`, and the bytes of one."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    more = ROTATE_BYTES // size
    return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(more))], size


def _int4(mode: str, weight: QuantizedWeight, dtype: torch.dtype) -> _Contender:
    k, n, group, bits = weight.in_features, weight.out_features, weight.group_size, COMPUTE[mode]
    problem = Problem(k, n, group, jit.DTYPE_NAMES[dtype], "fp16", symmetric=False, bias=False, act_bits=bits)
    source = (weight.qweight, weight.scales, weight.zeros, None, group, k)
    copies = [torch.ops.awqjit.pack(*source)[:3]]
    size = sum(tensor.numel() * tensor.element_size() for tensor in copies[0])
    # Not clones: where packed weights lie is a part of packing them.
    copies += [torch.ops.awqjit.pack(*source)[:3] for _ in range(ROTATE_BYTES // size)]
    op = torch.ops.awqjit.int4_mm.default

    def call(x: torch.Tensor, copy: int) -> torch.Tensor:
        words, scales, zeros = copies[copy]
        y: torch.Tensor = op(x, words, scales, zeros, None, k, n, group, bits)
        return y

    return _Contender(mode, jit.choose(problem).kernel.name, call, len(copies), size)


def _dense(weight: QuantizedWeight, dtype: torch.dtype) -> _Contender:
    copies, size = _rotation((weight.dequantize(dtype).T.contiguous(),))
    return _Contender(DENSE, "", lambda x, copy: F.linear(x, copies[copy][0]), len(copies), size)


def _int4pack(weight: QuantizedWeight, dtype: torch.dtype) -> _Contender | str:
    """torch's int4 kernel, or why it does not run here. It computes (q - 8) * s + b: b is (8 - z) * s."""
    assert weight.zeros is not None
    scales = weight.scales.to(torch.float32)
    pairs = torch.stack((scales, (8 - weight.zeros.to(torch.float32)) * scales), dim=2).to(dtype).contiguous()
    group = weight.group_size
    try:
        words = torch._convert_weight_to_int4pack_for_cpu(weight.values().T.to(torch.int32).contiguous(), 1)
        torch._weight_int4pack_mm_for_cpu(torch.zeros(1, weight.in_features, dtype=dtype), words, group, pairs)
    except (RuntimeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    copies, size = _rotation((words, pairs))

    def call(x: torch.Tensor, copy: int) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, copies[copy][0], group, copies[copy][1])

    return _Contender(INT4PACK, "", call, len(copies), size)


def _measure(
    contenders: Sequence[_Contender], weight: QuantizedWeight, m: int, dtype: torch.dtype, seconds: float
) -> list[Row]:
    k, n = weight.in_features, weight.out_features
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    columns = torch.arange(n)
    if n > 2 * _CHECKED_COLUMNS:
        columns = torch.cat((columns[:_CHECKED_COLUMNS], columns[-_CHECKED_COLUMNS:]))
    reference = x.double() @ weight.dequantize(torch.float32)[:, columns].double()
    errors = [_error(contender, x, columns, reference) for contender in contenders]
    medians = [statistics.median(times) for times in _times(contenders, x, seconds)]
    dense = medians[[contender.name for contender in contenders].index(DENSE)]
    return [
        Row(
            k=k,
            n=n,
            m=m,
            contender=contender.name,
            kernel=contender.kernel,
            seconds=median,
            over_dense=dense / median,
            gbs=contender.size / median / 1e9,
            gops=2 * m * k * n / median / 1e9,
            error=error,
            right=error <= TOLERANCE.get(contender.name, float("inf")),
        )
        for contender, median, error in zip(contenders, medians, errors, strict=True)
    ]


def _error(contender: _Contender, x: torch.Tensor, columns: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error of an output whose memory, as far as the allocator gives it again, held NaN before."""
    for copy in range(min(2, contender.copies)):
        contender.call(x, copy).fill_(torch.nan)
    y = contender.call(x, contender.copies - 1)
    if not bool(torch.isfinite(y).all()):  # all of it, not only the columns that are compared
        return float("inf")
    return float((y[:, columns].double() - reference).norm() / reference.norm())


def _times(contenders: Sequence[_Contender], x: torch.Tensor, seconds: float) -> list[list[float]]:
    """Seconds of each call, in turns that begin with another contender each time."""
    times: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + seconds * len(contenders)
    turn = 0
    while turn < LEAST_CALLS or (turn < MOST_CALLS and time.perf_counter() < end):
        for step in range(len(contenders)):
            index = (turn + step) % len(contenders)
            contender = contenders[index]
            start = time.perf_counter()
            contender.call(x, turn % contender.copies)
            times[index].append(time.perf_counter() - start)
        turn += 1
    return times


def tables(result: Result) -> Iterator[Table]:
    """A table for each layer: one row a contender and batch size."""
    for k, n in dict.fromkeys((row.k, row.n) for row in result.rows):
        title = f"{k} x {n}, group size {result.group_size}, {result.dtype} x, {result.threads} threads"
        shown = table_of(title, "M", "contender", "µs", "× dense", "GB/s", "GOP/s", "error")
        before = 0
        for row in result.rows:
            if (row.k, row.n) != (k, n):
                continue
            shown.add_row(
                "" if row.m == before else str(row.m),
                f"{row.contender} ({row.kernel})" if row.kernel else row.contender,
                f"{row.seconds * 1e6:.0f}",
                f"{row.over_dense:.2f}",
                f"{row.gbs:.1f}",
                f"{row.gops:.0f}",
                f"{row.error:.1e}" + ("" if row.right else " WRONG"),
            )
            before = row.m
        for column in shown.columns[2:]:
            column.justify = "right"
        yield shown
