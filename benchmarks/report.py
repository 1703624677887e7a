# SPDX-License-Identifier: Apache-2.0
"""Puts the figures of `benchmarks/results` into the documents: ``python -m benchmarks.report [--check]``.

A document marks where a table goes with ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; what stands between
is written from the newest result, so that no figure in a document is typed by hand. The roofline plot is drawn anew,
too, if there is a newer result than the one it shows; that needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import amx_tables, kernel_tables, limit_tables, roofline

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
PICTURE = ROOT / "docs" / "roofline.svg"
PICTURE_SHAPE = (4096, 4096)

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


def dispatch_table() -> str:
    """What a call of the operator costs beyond the kernel."""
    result = newest("dispatch")
    lines = [
        "| int4_mm at one row | " + " | ".join(f"K=N={shape.partition('x')[0]}" for shape in result["shapes"]) + " |"
    ]
    lines.append("|---" * (1 + len(result["shapes"])) + "|")
    shapes = result["shapes"].values()
    lines.append("| kernel alone, µs | " + " | ".join(f"{shape['kernel']:.1f}" for shape in shapes) + " |")
    for name in next(iter(shapes))["beyond"]:
        lines.append(
            f"| on top of it: {name} | " + " | ".join(f"{shape['beyond'][name]:.1f}" for shape in shapes) + " |"
        )
    return "\n".join([*lines, "", _machine(result)])


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


NOT_MEASURED = "Not measured yet: `python -m benchmarks.kernels`."


def result_of_kernels() -> dict[str, Any] | None:
    """The newest run of the kernel benchmark; None before the first."""
    try:
        return newest("kernels")
    except FileNotFoundError:
        return None


def _of_kernels(tables: Callable[[dict[str, Any]], list[kernel_tables.Table]]) -> str:
    result = result_of_kernels()
    if result is None:
        return NOT_MEASURED
    return "\n\n".join(f"**{table.title}**\n\n{table.markdown()}" for table in tables(result) if table.rows)


def _layers(result: dict[str, Any]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((cell["group"], cell["dtype"]) for cell in kernel_tables.cells_of(result)))


def kernel_ratios() -> str:
    """awqjit against the fastest peer, for every group size and dtype of x."""

    def tables(result: dict[str, Any]) -> list[kernel_tables.Table]:
        found = [kernel_tables.ratio_table(result, *layer) for layer in _layers(result)]
        return [*found, kernel_tables.state_table(result, *_layers(result)[0])]

    text = _of_kernels(tables)
    result = result_of_kernels()
    return text if result is None or "machine" not in result else f"{text}\n\n{_machine(result)}"


def kernel_times() -> str:
    """Microseconds of every contender, for each shape."""

    def tables(result: dict[str, Any]) -> list[kernel_tables.Table]:
        group, dtype = _layers(result)[0]
        cells = kernel_tables.cells_of(result, group=group, dtype=dtype)
        shapes = dict.fromkeys((cell["k"], cell["n"]) for cell in cells)
        return [kernel_tables.times_table(result, k, n, group, dtype) for k, n in shapes]

    return _of_kernels(tables)


def kernel_errors() -> str:
    """Errors beside the times."""
    return _of_kernels(lambda result: [kernel_tables.error_table(result, *_layers(result)[0])])


def kernel_limits() -> str:
    """How near to the machine's limits, how well threads add up, where fewer rows take longer, and the roofline."""
    text = _of_kernels(
        lambda result: [
            limit_tables.limit_table(result),
            limit_tables.thread_table(result),
            limit_tables.cliff_table(result),
        ]
    )
    return text if text == NOT_MEASURED else f"{text}\n\n![Roofline of one layer]({PICTURE.name})"


def kernel_absent() -> str:
    """Who is not in the tables, and why."""
    return _of_kernels(lambda result: [kernel_tables.absent_table(result)])


TABLES: dict[str, Callable[[], str]] = {
    "ratios": ratio_table,
    "speeds": speed_table,
    "startup": startup_table,
    "dispatch": dispatch_table,
    "kernel_ratios": kernel_ratios,
    "kernel_times": kernel_times,
    "kernel_errors": kernel_errors,
    "kernel_limits": kernel_limits,
    "kernel_absent": kernel_absent,
    "amx_estimates": amx_tables.estimates,
}


def picture_is_old() -> bool:
    """Whether the newest kernel result is not the one that the roofline plot shows."""
    result = result_of_kernels()
    return result is not None and roofline.source_of(PICTURE) != result["machine"]["time"]


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
    if picture_is_old():
        stale += 1
        result = result_of_kernels()
        if check or result is None:
            print(f"{PICTURE} does not show the newest result: run python -m benchmarks.report", file=sys.stderr)
        else:
            roofline.draw(result, PICTURE, *PICTURE_SHAPE)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
