# SPDX-License-Identifier: Apache-2.0
"""Who finds AMX, who asks the operating system for it and when, and what is said where it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_amx
import torch
from amx_emulator.emulator import Emulator, build
from amx_emulator.machine import emulated_amx
from rows import forced, mm, packed, threads
from strategies import Shape
from test_amx import WHY_NOT, both_rows, random_weight

from awqjit import cpuid, machine, select
from awqjit.errors import KernelRefusedError
from awqjit.spec import Problem

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

emulator, amx, counted = test_amx.emulator, test_amx.amx, test_amx.counted  # fixtures


def problem(act_bits: int) -> Problem:
    return Problem(512, 128, 128, "bf16", "fp16", symmetric=False, bias=False, act_bits=act_bits)


@both_rows
def test_with_amx_the_row_is_chosen_and_permission_asked_for_once(row: str, act_bits: int, counted: Emulator) -> None:
    assert counted.permission_requests == 0
    assert select.choose(problem(act_bits), machine.detect()).name == row
    assert select.choose(problem(act_bits), machine.detect()).name == row
    assert counted.permission_requests == 1


@both_rows
def test_without_permission_the_next_row_is_chosen_and_the_reason_told(
    row: str, act_bits: int, emulator: Emulator
) -> None:
    with emulator.denying(), emulated_amx(emulator):
        here = machine.detect()
        assert select.choose(problem(act_bits), here).name == row.replace("amx_int8", "avx512_vnni").replace(
            "amx", "avx512"
        )
        (reason,) = [verdict.reason for verdict in select.explain(problem(act_bits), here) if verdict.row.name == row]
        assert reason and "does not let this process use tile registers" in reason
        assert "alternative signal stack that is too small" in reason
        with pytest.raises(KernelRefusedError, match="alternative signal stack"):
            select.choose(problem(act_bits), here, forced=row)


def test_a_cap_below_amx_hides_it(amx: Emulator | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_MAX_ISA", "avx512_bf16")
    assert select.choose(problem(8), machine.detect()).name == "avx512_vnni"


def test_a_machine_without_amx_is_never_asked(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpuid, "_arch_prctl", lambda *arguments: pytest.fail("asked for tile registers"))
    monkeypatch.setattr(machine, "_features", machine._features.__wrapped__)
    assert "amx_tile" not in machine.detect().features


def test_a_forked_child_asks_again_and_computes_the_same(counted: Emulator) -> None:
    weight, x = packed(random_weight(Shape(512, 128, 128))), torch.randn(40, 512)
    with forced("amx_int8"), threads(1):
        wanted = mm(x, weight, None, 8)
        asked = counted.permission_requests
        child = os.fork()
        if child == 0:
            code = 1
            try:
                again = counted.permission_requests == asked + 1
                code = 0 if again and torch.equal(mm(x, weight, None, 8), wanted) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_system_call_is_the_one_that_linux_knows(emulator: Emulator, tmp_path: Path) -> None:
    """Without an override, by the C library: answered by the emulator, preloaded."""
    library = build(tmp_path / "libamx.so", "preload.c")
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    code = "from awqjit import cpuid; print(repr(cpuid.request_tiles()))"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "''\n"


def test_linux_s_own_refusal_is_told(emulator: Emulator) -> None:
    """This machine has no AMX, and its operating system says so."""
    assert "does not let this process use tile registers" in cpuid.request_tiles()
