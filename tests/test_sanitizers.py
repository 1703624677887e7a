# SPDX-License-Identifier: Apache-2.0
"""Rendered kernels under the sanitizers, in a program of their own: no read or write out of bounds, no race."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from rows import COMPILED, target_of

from awqjit.render import render
from awqjit.spec import KernelSpec, Problem

HARNESS = Path(__file__).with_name("sanitizer_harness.cpp")

SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}

# Ragged in everything (groups inside words, N not a multiple of 16), a short last group, and one long group.
SHAPES = ((100, 40, 7), (264, 72, 128), (131, 33, 131))

# Which thread does what is the same source in every row; so is what avx512 and avx_vnni read and write in others.
ROWS = {
    "address": [row for row in COMPILED if row[0] not in ("avx512", "avx_vnni_evex")],
    "thread": [row for row in COMPILED if row[0] in ("avx512_vnni", "avx512_bf16", "portable")],
}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(
    ("sanitizer", "row", "act_bits"), [(name, *row) for name in SANITIZERS for row in ROWS[name]], ids=str
)
def test_a_kernel_is_sound_under(
    sanitizer: str, row: str, act_bits: int, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the sanitizers need g++ or clang++")
    k, n, group = shape
    index = SHAPES.index(shape)
    x_dtype, scale_dtype = (("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "fp16"))[index]
    symmetric, bias = index == 1, index != 1
    problem = Problem(k, n, group, x_dtype, scale_dtype, symmetric, bias, act_bits)
    chosen = target_of(row)
    source = tmp_path / "kernel.cpp"
    source.write_text(render(KernelSpec(problem, chosen, chosen.tile(act_bits, x_dtype))))
    program = tmp_path / "program"
    command = [compiler, "-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", *chosen.flags]
    command += [*SANITIZERS[sanitizer], f'-DKERNEL="{source}"', f"-DSYMMETRIC={int(symmetric)}", f"-DBIAS={int(bias)}"]
    subprocess.run([*command, str(HARNESS), "-o", str(program)], check=True, capture_output=True, text=True)
    # ThreadSanitizer wants its memory map where address randomization of some kernels does not leave it.
    run = [*(("setarch", "-R") if sanitizer == "thread" and shutil.which("setarch") else ()), str(program)]
    result = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout == "sound\n", result.stdout + result.stderr
