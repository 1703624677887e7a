# SPDX-License-Identifier: Apache-2.0
"""The macros for tile instructions: what compilers make of code that loads tiles from memory it has just written."""

from __future__ import annotations

import ctypes
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import compilers
import pytest
import torch
from amx_emulator.emulator import FOLDER, Emulator, build, unavailable

from awqjit.render import _environment

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

ARCH_REQ_XCOMP_PERM, XTILEDATA = 0x1023, 18


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return compilers.by_kind(tmp_path_factory.mktemp("compilers"))


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with Emulator(build(tmp_path_factory.mktemp("amx") / "libamx.so")).installed() as emulator:
        assert emulator.arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0
        yield emulator


def wrong_sums(emulator: Emulator, compiler: str, level: str, folder: Path, *defines: str) -> int:
    """How many of 256 sums the hazard code gets wrong."""
    macros = _environment().from_string('{% include "cpu/amx/tiles.h.jinja" %}')
    (folder / "tiles.h").write_text(macros.render(act_bits=8, depth_words=8, depths=1))
    library = folder / "hazards.so"
    flags = ["-std=c++17", level, "-fPIC", "-shared", "-mavx512f", "-mavx512bw", "-mamx-tile", "-mamx-int8", *defines]
    command = [*shlex.split(compiler), *flags, f'-DTILES="{folder / "tiles.h"}"', str(FOLDER / "hazards.cpp")]
    subprocess.run([*command, "-o", str(library)], check=True, capture_output=True, timeout=300)
    torch.manual_seed(0)
    a = torch.randint(-128, 128, (4, 16, 64), dtype=torch.int8)
    q = torch.randint(0, 16, (4, 16, 64), dtype=torch.uint8)
    packed = q[:, :8] | q[:, 8:] << 4
    c = torch.full((16, 16), -1, dtype=torch.int32)
    emulator.reset()
    ctypes.CDLL(str(library)).multiply(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, packed.contiguous(), c)))
    assert emulator.total().executed["tdpbssd"] == 4
    # Row r of a weight tile holds four rows of the weight, column by column.
    weight = (q.long() - 8).reshape(4, 16, 16, 4).permute(0, 1, 3, 2).reshape(256, 16)
    wanted = 2 * (a.long().permute(1, 0, 2).reshape(16, 256) @ weight)
    return int((c != wanted).sum())


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
@pytest.mark.parametrize("kind", ["gcc", "clang"])
def test_no_store_is_lost(kind: str, level: str, found: dict[str, str], emulator: Emulator, tmp_path: Path) -> None:
    if kind not in found:
        pytest.skip(f"no {kind} here")
    assert wrong_sums(emulator, found[kind], level, tmp_path) == 0


def test_the_code_is_one_that_gcc_s_own_intrinsics_break(
    found: dict[str, str], emulator: Emulator, tmp_path: Path
) -> None:
    """Or the test above would show nothing."""
    if "gcc" not in found:
        pytest.skip("no gcc here")
    version = subprocess.run([found["gcc"], "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(re.match(r"\d+", version)[0]) > 13:
        pytest.skip("known of gcc 11 to 13")
    assert wrong_sums(emulator, found["gcc"], "-O3", tmp_path, "-DINTRINSICS") > 0
