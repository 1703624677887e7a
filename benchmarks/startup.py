# SPDX-License-Identifier: Apache-2.0
"""How long a kernel takes to compile and to load, and what `import awqjit` adds to `import torch`.

    python -m benchmarks.startup [--quick] [--output FILE]

Every kernel of the demo's model and of a 1.5B model is compiled alone, in an empty cache, for each row that this
machine can run, then loaded by fresh processes. Import times come from fresh processes too, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from awqjit import config, jit, machine, ops, progress, select, toolchain
from awqjit.spec import Problem
from benchmarks.common import (
    DEMO_GROUP,
    DEMO_LAYERS,
    LARGE_GROUP,
    LARGE_LAYERS,
    MODES,
    interleave,
    layer_problem,
    print_stamp,
    print_table,
    stamp,
    summary,
    write_result,
)

TARGETS = {"cold compile": 2.0, "warm load": 0.020, "warm model": 0.100, "import awqjit": 0.060}
"""Largest acceptable medians, in seconds."""

ROOT = Path(__file__).parents[1]

# Loads kernels that the cache holds, one after another: row and Problem fields come as JSON on stdin.
_LOAD = """
import json, sys
from awqjit import config, jit, ops
from awqjit.spec import Problem

seconds = []
for row, fields in json.load(sys.stdin):
    with config.override(kernel=row):
        ops.forget()
        choice = jit.choose(Problem(**fields))
    assert choice.origin == "cache", choice.origin
    seconds.append(choice.seconds)
print(json.dumps(seconds))
"""

# Loads all kernels of a model that the cache holds, as its first forward pass does. Finds the machine, the caches and
# the templates on the way, but not torch and awqjit themselves.
_MODEL = """
import json, sys, time
from awqjit import jit
from awqjit.spec import Problem

problems = [Problem(**fields) for fields in json.load(sys.stdin)]
start = time.perf_counter()
choices = [jit.choose(problem) for problem in problems]
seconds = time.perf_counter() - start
assert {choice.origin for choice in choices} == {"cache"}, choices
print(seconds)
"""

_IMPORT = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
{extra}
end = time.perf_counter()
print(middle - start, end - middle)
"""


def problems() -> list[Problem]:
    layers = [(k, n, DEMO_GROUP, bias) for k, n, bias in DEMO_LAYERS]
    layers += [(k, n, LARGE_GROUP, bias) for k, n, bias in LARGE_LAYERS]
    return [layer_problem(k, n, group, bias=bias, compute=mode) for mode in MODES for k, n, group, bias in layers]


def kernels(wanted: list[Problem]) -> list[tuple[str, Problem]]:
    """Row and problem of every compiled kernel that this machine can run."""
    here = machine.detect()
    return [
        (row.name, problem)
        for problem in wanted
        for row in select.ROWS
        if row.device == "cpu" and row.target is not None and row.accepts(problem, here) is None
    ]


def compile_all(pairs: list[tuple[str, Problem]], cache: Path) -> list[dict[str, Any]]:
    """Compile each kernel alone; seconds in the compiler, and from the problem to the loaded kernel."""
    found = []
    with progress.bar("compiling kernels", len(pairs)) as step:
        for row, problem in pairs:
            with config.override(kernel=row, cache_dir=str(cache), cache_path=None, jit=None):
                ops.forget()
                choice = jit.choose(problem)
            if choice.origin != "built":
                raise RuntimeError(f"{problem.slug} came from {choice.origin}: the cache was not empty")
            found.append(
                {"row": row, "problem": problem.slug, "compile": choice.compile_seconds, "total": choice.seconds}
            )
            step()
    ops.forget()
    return found


