# SPDX-License-Identifier: Apache-2.0
"""``awqjit demo``: a question, its answer, and one table of kernels, speed and memory beside plain torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from awqjit import jit
from awqjit.cli.demo_weights import prepare
from awqjit.errors import AwqJitError
from awqjit.integrations.transformers import local_folder

QUESTION = "What is the capital of France?"


class ContenderError(AwqJitError, RuntimeError):
    """A process of the demo failed."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(kind, what)

    def __str__(self) -> str:
        kind, what = self.args
        return f"the demo's {kind} run {what}"


@dataclass(frozen=True)
class Result:
    """What the demo found.

    Attributes:
        folder: the model.
        compute: "w4a16" or "w4a8".
        int4: figures of the int4 model (see `awqjit.cli.contender.run`).
        dense: figures of the same weights, dequantized to bf16, in plain torch.
        own_weights: the model is the demo's own, whose right answer is known.
    """

    folder: str
    compute: str
    int4: dict[str, Any]
    dense: dict[str, Any]
    own_weights: bool

    @property
    def right(self) -> bool:
        """The answer is right, as far as that can be known."""
        return not self.own_weights or "Paris" in self.int4["answer"]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that belong below the table."""
        threads = f"Eager mode, {torch.get_num_threads()} threads, batch 1; lm_head is float in both columns."
        twice = "These weights were quantized twice: Q4_1 -> float -> AWQ. A model's own AWQ folder answers better."
        return (threads, *((twice,) if self.own_weights else ()))

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Rows that come before those that ran, and why they did not; not those of the other compute mode."""
        reasons = [(one["kernel"], one["reason"]) for row in self.int4["kernels"] for one in row["passed_over"]]
        return tuple(f"Not used: {line}." for line in jit.grouped(reasons))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "folder": self.folder,
            "compute": self.compute,
            "question": QUESTION,
            "int4": self.int4,
            "dense": self.dense,
            "right": self.right if self.own_weights else None,
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """The one table."""
        table = Table(title=f"{self.folder}, bf16 activations", title_justify="left")
        for column in ("", f"awqjit int4 {self.compute}", "plain torch, bf16"):
            table.add_column(column, overflow="fold")
        for row in self.int4["kernels"]:
            shape = f"{row['layers']} x {row['in_features']} -> {row['out_features']}, g {row['group_size']}"
            table.add_row(shape, escape(_kernel(row)), "nn.Linear")
        table.add_section()
        for name, key, scale, unit in (
            ("prefill", "prefill_tokens_per_second", 1, "tokens/s"),
            ("decode", "decode_tokens_per_second", 1, "tokens/s"),
            (f"peak memory\n{self.int4['peak_counts']}", "peak_bytes", 1e6, "MB"),
        ):
            table.add_row(name, *(f"{side[key] / scale:.1f} {unit}" for side in (self.int4, self.dense)))
        # Without the other side's: that one reads int4 weights and dequantizes them, which nobody else does.
        table.add_row("load", f"{self.int4['load_seconds']:.1f} s", "")
        return table


def _kernel(row: dict[str, Any]) -> str:
    """The kernel's name, and how long it took to be there: nothing to tell of the rows that are not compiled."""
    if row["kernel"] in jit.WITHOUT_COMPILER:
        return str(row["kernel"])
    compiled = "" if row["compile_seconds"] is None else f"compile {row['compile_seconds']:.2f} s, "
    return f"{row['kernel']}\n{compiled}load {row['load_seconds'] * 1e3:.1f} ms"


def run(model: str | None, compute: str, quiet: bool = False) -> Result:
    """Run both contenders, one after the other, each in its own process.

    Args:
        model: an AWQ or GPTQ folder; None takes the demo's own model.
        compute: "w4a16" or "w4a8".
        quiet: print neither question nor answer.

    Raises:
        DemoWeightsError: the demo's own model cannot be had.
        ContenderError: a contender failed.
    """
    folder = str(prepare(show_progress=not quiet)) if model is None else str(local_folder(model))
    if not quiet:
        Console().print(f"[bold]{QUESTION}[/bold]")
    int4 = _contend(folder, "int4", compute, quiet, QUESTION)
    console = Console(stderr=True)
    with console.status("the same weights in plain torch ...") if console.is_terminal else nullcontext():
        dense = _contend(folder, "dense", compute, quiet)
    return Result(folder, compute, int4, dense, own_weights=model is None)


def _contend(folder: str, kind: str, compute: str, quiet: bool, *question: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "result.json"
        command = [sys.executable, "-m", "awqjit.cli.contender", folder, kind, compute, str(result), *question]
        done = subprocess.run(command, stdout=subprocess.DEVNULL if quiet else None, check=False)
        if done.returncode or not result.exists():
            raise ContenderError(kind, f"stopped with exit code {done.returncode}; its messages are above")
        found = dict(json.loads(result.read_text(encoding="utf-8")))
        if "error" in found:
            raise ContenderError(kind, f"failed: {found['error']}")
        return found
