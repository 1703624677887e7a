# SPDX-License-Identifier: Apache-2.0
"""A wide machine runs every narrower x86-64 row when AWQJIT_MAX_ISA says so, and all of them give the same bits."""

from __future__ import annotations

import platform

import compilers
import pytest
import torch
from oracle import w4a8_bits
from rows import AVX_VNNI_EVEX, mm, packed, poisoned_memory
from strategies import RawWeight, Shape

from awqjit import config, jit, machine, ops
from awqjit.render import render
from awqjit.select import ROWS
from awqjit.spec import KernelSpec, Problem
from awqjit.target import TARGETS, target

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="rows of x86-64"),
    pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++"),
]

SHAPE = Shape(304, 40, 128)
LEVELS = [name for name, _ in machine.ISA_LEVELS]


def best_of(level: str, act_bits: int) -> str:
    """The first row of the table that needs nothing above the level."""
    with config.override(max_isa=level):
        here = machine.detect()
    return next(
        row.name
        for row in TARGETS
        if act_bits in row.act_bits and row.machines[:1] != ("aarch64",) and row.features <= here.features
    )


@pytest.mark.parametrize("level", LEVELS)
def test_a_capped_machine_runs_the_best_row_of_the_level_and_w4a8_stays_the_same_to_the_bit(level: str) -> None:
    torch.manual_seed(1)
    q = torch.randint(0, 16, (SHAPE.k, SHAPE.n), dtype=torch.uint8)
    z = torch.randint(0, 16, (SHAPE.groups, SHAPE.n), dtype=torch.uint8)
    s = torch.randn(SHAPE.groups, SHAPE.n, dtype=torch.float16)
    weight = packed(RawWeight(SHAPE, q, z, s, "capped"))
    x = torch.randn(21, SHAPE.k, dtype=torch.bfloat16)
    with config.override(max_isa=level), poisoned_memory():
        ops.forget()
        y = {bits: mm(x, weight, None, bits) for bits in (8, 16)}
        ran = {choice.problem.act_bits: choice.kernel.name for choice in jit.choices()}
    assert ran == {bits: best_of(level, bits) for bits in (8, 16)}
    assert torch.equal(y[8], w4a8_bits(x, q, z, s, SHAPE.group))
    dense = (q.double() - z.double().repeat_interleave(SHAPE.group, 0)[: SHAPE.k]) * s.double().repeat_interleave(
        SHAPE.group, 0
    )[: SHAPE.k]
    error = (y[16].double() - x.double() @ dense).abs()
    assert bool((error <= 2.0**-8 * (x.double().abs() @ dense.abs())).all())  # half an ulp of bf16, generously


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("k", [32, 40, 64, 96, 104, 128])
def test_int16_sums_hold_the_largest_products_there_are(k: int, sign: float) -> None:
    """Every nibble 15 and every int8 at its end, in whole words, in remainders, in decode and in prefill."""
    shape = Shape(k, 16, k)
    q, z = torch.full((k, 16), 15, dtype=torch.uint8), torch.zeros(1, 16, dtype=torch.uint8)
    weight = packed(RawWeight(shape, q, z, torch.ones(1, 16), "largest"))
    for row in ("avx2", "avx512bw"):
        if machine.detect().missing(target(row).features) is not None:
            continue
        with config.override(kernel=row):
            ops.forget()
            for m in (1, 4, 30):
                y = mm(torch.full((m, k), sign * 127), weight, None, 8)
                assert torch.equal(y, torch.full((m, 16), sign * 127 * 15 * k)), row


def test_the_tested_twin_of_avx_vnni_is_the_same_source() -> None:
    problem = Problem(131, 33, 64, "fp16", "fp32", symmetric=False, bias=True, act_bits=8)
    texts = []
    for row in (target("avx_vnni"), AVX_VNNI_EVEX):
        head, _, body = render(KernelSpec(problem, row, row.tile(8, "fp16"))).partition("#include <stddef.h>")
        assert f"target {row.name}:" in head
        texts.append(body.replace(f'-{row.name}"', '-row"'))
    assert texts[0] == texts[1]
    assert AVX_VNNI_EVEX.name not in {row.name for row in ROWS}
