# SPDX-License-Identifier: Apache-2.0
"""Kernels for aarch64: cross-compiled, run under emulation, and compared with the definition.

What is not installed is skipped; the reasons say what to install.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import strategies
import torch
from aarch64 import tools
from hypothesis import given, settings
from oracle import expected, w4a8_bits
from rows import CASES, Case, packed
from strategies import LOST_ROW_KINDS, ROW_KINDS, SEEDS, ZERO_KINDS, RawWeight, Shape, weights
from torch import Tensor

from awqjit.spec import KernelSpec, Problem
from awqjit.target import target

M = (1, 2, 5, 8, 9, 33)
ROWS = tuple((row, bits) for row in ("portable", "neon_dot", "neon") for bits in target(row).act_bits)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
COMPILERS = tools.compilers()

emulated = pytest.mark.skipif(tools.qemu() is None, reason=tools.NO_QEMU)
compiled = pytest.mark.parametrize(
    "compiler",
    COMPILERS or [pytest.param(None, marks=pytest.mark.skip(reason=tools.NO_COMPILER))],
    ids=lambda compiler: getattr(compiler, "name", "none"),
)
all_rows = pytest.mark.parametrize(("row", "act_bits"), ROWS, ids=str)


def spec_of(row: str, problem: Problem) -> KernelSpec:
    return KernelSpec(problem, target(row), target(row).tile(problem.act_bits, problem.x_dtype))


def problem_of(case: Case, act_bits: int) -> Problem:
    shape = case.shape
    dtypes = NAMES[case.x_dtype], NAMES[case.scale_dtype]
    return Problem(shape.k, shape.n, shape.group, *dtypes, case.symmetric, case.bias, act_bits)


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the harness is built, once for all tests."""
    return tmp_path_factory.mktemp("harness")


def runner(
    compiler: tools.Cross, spec: KernelSpec, folder: Path, common: Path
) -> Callable[[RawWeight, Tensor | None, list[Tensor]], list[list[Tensor]]]:
    """Build a kernel; a function that runs it, on the narrowest CPU that the selection table lets it run on."""
    command = compiler.program(spec, folder, common)
    cpu = tools.WIDEST if "asimddp" in spec.target.features else tools.NARROWEST

    def run(weight: RawWeight, bias: Tensor | None, calls: list[Tensor]) -> list[list[Tensor]]:
        tools.record(folder / "inputs", packed(weight), bias, calls)
        done = tools.emulate([*command, str(folder / "inputs"), str(folder / "outputs")], cpu)
        assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
        assert done.stdout == f"{spec.slug}\n"
        return tools.outputs(folder / "outputs", weight.shape.n, calls)

    return run


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit but those of a NaN."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check(
    weight: RawWeight, bias: Tensor | None, act_bits: int, calls: list[Tensor], results: list[list[Tensor]]
) -> None:
    given = (weight.q, weight.z, weight.s, weight.shape.group)
    for x, (serial, parallel, hostile) in zip(calls, results, strict=True):
        assert same(serial, parallel)
        assert same(serial, hostile)
        expected(x, *given, bias=bias, act_bits=act_bits).check(serial)
        if act_bits == 8:
            assert same(serial, w4a8_bits(x, *given, bias=bias))


def activations(k: int, dtype: torch.dtype, kinds: tuple[str, ...], seed: int) -> list[Tensor]:
    """One x of each number of rows, all kinds of rows in turn; every other x has gaps between its rows."""
    rng = np.random.default_rng(seed)
    kind = itertools.cycle(kinds)
    calls = []
    for i, m in enumerate(M):
        x = torch.stack([strategies._row(rng, next(kind), k, dtype) for _ in range(m)])
        calls.append(strategies.with_strides(x, "row_gap" if i % 2 else "contiguous"))
    return calls


# Each costs a build; the plain row is the same C++ as elsewhere, so it gets fewer.
BUILDS = tuple(
    pytest.param(row, bits, compiler, case, id=f"{row}-{bits}-{compiler.name}-{case}")
    for row, bits in ROWS
    for compiler in COMPILERS
    for case in (CASES[:: 5 if row == "portable" else 2] if compiler is COMPILERS[0] else CASES[1::7])
)