def python(code: str, cache: Path, stdin: str = "") -> str:
    """Run code in a fresh interpreter that finds this checkout's awqjit."""
    with config.override(cache_dir=str(cache), cache_path=None, kernel=None, jit=None):
        done = subprocess.run(
            [sys.executable, "-c", code], input=stdin, cwd=ROOT, capture_output=True, text=True, timeout=600
        )
    if done.returncode:
        raise RuntimeError(f"the child process failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def load_all(pairs: list[tuple[str, Problem]], cache: Path, rounds: int) -> list[list[float]]:
    """Seconds each kernel takes to be found and loaded, once per fresh process: [rounds][kernels]."""
    request = json.dumps([(row, vars(problem)) for row, problem in pairs])
    found = []
    with progress.bar("loading kernels in fresh processes", rounds) as step:
        for _ in range(rounds):
            found.append(json.loads(python(_LOAD, cache, request)))
            step()
    return found


def model_loads(wanted: list[Problem], cache: Path, rounds: int) -> list[float]:
    """Seconds in which a fresh process has all kernels of a model ready, from a warm cache; one a process."""
    for problem in wanted:
        with config.override(cache_dir=str(cache), cache_path=None, kernel=None, jit=None):
            ops.forget()
            jit.choose(problem)
    request = json.dumps([vars(problem) for problem in wanted])
    found = []
    with progress.bar("loading a model's kernels in fresh processes", rounds) as step:
        for _ in range(rounds):
            found.append(float(python(_MODEL, cache, request)))
            step()
    return found


def import_times(cache: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds of `import torch`, seconds of what comes after it) for processes with and without awqjit, in turns."""

    def timed(extra: str) -> tuple[float, float]:
        torch_seconds, extra_seconds = map(float, python(_IMPORT.format(extra=extra), cache).split())
        return torch_seconds, extra_seconds

    variants = {"torch": lambda: timed("pass"), "torch and awqjit": lambda: timed("import awqjit")}
    for run in variants.values():
        run()  # fills the page cache and writes bytecode
    with progress.bar("importing in fresh processes", rounds * len(variants)) as step:
        return interleave(variants, rounds, step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two problems and few rounds; writes no result by default")
    parser.add_argument("--rounds", type=int, default=9, help="fresh processes for each measurement")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    before = stamp()
    started = time.perf_counter()
    toolchain.forget()
    toolchain.find_compiler()
    probe_seconds = time.perf_counter() - started
    wanted = problems()
    pairs = kernels(wanted[:1] + wanted[-1:] if options.quick else wanted)
    with tempfile.TemporaryDirectory(prefix="awqjit-startup-") as temporary:
        cache = Path(temporary)
        compiled = compile_all(pairs, cache)
        loads = load_all(pairs, cache, rounds)
        model = [layer_problem(k, n, DEMO_GROUP, bias=bias, compute=m) for m in MODES for k, n, bias in DEMO_LAYERS]
        models = model_loads(model, cache, rounds)
        imports = import_times(cache, rounds)
    for kernel, seconds in zip(compiled, zip(*loads, strict=True), strict=True):
        kernel["load"] = summary(seconds)
    after_torch = [extra for _, extra in imports["torch and awqjit"]]
    whole = {name: [sum(pair) for pair in pairs_] for name, pairs_ in imports.items()}
    headline = {
        "cold compile": summary([kernel["total"] for kernel in compiled]),
        "warm load": summary([seconds for process in loads for seconds in process]),
        "first load of a process": summary([process[0] for process in loads]),
        "warm model": summary(models) | {"kernels": len(model)},
        "import awqjit": summary(after_torch),
        "import awqjit, difference of whole processes": {
            "median": summary(whole["torch and awqjit"])["median"] - summary(whole["torch"])["median"]
        },
        "import torch": summary([seconds for pairs_ in imports.values() for seconds, _ in pairs_]),
        "finding the compiler, once a process": {"median": probe_seconds},
    }
    after = stamp()
    for name, target in TARGETS.items():
        headline[name] |= {"target": target, "met": headline[name]["median"] <= target}
    payload = {"machine": before, "machine_after": after, "summary": headline, "kernels": compiled, "imports": imports}
    print_table(
        "Kernels, one at a time (seconds)",
        ("problem", "row", "compile", "cold, all", "warm load"),
        [(k["problem"], k["row"], k["compile"], k["total"], k["load"]["median"]) for k in compiled],
    )
    print_table(
        "Startup (seconds)",
        ("what", "median", "min", "max", "target", "met"),
        [
            (
                name,
                row["median"],
                row.get("min", ""),
                row.get("max", ""),
                row.get("target", ""),
                "" if "met" not in row else "yes" if row["met"] else "no",
            )
            for name, row in headline.items()
        ],
    )
    print_stamp(before, after)
    if options.output or not options.quick:
        print(f"written: {write_result('startup', payload, options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
