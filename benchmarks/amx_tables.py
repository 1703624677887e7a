# SPDX-License-Identifier: Apache-2.0
"""What the documents show of :mod:`benchmarks.amx_estimate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULT = Path(__file__).with_name("results") / "amx-estimate-sapphire-rapids.json"


def estimates() -> str:
    """The model's answers for the kernels, and for loops that others have measured."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    return f"{estimate_table(result['results'])}\n\n{published_table(result['published'])}"


def estimate_table(cells: list[dict[str, Any]]) -> str:
    """A line for each kernel and group size: the share at each number of rows, and the unit with most work."""
    rows = sorted({cell["rows"] for cell in cells})
    most = rows[-1]
    lines = [
        f"| model estimate | {' | '.join(f'M={m}' for m in rows)} | M={most}, first columns | most work at M={most} |"
    ]
    lines.append("|---" * (len(rows) + 3) + "|")
    for kernel, group in dict.fromkeys((cell["kernel"], cell["group"]) for cell in cells):
        found = {cell["rows"]: cell for cell in cells if (cell["kernel"], cell["group"]) == (kernel, group)}
        last = found[most]
        busy = last["bounds"][last["bottleneck"]] / last["cycles"]
        shares = " | ".join(f"{found[m]['peak_share']:.0%}" for m in rows)
        first = f"{last['peak_share_of_first_columns']:.0%}"
        lines.append(
            f"| `{kernel}`, group {group} | {shares} | {first} | {last['bottleneck']}, {busy:.0%} of the time |"
        )
    return "\n".join(lines)


def published_table(loops: list[dict[str, Any]]) -> str:
    """The model beside what others have measured."""
    lines = ["| loop of bf16 tiles | measured, operations a cycle | model | too much by |", "|---|---|---|---|"]
    for loop in loops:
        least, most = loop["measured"]
        low, high = loop["optimism"]
        lines.append(f"| {loop['loop']} | {least:.0f} to {most:.0f} | {loop['model']} | {low:.1%} to {high:.1%} |")
    return "\n".join(lines)