@emulated
@pytest.mark.parametrize(
    ("row", "act_bits", "compiler", "case"),
    BUILDS or [pytest.param("", 0, None, None, marks=pytest.mark.skip(reason=tools.NO_COMPILER))],
)
def test_a_row_gives_on_aarch64_what_the_definition_says(
    row: str, act_bits: int, compiler: tools.Cross, case: Case, tmp_path: Path, common: Path
) -> None:
    """On one thread and three, in decode and prefill, in any floating-point mode of the caller's, within bounds."""
    run = runner(compiler, spec_of(row, problem_of(case, act_bits)), tmp_path, common)
    zeros = ("none",) if case.symmetric else tuple(kind for kind in ZERO_KINDS if kind != "none")

    @settings(max_examples=3)
    @given(weight=weights(case.shape, dtypes=(case.scale_dtype,), zero_kinds=zeros), seed=SEEDS)
    def examples(weight: RawWeight, seed: int) -> None:
        numbers = torch.from_numpy(np.random.default_rng(seed).standard_normal(case.shape.n))
        bias = numbers.float() if case.bias else None
        calls = activations(case.shape.k, case.x_dtype, ROW_KINDS + LOST_ROW_KINDS, seed)
        check(weight, bias, act_bits, calls, run(weight, bias, calls))

    examples()


@emulated
@compiled
@pytest.mark.parametrize("row", [row for row, bits in ROWS if bits == 8])
def test_one_long_group_is_exact(row: str, compiler: tools.Cross, tmp_path: Path, common: Path) -> None:
    """int8 sums beyond 2^24, where fp32 would round."""
    shape = Shape(9000, 16, 9000)
    rng = np.random.default_rng(5)
    q = torch.from_numpy(rng.integers(0, 16, (shape.k, shape.n), dtype=np.uint8))
    z = torch.from_numpy(rng.integers(0, 16, (1, shape.n), dtype=np.uint8))
    q[:, 0], z[:, 0] = 15, 0
    weight = RawWeight(shape, q, z, torch.full((1, shape.n), 2.0**-10), "long")
    case = Case(shape, torch.float32, torch.float32, symmetric=False, bias=False)
    run = runner(compiler, spec_of(row, problem_of(case, 8)), tmp_path, common)
    calls = activations(shape.k, torch.float32, ("plus_minus_127", "normal"), 5)
    calls.append(torch.full((3, shape.k), 127.0))
    check(weight, None, 8, calls, run(weight, None, calls))


@emulated
@compiled
def test_a_group_counts_as_zero_from_the_very_number_the_definition_names(
    compiler: tools.Cross, tmp_path: Path, common: Path
) -> None:
    shape = Shape(64, 16, 16)
    weight = RawWeight(shape, torch.full((64, 16), 11, dtype=torch.uint8), None, torch.ones(4, 16), "edge")
    case = Case(shape, torch.float32, torch.float32, symmetric=True, bias=False)
    edge = torch.tensor(2.0**-119)
    below, above = (torch.nextafter(edge, torch.tensor(to)) for to in (0.0, 1.0))
    x = torch.stack([below, edge, above, 2 * edge]).repeat_interleave(shape.group).expand(10, -1)
    run = runner(compiler, spec_of("neon_dot", problem_of(case, 8)), tmp_path, common)
    calls = [x[:1], x]
    results = run(weight, None, calls)
    check(weight, None, 8, calls, results)
    assert results[0][0].unique().item() == pytest.approx(4 * 16 * 3 * float(edge), rel=1e-5)


@emulated
@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
def test_outputs_are_rounded_half_to_even(
    dtype: torch.dtype, compiler: tools.Cross, tmp_path: Path, common: Path
) -> None:
    """Products that are exact in fp32 and halfway between two numbers of x's type, just below and just above."""
    shape = Shape(128, 33, 1)
    dropped = 16 if dtype == torch.bfloat16 else 13
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 2, (shape.k, shape.n)) << dropped | (1 << dropped - 1) + rng.integers(
        -1, 2, (shape.k, shape.n)
    )
    bits |= (
        rng.integers(0, 2, bits.shape) << 31 | rng.integers(100 if dtype == torch.float16 else 1, 143, bits.shape) << 23
    )
    s = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    weight = RawWeight(shape, torch.full(s.shape, 9, dtype=torch.uint8), None, s, "halves")
    case = Case(shape, dtype, torch.float32, symmetric=True, bias=False)
    run = runner(compiler, spec_of("neon", problem_of(case, 16)), tmp_path, common)
    calls = [torch.eye(shape.k, dtype=dtype), torch.eye(shape.k, dtype=dtype)[:2]]
    for x, results in zip(calls, run(weight, None, calls), strict=True):
        wanted = s[: x.shape[0]].to(dtype)
        assert wanted.unique().numel() > 20
        assert all(torch.equal(y, wanted) for y in results)


