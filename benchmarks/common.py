# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the machine's stamp, interleaved rounds, the models' layers, JSON and tables."""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from awqjit import machine, slots, toolchain
from awqjit.errors import NoCompilerError
from awqjit.spec import Problem, act_bits_of
from awqjit.version import __version__

RESULTS = Path(__file__).parent / "results"
MODES = ("w4a16", "w4a8")

# (K, N, bias) of each distinct int4 layer.
DEMO_LAYERS = ((576, 576, False), (576, 192, False), (576, 1536, False), (1536, 576, False))
DEMO_GROUP = 32
LARGE_LAYERS = ((1536, 1536, True), (1536, 256, True), (1536, 1536, False), (1536, 8960, False), (8960, 1536, False))
LARGE_GROUP = 128

Result = TypeVar("Result")


def layer_problem(k: int, n: int, group_size: int, *, bias: bool = False, compute: str = "w4a16") -> Problem:
    """One layer of an AWQ model as its loader would describe it: bf16 activations, fp16 scales, zero points."""
    return Problem(
        k=k,
        n=n,
        group_size=group_size,
        x_dtype="bf16",
        scale_dtype="fp16",
        symmetric=False,
        bias=bias,
        act_bits=act_bits_of(compute),
    )


def stamp() -> dict[str, Any]:
    """The machine and its state now: a result means nothing without them."""
    here = machine.detect()
    try:
        compiler = toolchain.find_compiler().identity
    except NoCompilerError as error:
        compiler = str(error)
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": here.cpu,
        "cpu_family_model": _family_model(),
        "features": sorted(here.features),
        "usable_cores": slots.usable_cores(),
        "threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "system": f"{here.system} {here.architecture}",
        "torch": torch.__version__,
        "awqjit": __version__,
        "compiler": compiler,
    }


def _family_model() -> str:
    """Family and model numbers on x86 Linux: virtual machines often hide the marketing name."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    found = dict(re.findall(r"^(cpu family|model)\s*: (\S+)$", text, re.MULTILINE))
    return f"family {found.get('cpu family', '?')} model {found.get('model', '?')}"


def cpu_slug() -> str:
    """The CPU in a file's name, for example ``amd-epyc-family-25-model-17``."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine.detect().cpu} {_family_model()}".lower()).strip("-")


def write_result(name: str, payload: Mapping[str, Any], path: Path | None) -> Path:
    """Write one run as JSON, by default to ``benchmarks/results/<name>-<cpu>.json``."""
    path = path or RESULTS / f"{name}-{cpu_slug()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    return path


def interleave(
    contenders: Mapping[str, Callable[[], Result]], rounds: int, step: Callable[[], None] = lambda: None
) -> dict[str, list[Result]]:
    """Run every contender once a round, in an order that turns by one each round, so that drift hits all alike.

    Args:
        contenders: name -> one measurement.
        rounds: measurements each.
        step: called after every measurement.
    """
    names = list(contenders)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(contenders[name]())
            step()
    return results


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, minimum, maximum and count."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference; NaN or infinite when ``y`` is."""
    reference = reference.double()
    return float((y.double() - reference).norm() / reference.norm())


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; every column after the first is right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.4g}" for value in row))
    Console(width=None if os.isatty(1) else 160).print(table)


def print_stamp(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """One line: which machine, how busy it was."""
    cores = f"{before['threads']} threads on {before['usable_cores']} cores"
    load = f"load average {before['load_average'][0]} before, {after['load_average'][0]} after"
    compiler = (before["compiler"].split("|")[1:2] or [before["compiler"]])[0]
    print(f"{before['cpu']} ({before['cpu_family_model']}), {cores}, {load}; torch {before['torch']}, {compiler}")
