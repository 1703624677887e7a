# SPDX-License-Identifier: Apache-2.0
"""Kernels for aarch64: cross-compiled, run under emulation, and compared with the definition.

What is not installed is skipped; the reasons say what to install.
"""

from __future__ import annotations

import itertools
import mmap
import platform
import re
import signal
from collections.abc import Callable
from dataclasses import replace
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

from awqjit import config, hwcap, machine, select
from awqjit.cpuid import UnreadableError
from awqjit.errors import ConfigError
from awqjit.machine import ARM_LEVELS, ISA_LEVELS, Machine, levels_of
from awqjit.spec import KernelSpec, Problem
from awqjit.target import TARGETS, target

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


# ---- detection and selection ------------------------------------------------------------------------------------


W4A16 = Problem(4096, 11008, 128, "bf16", "fp16", symmetric=False, bias=False, act_bits=16)
W4A8 = replace(W4A16, act_bits=8)
NOTHING = frozenset[str]()
OLD, NEW = frozenset({"asimd"}), frozenset({"asimd", "asimddp"})


@pytest.mark.parametrize(
    ("architecture", "system", "features", "wanted"),
    [
        ("aarch64", "Linux", NEW, {16: "neon", 8: "neon_dot"}),
        ("arm64", "Darwin", NEW, {16: "neon", 8: "neon_dot"}),
        ("aarch64", "Linux", OLD, {16: "neon", 8: "portable"}),
        ("aarch64", "Linux", NOTHING, {16: "portable", 8: "portable"}),
        ("x86_64", "Linux", NEW, {16: "portable", 8: "portable"}),
        ("arm64", "Windows", NEW, {16: "torch", 8: "torch"}),
    ],
)
def test_the_best_row_of_an_arm_machine_is_chosen(
    architecture: str, system: str, features: frozenset[str], wanted: dict[int, str]
) -> None:
    here = Machine(architecture, system, "an ARM CPU", features)
    assert {bits: select.choose(replace(W4A16, act_bits=bits), here).name for bits in wanted} == wanted


def test_a_refusal_names_what_the_cpu_lacks() -> None:
    here = Machine("aarch64", "Linux", "an ARM CPU", OLD)
    reasons = {verdict.row.name: verdict.reason for verdict in select.explain(W4A8, here)}
    assert reasons["neon_dot"] == "this CPU has no asimddp"
    assert reasons["neon"] == "computes w4a16 only"
    assert reasons["avx512_vnni"] == "needs x86_64, this is aarch64"


def test_every_feature_of_an_arm_row_can_be_detected_and_capped() -> None:
    detected = set().union(*(features for _, features in ARM_LEVELS))
    assert detected == hwcap.FEATURES.keys()
    for one in TARGETS:
        if set(one.machines) & set(hwcap.MACHINES):
            assert one.features <= detected
    assert not detected & set().union(*(features for _, features in ISA_LEVELS))
    assert {name: levels_of(name) for name in ("aarch64", "arm64", "x86_64", "AMD64")} == {
        "aarch64": ARM_LEVELS,
        "arm64": ARM_LEVELS,
        "x86_64": ISA_LEVELS,
        "AMD64": ISA_LEVELS,
    }


@pytest.fixture
def arm_linux(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """This process as it would be on an ARM machine under Linux; the two words of bits, to be filled in."""
    words = {hwcap.HWCAP: 0, hwcap.HWCAP2: 0}
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(hwcap, "_getauxval", lambda: words.__getitem__)
    monkeypatch.setattr(machine, "_features", machine._features.__wrapped__)  # keeps no answer
    return words


def test_linux_tells_the_features_by_bits(arm_linux: dict[int, int]) -> None:
    # As the kernel's header numbers them: HWCAP_ASIMD, HWCAP_ASIMDDP; HWCAP2_I8MM.
    arm_linux[hwcap.HWCAP] = 1 << 1 | 1 << 20
    arm_linux[hwcap.HWCAP2] = 1 << 13
    here = machine.detect()
    assert here.features == {"asimd", "asimddp", "i8mm"}
    assert here.source == "HWCAP and HWCAP2"
    assert [(level.name, level.on) for level in here.levels()] == [
        ("portable", True),
        ("neon", True),
        ("neon_dot", True),
        ("neon_i8mm", True),
        ("neon_bf16", False),
    ]
    assert here.levels()[-1].reason == "bf16: the CPU does not have it"
    arm_linux[hwcap.HWCAP] = 1 << 20
    assert machine.detect().features == {"asimddp", "i8mm"}


def test_max_isa_takes_the_levels_of_arm(arm_linux: dict[int, int]) -> None:
    arm_linux[hwcap.HWCAP] = arm_linux[hwcap.HWCAP2] = 2**64 - 1
    chosen = {}
    for level, _ in ARM_LEVELS:
        with config.override(max_isa=level):
            here = machine.detect()
        chosen[level] = [select.choose(problem, here).name for problem in (W4A16, W4A8)]
    assert chosen["portable"] == ["portable", "portable"]
    assert chosen["neon"] == ["neon", "portable"]
    assert chosen["neon_dot"] == chosen["neon_bf16"] == ["neon", "neon_dot"]
    with config.override(max_isa="neon"):
        (level,) = [level for level in machine.detect().levels() if level.name == "neon_dot"]
    assert not level.on
    assert level.reason == "asimddp: hidden by AWQJIT_MAX_ISA=neon"
    with config.override(max_isa="avx2"), pytest.raises(ConfigError, match="portable, neon, neon_dot"):
        machine.detect()


def test_where_the_c_library_does_not_tell_the_linux_kernel_is_asked(
    arm_linux: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise AttributeError("no getauxval")

    monkeypatch.setattr(hwcap, "_getauxval", absent)
    monkeypatch.setattr(machine, "_cpuinfo", lambda: ("an ARM CPU", frozenset({"fp", "asimd"})))
    here = machine.detect()
    assert here.features == {"asimd"}
    assert here.source == "/proc/cpuinfo (the C library does not say what the CPU has: no getauxval)"
    assert here.absent["asimddp"].startswith("/proc/cpuinfo does not list it")


def test_macos_tells_the_features_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"hw.optional.neon": 1, "hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_BF16": 0}
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(hwcap, "_sysctl", lambda name: known.get(name, 0))
    reasons, source = hwcap.explain_features()
    assert {name for name, reason in reasons.items() if not reason} == {"asimd", "asimddp"}
    assert source == "sysctl hw.optional"


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    with pytest.raises(UnreadableError, match="not read on Plan9"):
        hwcap.explain_features()


@pytest.mark.skipif(platform.system() != "Linux", reason="getauxval is Linux's")
def test_the_words_are_read_by_their_keys() -> None:
    """AT_PAGESZ, 6: the same call answers with something that is known here."""
    assert hwcap._getauxval()(6) == mmap.PAGESIZE
