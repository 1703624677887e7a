# SPDX-License-Identifier: Apache-2.0
"""Puts the figures of `benchmarks/results` into the documents: ``python -m benchmarks.report [--check]``.

A document marks where a table goes with ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; what stands between
is written from the newest result, so that no figure in a document is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")

_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_MODELS = {"smollm2": "SmolLM2-135M, group 32", "qwen2-1.5b": "Qwen2-1.5B's shape, group 128"}


def newest(kind: str) -> dict[str, Any]:
    """The newest result of one benchmark.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob(f"{kind}-*.json")]
    if not found:
        raise FileNotFoundError(f"no {RESULTS}/{kind}-*.json: run python -m benchmarks.{kind}")
    return max(found, key=lambda result: result["machine"]["time"])


def _machine(result: dict[str, Any]) -> str:
    machine, after = result["machine"], result["machine_after"]
    load = " and ".join(f"{one['load_average'][0]:.1f}" for one in (machine, after))
    return (
        f"{machine['cpu']} ({machine['cpu_family_model']}), {machine['threads']} threads on {machine['usable_cores']} "
        f"cores, torch {machine['torch']}, {machine['time'][:10]}; load average {load} before and after."
    )


def speed_table() -> str:
    """Median tokens per second of each contender and mode."""
    result = newest("models")
    lines = ["| model | contender | prefill, tokens/s | decode, tokens/s |", "|---|---|---|---|"]
    for key, title in _MODELS.items():
        model = result["models"][key]
        for name, run in model["contenders"].items():
            prefill = model["prefill_tokens"] / run["prefill_seconds"]["median"]
            decode = 1 / run["decode_seconds_per_token"]["median"]
            lines.append(f"| {title} | {name} | {prefill:.0f} | {decode:.1f} |")
    return "\n".join([*lines, "", _machine(result)])


def ratio_table() -> str:
    """Speed relative to dense bf16 in plain torch, eager."""
    result = newest("models")
    lines = ["| model | mode | prefill of 512 tokens | decode |", "|---|---|---|---|"]
    for key, title in _MODELS.items():
        ratios = result["models"][key]["ratios"]
        for mode in ("w4a16", "w4a8"):
            figures = (ratios[f"{phase} {mode}"]["eager"] for phase in ("prefill", "decode"))
            lines.append(f"| {title} | {mode} | {' | '.join(f'{figure:.2f} ×' for figure in figures)} |")
    return "\n".join([*lines, "", _machine(result)])


def startup_table() -> str:
    """What the first use costs."""
    result = newest("startup")
    lines = ["| what | median | largest |", "|---|---|---|"]
    for what, row in result["summary"].items():
        if "max" in row:
            lines.append(f"| {what} | {_time(row['median'])} | {_time(row['max'])} |")
    return "\n".join([*lines, "", _machine(result)])


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


TABLES: dict[str, Callable[[], str]] = {"ratios": ratio_table, "speeds": speed_table, "startup": startup_table}


def filled(text: str) -> str:
    """A document with its tables written anew."""
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a document is out of date")
    check = parser.parse_args().check
    stale = 0
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        if filled(text) == text:
            continue
        stale += 1
        if check:
            print(f"{path} does not agree with {RESULTS}: run python -m benchmarks.report", file=sys.stderr)
        else:
            path.write_text(filled(text), encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