@emulated
@compiled
def test_a_cpu_without_dot_products_cannot_run_the_row_that_needs_them(
    compiler: tools.Cross, tmp_path: Path, common: Path
) -> None:
    """So the emulated CPU is as narrow as it claims, and the other rows, which run on it, need no more than it has."""
    spec = spec_of("neon_dot", Problem(64, 16, 32, "fp32", "fp32", True, False, 8))
    command = compiler.program(spec, tmp_path, common)
    weight = RawWeight(Shape(64, 16, 32), torch.ones(64, 16, dtype=torch.uint8), None, torch.ones(2, 16), "ones")
    tools.record(tmp_path / "inputs", packed(weight), None, [torch.ones(1, 64)])
    arguments = [*command, str(tmp_path / "inputs"), str(tmp_path / "outputs")]
    assert tools.emulate(arguments, tools.WIDEST).returncode == 0
    assert tools.emulate(arguments, tools.NARROWEST).returncode in (-signal.SIGILL, 128 + signal.SIGILL)


# ---- the code itself --------------------------------------------------------------------------------------------

LABEL = re.compile(r"^(\.?[\w.$]+):")
BRANCH = re.compile(r"^\t(?:b\.?\w*|cbn?z|tbn?z)\t(?:.*, *)?(\.L\w+)$")
STACK = re.compile(r"^\t(?:ld|st)\w+\t[qdsv]\d.*\[(?:sp|x29)")


def innermost_loops(assembly: str) -> dict[str, list[list[str]]]:
    """Function -> the instructions of each loop that holds no other."""
    lines = [line.split("//")[0].rstrip() for line in assembly.splitlines()]
    places = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    spans = []
    for i, line in enumerate(lines):
        match = BRANCH.match(line)
        if match and places.get(match[1], i) < i:
            spans.append((places[match[1]], i))
    found: dict[str, list[list[str]]] = {}
    functions = sorted((i, name) for name, i in places.items() if not name.startswith("."))
    for start, stop in spans:
        if not any(start <= low and high <= stop and (low, high) != (start, stop) for low, high in spans):
            name = [name for i, name in functions if i <= start][-1]
            body = [line for line in lines[start : stop + 1] if re.match(r"\t[a-z]", line)]
            found.setdefault(name, []).append(body)
    return found


@compiled
@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize(("row", "act_bits", "instruction"), [("neon_dot", 8, "sdot"), ("neon", 16, "fmla")])
def test_hot_loops_multiply_in_registers(
    row: str, act_bits: int, instruction: str, symmetric: bool, compiler: tools.Cross, tmp_path: Path
) -> None:
    """Every instruction that is needed, and no vector that goes over the stack."""
    spec = spec_of(row, Problem(4096, 4096, 128, "bf16", "fp16", symmetric, False, act_bits))
    vocabulary, tile = spec.target.vocabulary(act_bits, "bf16"), spec.tile
    loops = innermost_loops(compiler.assembly(spec, tmp_path))
    seen = set()
    for name, bodies in loops.items():
        function = re.match(r"_ZL\d+(decode|tile)_(\d+)", name)
        for body in bodies:
            dots = sum(line.split()[0] == instruction for line in body)
            if function is None or not dots:
                continue
            kind, rows = function[1], int(function[2])
            spilled = [line for line in body if STACK.match(line)]
            assert not spilled, f"{name}: {spilled}"
            unroll = max(1, vocabulary.chains_for(rows) // vocabulary.steps) if kind == "decode" else 1
            assert dots == 4 * rows * vocabulary.steps * unroll, name
            seen.add((kind, rows))
    assert seen >= {("decode", rows) for rows in range(1, tile.decode_rows + 1)}
    assert ("tile", tile.rows) in seen
