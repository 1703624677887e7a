# SPDX-License-Identifier: Apache-2.0
"""Bugs put into the Triton kernels one at a time: the checks of test_triton.py catch each of them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: set TRITON_INTERPRET=1", allow_module_level=True)

import torch
from rows import poisoned_memory
from strategies import Shape
from triton_cases import check, hostile_rows, random_weight

from awqjit.backends import triton as backend

SOURCE = Path(backend.__file__).with_name("triton_kernels.py")

BUGS: dict[str, tuple[str, str]] = {
    "nibbles in another order": ("4 * tl.arange(0, 8)", "28 - 4 * tl.arange(0, 8)"),
    "words of a fragment swapped": ("(word // 4) * 64 + word % 4", "(word // 4) * 64 + (word ^ 1) % 4"),
    "the next lane's column": ("column % 16 * 4", "(column + 1) % 16 * 4"),
    "the first group's zero point": (
        "zeros + tl.cast(group, tl.int64) * padded",
        "zeros + tl.cast(group * 0, tl.int64) * padded",
    ),
    "a symmetric zero point of 7": ("return q - 8", "return q - 7"),
    "x of the next group in a tile": ("(k >= low) & (k < high)", "(k >= low) & (k < high + 1)"),
    "x before its group in a tile": ("(k >= low) & (k < high)", "(k < high)"),
    "a short last slice": (
        "stop = tl.minimum(start + slice_steps, steps)",
        "stop = tl.minimum(start + slice_steps, steps - 1)",
    ),
    "slices on top of each other": ("out += tl.program_id(1).to(tl.int64) * rows * columns", "out += 0 * rows"),
    "a slice left out": ("for index in range(slices):", "for index in range(slices - 1):"),
    "bias of another column": ("bias + at % columns", "bias + at // columns"),
    "product and sum rounded apart": (
        "tl.fma(part.to(tl.float32), widened(s, INTERPRETED)[:, None] * d[None, :], total)",
        "part.to(tl.float32) * (widened(s, INTERPRETED)[:, None] * d[None, :]) + total",
    ),
    "ties away from zero": ("+ 12582912.0) - 12582912.0", "+ tl.where(value < 0, -0.5, 0.5))"),
    "the reciprocal of 127": ("tl.div_rn(amax, full)", "amax * (1 / 127)"),
    "tiny groups not zero": ("bits >= 0x04000000", "bits >= 0x00800000"),
    "NaN lost": ('tl.where(finite, 0.0, float("nan"))', "0.0"),
    "the largest, not the largest magnitude": ("& 0x7FFFFFFF", "& -1"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = BUGS[bug]
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(right) == 1, "the bug is not one place in the source"
    path = tmp_path / "triton_mutant.py"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("triton_mutant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(backend, "_kernels", lambda: module)
    with pytest.raises(AssertionError), poisoned_memory():
        for seed, (group, zeros) in enumerate(((32, True), (12, False), (40, True))):
            weight = random_weight(Shape(232, 40, group), seed, zeros)
            bias = torch.randn(40, generator=torch.Generator().manual_seed(seed))
            for act_bits in (8, 16):
                for m in (9, 18):
                    check(weight, hostile_rows(m, 232, torch.float32, seed), bias if m == 9 else None, act_bits)
