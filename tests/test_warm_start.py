# SPDX-License-Identifier: Apache-2.0
"""A process that finds its kernels in a cache: it starts no program and writes no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compilers
import pytest

import awqjit
from awqjit import config
from awqjit.spec import Problem

PROBLEMS = [
    Problem(64, n, 32, "bf16", "fp16", symmetric=False, bias=False, act_bits=bits)
    for n in (16, 32, 48, 64)
    for bits in (16, 8)
]

# Audit events come from the interpreter itself, whatever module is at work. Names are what docs.python.org lists.
WATCHED = r"""
import json, os, sys
import torch
import awqjit
from awqjit.spec import Problem

problems = [Problem(**fields) for fields in json.load(sys.stdin)]
events = []

def hook(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        events.append(f"open {args[0]}")
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system", "os.mkdir", "os.remove",
                   "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"):
        events.append(f"{event} {args[0] if args else ''}")

sys.addaudithook(hook)
choices = awqjit.warm(problems, show_progress=False)
print(json.dumps({"events": events, "origins": [choice.origin for choice in choices]}))
"""


def watched() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-B", "-c", WATCHED],
        input=json.dumps([vars(problem) for problem in PROBLEMS]),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
@pytest.mark.parametrize("place", ["cache_dir", "cache_path"])
def test_the_eight_kernels_of_a_model_are_loaded_without_a_compiler_and_without_writing(
    kernel_cache: Path, tmp_path: Path, place: str
) -> None:
    awqjit.warm(PROBLEMS, show_progress=False)
    other = {"cache_path": str(kernel_cache), "cache_dir": str(tmp_path / "none")} if place == "cache_path" else {}
    with config.override(**other):
        found = watched()
    assert found["origins"] == ["baked" if place == "cache_path" else "cache"] * len(PROBLEMS)
    assert found["events"] == []
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
def test_the_watch_sees_a_compiler_and_what_it_writes(tmp_path: Path) -> None:
    with config.override(cache_dir=str(tmp_path / "cold"), kernel="portable", jobs="2"):
        cold = watched()
    assert "built" in cold["origins"]
    assert any(event.startswith("subprocess.Popen") for event in cold["events"])
    assert any(event.startswith("os.mkdir") for event in cold["events"])
