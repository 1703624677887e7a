# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels through Triton's whole compiler, for GPUs that need not be there: types, and what they turn into.

The interpreter accepts programs that the compiler refuses.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from awqjit.backends.triton_plan import TABLE

TESTS = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's wheel brings NVIDIA's assembler for x86-64"),
]

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program can have, by compute capability (CUDA C++ Programming Guide)."""


def kernels(what: str, capability: int, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "AWQJIT_"))}
    done = subprocess.run(
        [sys.executable, str(TESTS / "triton_compile.py"), what, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("what", "capability"), [("every_shape", 90), ("few_shapes", 80)])
def test_every_kernel_compiles_to_machine_code(what: str, capability: int, tmp_path: Path) -> None:
    found = kernels(what, capability, tmp_path)
    assert {one["kernel"] for one in found} == {"quantize", "multiply", "add_slices"}
    for one in found:
        assert one["machine_code"] > 0 and one["shared"] <= SHARED[capability], one
        assert one["ftz"] == 0, f"subnormal numbers are flushed: {one}"
        if one["kernel"] == "quantize":
            assert one["fma"] == 0, "x * inverse is not rounded before it is rounded to an integer"
            assert one["div"] == ["div.rn.f32"], one
    multiplies = [one for one in found if one["kernel"] == "multiply"]
    matrix = [unit for one in multiplies for unit in one["matrix"]]
    assert any("bf16" in unit for unit in matrix) and any("f16.f16" in unit for unit in matrix)
    assert any("s8.s8" in unit for unit in matrix)
    assert sum(not one["matrix"] for one in multiplies) == 2, "all but w4a16 of fp32 run on the matrix unit"
    assert not any("tf32" in unit for unit in matrix), "fp32 is shortened"
    if what == "every_shape":
        used = {tuple(one["options"].values()) for one in multiplies}
        assert {(b.rows, b.columns, b.warps, b.stages) for part in TABLE.values() for b in part} <= used
        assert any("wgmma" in unit for unit in matrix)


def test_tritons_tuner_tries_the_table_and_its_outcome_is_kept(tmp_path: Path) -> None:
    found = kernels("tuned", 90, tmp_path)
    tried = [tuple(one["options"].values()) for one in found if one["kernel"] == "multiply"]
    assert {(b.rows, b.columns, b.warps, b.stages) for b in TABLE["few rows"]} == set(tried)
