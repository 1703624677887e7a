# SPDX-License-Identifier: Apache-2.0
"""The AMX rows: the machine code that ships, executed by an emulator of the tile instructions.

What every row has to show (tests/test_kernels.py) they show here, built by gcc and by clang; then what is special to
them: how many tile instructions there are, where tiles are loaded from, and who asks the operating system for them.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import FunctionType

import compilers
import pytest
import test_kernels as kernels
import torch
from amx_emulator.emulator import FOLDER, SOURCES, Emulator, build, unavailable
from amx_emulator.machine import emulated_amx
from oracle import expected, w4a8_bits
from rows import CASES, COMPILERS, forced, mm, packed, poisoned_memory, target_of, threads
from strategies import RawWeight, Shape

from awqjit import jit, machine, toolchain
from awqjit.render import render
from awqjit.spec import KernelSpec, Problem
from awqjit.toolchain import neutral_command

NEEDED = target_of("avx512_vnni").features | target_of("avx512_bf16").features
NATIVE = "amx_tile" in machine.detect().features
"""On a CPU with AMX nothing is emulated, and nothing counted: what is left are the results."""
WHY_NOT = None if NATIVE else unavailable() or machine.detect().missing(NEEDED)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

ROWS = (("amx_int8", 8), ("amx_bf16", 16))
DOTS = {"amx_int8": "tdpbssd", "amx_bf16": "tdpbf16ps"}

both_rows = pytest.mark.parametrize(("row", "act_bits"), ROWS, ids=str)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    if NATIVE:
        pytest.skip("this CPU has AMX: nothing traps, nothing is emulated")
    return Emulator(build(tmp_path_factory.mktemp("amx") / "libamx.so"))


@pytest.fixture
def amx(request: pytest.FixtureRequest) -> Iterator[Emulator | None]:
    """A machine with AMX: this one, or an emulated one on which nobody has asked for permission to use it."""
    if NATIVE:
        yield None
        return
    emulator = request.getfixturevalue("emulator")
    with emulated_amx(emulator):
        emulator.reset()
        yield emulator
        total = emulator.total()
        assert total.faults == 0, emulator.last_fault
        assert total.split_loads == 0, "a row of a tile lies in two cache lines"
        assert total.undefined_reads == 0, "a tile is read that was not written"


@pytest.fixture
def counted(emulator: Emulator, amx: Emulator | None) -> Emulator:
    """The emulator behind ``amx``."""
    return emulator


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return compilers.by_kind(tmp_path_factory.mktemp("compilers"))


def random_weight(shape: Shape, seed: int = 0) -> RawWeight:
    random = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (shape.k, shape.n), dtype=torch.uint8, generator=random)
    z = torch.randint(0, 16, (shape.groups, shape.n), dtype=torch.uint8, generator=random)
    return RawWeight(shape, q, z, torch.randn(shape.groups, shape.n, generator=random).half() * 0.01, f"seed {seed}")


# ---- what every row has to show ---------------------------------------------------------------------------------


@pytest.fixture
def built(row: str, kind: str, amx: Emulator | None, found: dict[str, str]) -> Iterator[None]:
    """In the place of the fixture of test_kernels.py: its row is one of these, on a machine with AMX."""
    if kind not in found:
        pytest.skip(f"no {kind} here: install g++, clang++ or the package ziglang")
    with forced(row, found[kind]):
        assert toolchain.find_compiler().kind == kind
        yield


def argument_names(mark: pytest.Mark) -> tuple[str, ...]:
    """Of a parametrize mark."""
    return (mark.args[0],) if isinstance(mark.args[0], str) else tuple(mark.args[0])


def on_amx(test: Callable[..., None]) -> Callable[..., None]:
    """A property test of test_kernels.py, with these rows in the place of its own and the rest of its parameters."""
    copy = FunctionType(test.__code__, test.__globals__, test.__name__)
    copy.__doc__, copy.__annotations__ = test.__doc__, test.__annotations__
    copy.pytestmark = [mark for mark in test.pytestmark if not {"row", "case"} & set(argument_names(mark))]
    (names,) = [argument_names(mark) for mark in test.pytestmark if "row" in argument_names(mark)]
    every: list[tuple[object, ...]] = [(row, bits, kind) for row, bits in ROWS for kind in COMPILERS]
    if names == ("row", "kind"):
        every = [(row, kind) for row, bits, kind in every if bits == 8]
    if any("case" in argument_names(mark) for mark in test.pytestmark):
        # With other x than bf16 the row amx_bf16 is the row avx512, word for word.
        pairs = itertools.product(every, CASES)
        every = [(*one, case) for one, case in pairs if "amx_int8" in one or case.x_dtype == torch.bfloat16]
        names = (*names, "case")
    return pytest.mark.parametrize(names, every, ids=str)(copy)


PROPERTIES = tuple(
    name for name, one in vars(kernels).items() if name.startswith("test_") and "row" in signature(one).parameters
)
for name in PROPERTIES:
    globals()[name] = on_amx(getattr(kernels, name))


def test_no_property_is_left_out() -> None:
    assert {"test_a_row_matches_the_oracle", "test_a_w4a8_row_gives_the_bits_of_the_definition"} <= set(PROPERTIES)
    assert set(PROPERTIES) == {name for name in vars(kernels) if name.startswith("test_")}


@pytest.mark.parametrize(("group", "groups"), [(32, 4), (32, 5), (64, 3), (96, 3), (128, 2), (128, 1), (1088, 3)])
@pytest.mark.parametrize("last", [7, 0])
@pytest.mark.parametrize("kind", COMPILERS)
@both_rows
def test_groups_of_many_tiles_and_parts_of_tiles(
    row: str, act_bits: int, kind: str, group: int, groups: int, last: int, built: None
) -> None:
    """1088 rows are 17 tiles of int8, more than a kernel unrolls; a short last group has 7 rows, and fewer tiles."""
    shape = Shape(group * groups + last, 49, group)
    weight = random_weight(shape)
    torch.manual_seed(group)
    x = torch.randn(50, shape.k).bfloat16()
    for m in (50, 11):
        with poisoned_memory(), threads(2):
            y = mm(x[:m], packed(weight), None, act_bits)
        data = (x[:m], weight.q, weight.z, weight.s, group)
        if act_bits == 8:
            assert kernels.same(y, w4a8_bits(*data))
        else:
            expected(*data, act_bits=16).check(y)


# ---- what is special to these -------------------------------------------------------------------------------------


@both_rows
def test_there_are_as_many_products_as_there_are_tiles(row: str, act_bits: int, counted: Emulator) -> None:
    shape = Shape(4 * 128 + 40, 72, 128)  # five column blocks: three pairs. Four groups and 40 rows of a fifth
    weight = packed(random_weight(shape))
    depths = 4 * 2 + 1 if act_bits == 8 else 4 * 4 + 2  # of 64 rows, of 32 rows
    with forced(row), threads(1):
        for m, row_tiles in ((8, 0), (9, 1), (16, 1), (17, 2), (33, 4), (128, 8), (129, 10)):
            x = torch.randn(m, shape.k).bfloat16()
            mm(x, weight, None, act_bits)
            counted.reset()
            mm(x, weight, None, act_bits)
            total = counted.total()
            products = row_tiles * 6 * depths
            assert total.executed[DOTS[row]] == products
            assert sum(count for name, count in total.executed.items() if name.startswith("tdp")) == products
            # Two products a weight tile and two an activation tile; with 16 rows a weight tile has one.
            assert total.executed["tileloadd"] == (products if row_tiles > 1 else products * 3 // 2)
            sums = row_tiles * 6 * 5
            assert total.executed["tilezero"] == total.executed["tilestored"] == sums
            assert total.executed["ldtilecfg"] == total.executed["tilerelease"] == (row_tiles > 0)


@both_rows
def test_each_thread_configures_its_tiles_once(row: str, act_bits: int, counted: Emulator) -> None:
    shape = Shape(512, 512, 128)
    weight, x = packed(random_weight(shape)), torch.randn(64, shape.k).bfloat16()
    with forced(row), threads(2):
        mm(x, weight, None, act_bits)
        counted.reset()
        mm(x, weight, None, act_bits)
    counters = counted.threads()
    assert [one.executed["ldtilecfg"] for one in counters] == [1] * len(counters)
    assert [one.executed["tilerelease"] for one in counters] == [1] * len(counters)
    assert 1 <= len(counters) <= 2


def test_w4a8_rows_agree_in_every_bit(amx: Emulator | None) -> None:
    shape = Shape(576, 192, 64)
    weight = packed(random_weight(shape))
    for m in (1, 8, 16, 100):
        torch.manual_seed(m)
        x = torch.randn(m, shape.k)
        results = []
        for row in ("amx_int8", "avx512_vnni"):
            with forced(row), poisoned_memory():
                results.append(mm(x, weight, None, 8))
                assert [choice.kernel.name for choice in jit.choices()] == [row]
        assert torch.equal(*results)


SOUND = {
    # Sanitizers see what C++ reads and writes. What tiles do they do not see: there the pages have to do.
    "address and undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


@pytest.fixture(scope="module")
def emulator_objects(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("objects")
    for name in (*SOURCES, "preload.c"):
        subprocess.run(["gcc", "-O2", "-c", str(FOLDER / name), "-o", str(folder / f"{name}.o")], check=True)
    return sorted(map(str, folder.iterdir()))


# Which thread does what is the same for every shape.
@pytest.mark.parametrize(
    ("sanitizer", "shape"),
    [
        *(("address and undefined", shape) for shape in ((100, 40, 7), (264, 72, 128), (131, 33, 131), (160, 40, 32))),
        ("thread", (160, 40, 32)),
    ],
    ids=str,
)
@both_rows
def test_nothing_is_touched_beyond_any_buffer(
    row: str, act_bits: int, shape: tuple[int, int, int], sanitizer: str, emulator_objects: list[str], tmp_path: Path
) -> None:
    """Each buffer ends at a page that cannot be touched, and the emulator copies no byte too many."""
    k, n, group = shape
    spec_of = target_of(row)
    problem = Problem(k, n, group, "bf16", "fp16", symmetric=False, bias=True, act_bits=act_bits)
    (tmp_path / "kernel.cpp").write_text(render(KernelSpec(problem, spec_of, spec_of.tile(act_bits, "bf16"))))
    program, harness = tmp_path / "program", FOLDER.parent / "sanitizer_harness.cpp"
    command = ["g++", "-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", *spec_of.flags, *SOUND[sanitizer]]
    command += ["-DSYMMETRIC=0", "-DBIAS=1", f'-DKERNEL="{tmp_path / "kernel.cpp"}"', str(harness), *emulator_objects]
    subprocess.run([*command, "-o", str(program)], check=True)
    environment = {**os.environ, "AMX_EMULATOR_PERMITTED": "1"}
    # ThreadSanitizer wants its memory map where address randomization of some kernels does not leave it.
    run = [*(("setarch", "-R") if sanitizer == "thread" and shutil.which("setarch") else ()), str(program)]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout == "sound\n", (result.returncode, result.stdout, result.stderr)


@both_rows
@pytest.mark.parametrize("kind", ["gcc", "clang"])
def test_the_kernel_keeps_its_vectors_in_registers(
    row: str, act_bits: int, kind: str, found: dict[str, str], tmp_path: Path
) -> None:
    """And the two tiles of each product are loaded from addresses in registers, with nothing spilled in between."""
    if kind not in found:
        pytest.skip(f"no {kind} here")
    target = target_of(row)
    problem = Problem(1024, 256, 128, "bf16", "fp16", symmetric=False, bias=False, act_bits=act_bits)
    (tmp_path / "kernel.cpp").write_text(render(KernelSpec(problem, target, target.tile(act_bits, "bf16"))))
    command = [*shlex.split(found[kind]), *neutral_command(target.flags)[1:]]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    listing = subprocess.run(
        ["objdump", "-d", "-w", "--no-show-raw-insn", str(tmp_path / "kernel.so")],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    functions = {part.partition(">:")[0].rpartition("<")[2]: part for part in listing.split("\n\n") if ">:" in part}
    hot = {name: text for name, text in functions.items() if "multiply_" in name and "tdp" in text}
    assert len([name for name in hot if "drain" in name]) >= 2
    for name, text in hot.items():
        assert not [line for line in text.splitlines() if "mm" in line and ("(%rsp" in line or "(%rbp" in line)], name
