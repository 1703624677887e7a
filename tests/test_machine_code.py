# SPDX-License-Identifier: Apache-2.0
"""What compilers make of the x86-64 rows: hot loops leave the stack alone, a row uses only instructions it asked for.

Kernels are disassembled, not run, so rows are looked at that this CPU does not have.
"""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import compilers
import pytest

from awqjit.render import render
from awqjit.spec import KernelSpec, Problem
from awqjit.target import TARGETS, Tile, target
from awqjit.toolchain import neutral_command

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="looks at x86-64 machine code"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="NO objdump: MACHINE CODE IS NOT CHECKED"),
]

DOTS = {
    "avx512_vnni": "vpdpbusd",
    "avx_vnni": "vpdpbusd",
    "avx512_int16": "vpmaddubsw",
    "avx2_int16": "vpmaddubsw",
    "avx512_bf16": "vdpbf16ps",
    "avx512_fp32": "vfmadd",
    "avx2_fp32": "vfmadd",
}
"""Vocabulary -> the instruction its hot loops are made of."""

# Every vocabulary of an x86-64 row with a dtype of x that takes it.
BUILDS = tuple(
    (row.name, bits, dtype)
    for row in TARGETS
    for bits in row.act_bits
    for dtype in ("bf16", "fp32")
    if row.vocabularies[bits, dtype] in DOTS
    and (dtype == "bf16" or row.vocabularies[bits, dtype] != row.vocabularies[bits, "bf16"])
)


@dataclass(frozen=True)
class Instruction:
    address: int
    code: bytes
    text: str

    @property
    def evex(self) -> bool:
        """Encoded as AVX512 instructions are. 0x62 begins nothing else in 64-bit mode."""
        return self.code[0] == 0x62

    @property
    def vex(self) -> bool:
        """Encoded as AVX and AVX2 instructions are. 0xC4 and 0xC5 begin nothing else in 64-bit mode."""
        return self.code[0] in (0xC4, 0xC5)


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return compilers.by_kind(tmp_path_factory.mktemp("compilers"))


def disassembled(spec: KernelSpec, compiler: str, folder: Path) -> dict[str, list[Instruction]]:
    """The functions of a kernel, built as awqjit builds it."""
    (folder / "kernel.cpp").write_text(render(spec), encoding="utf-8")
    command = [*shlex.split(compiler), *neutral_command(spec.target.flags)[1:]]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    command = ["objdump", "-d", "-w", "--insn-width=16", str(folder / "kernel.so")]
    listing = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    functions: dict[str, list[Instruction]] = {}
    for line in listing.splitlines():
        if start := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            current = functions.setdefault(start[1], [])
        elif one := re.fullmatch(r"\s*([0-9a-f]+):\t((?:[0-9a-f]{2} )+)\s*\t(.+)", line):
            current.append(Instruction(int(one[1], 16), bytes.fromhex(one[2]), one[3].strip()))
    return functions


def hot_loops(function: list[Instruction], dot: str) -> list[list[Instruction]]:
    """Loops without a loop in them that hold the instruction ``dot``."""
    first = function[0].address
    ranges = []
    for one in function:
        jump = re.match(r"j\w+\s+([0-9a-f]+)\b", one.text)
        if jump and first <= int(jump[1], 16) <= one.address:
            ranges.append((int(jump[1], 16), one.address))
    inner = [a for a in ranges if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in ranges)]
    loops = [[one for one in function if low <= one.address <= high] for low, high in inner]
    return [loop for loop in loops if any(dot in one.text for one in loop)]


def spills(function: list[Instruction], loop: list[Instruction]) -> list[str]:
    """Instructions of a loop that move or use a vector register's worth of the stack."""
    # Without a frame rbp is a register like any other.
    frame = any(re.match(r"mov\s+%rsp,%rbp", one.text) for one in function)
    stack = r"\(%r[sb]p" if frame else r"\(%rsp"
    return [one.text for one in loop if re.search(stack, one.text) and re.search(r"%[xyz]mm", one.text)]


def kernel(row: str, act_bits: int, dtype: str, tile: Tile | None = None) -> KernelSpec:
    # Whole groups only: no remainders beside the loops that matter.
    problem = Problem(1024, 256, 128, dtype, "fp16", symmetric=False, bias=False, act_bits=act_bits)
    return KernelSpec(problem, target(row), tile or target(row).tile(act_bits, dtype))


@pytest.mark.parametrize("kind", ["gcc", "clang"])
@pytest.mark.parametrize(("row", "act_bits", "dtype"), BUILDS, ids=str)
def test_hot_loops_leave_the_stack_alone_and_use_what_the_row_allows(
    row: str, act_bits: int, dtype: str, kind: str, found: dict[str, str], tmp_path: Path
) -> None:
    if kind not in found:
        pytest.skip(f"no {kind} here")
    spec = kernel(row, act_bits, dtype)
    vocabulary = spec.target.vocabulary(act_bits, dtype)
    functions = disassembled(spec, found[kind], tmp_path)
    seen = set()
    for name, function in functions.items():
        loops = hot_loops(function, DOTS[vocabulary.name])
        assert not [text for loop in loops for text in spills(function, loop)], name
        if part := re.search(r"(decode|tile)_(\d+)R", name):
            assert loops, f"{name} has no loop of {DOTS[vocabulary.name]}"
            seen.add((part[1], int(part[2])))
    assert {rows for part, rows in seen if part == "decode"} == set(range(1, spec.tile.decode_rows + 1))
    assert (("tile", spec.tile.rows) in seen) == spec.tile.has_prefill

    code = [one for function in functions.values() for one in function]
    names = " ".join({one.text.removeprefix("{vex} ").split()[0] for one in code})
    others = {"vpdpbusd", "vdpbf16ps"} - {DOTS[vocabulary.name]}
    assert not [name for name in others if name in names]
    assert ("avx512f" in spec.target.features) == row.startswith(("avx512", "amx"))
    if "avx512f" in spec.target.features:
        assert any("%zmm" in one.text for one in code)
    else:
        assert not [one.text for one in code if one.evex or re.search(r"%zmm|%k[0-7]", one.text)]
        assert [one for one in code if DOTS[vocabulary.name] in one.text and one.vex and "%ymm" in one.text]


@pytest.mark.parametrize("kind", ["gcc", "clang"])
@pytest.mark.parametrize("act_bits", [8, 16])
def test_the_portable_row_uses_what_every_x86_64_cpu_has(
    act_bits: int, kind: str, found: dict[str, str], tmp_path: Path
) -> None:
    if kind not in found:
        pytest.skip(f"no {kind} here")
    functions = disassembled(kernel("portable", act_bits, "bf16"), found[kind], tmp_path)
    code = [one for function in functions.values() for one in function]
    assert any("%xmm" in one.text for one in code)
    assert not [one.text for one in code if one.vex or one.evex or re.search(r"%[yz]mm", one.text)]


def test_a_tile_of_more_rows_than_there_are_registers_for_is_found_out(found: dict[str, str], tmp_path: Path) -> None:
    spec = kernel("avx2", 16, "bf16", Tile(rows=9, blocks=1, decode_rows=1))
    functions = disassembled(spec, next(iter(found.values())), tmp_path)
    (name,) = [name for name in functions if "tile_9R" in name]
    (loop,) = hot_loops(functions[name], "vfmadd")
    assert spills(functions[name], loop)
