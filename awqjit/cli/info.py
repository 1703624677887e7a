# SPDX-License-Identifier: Apache-2.0
"""What ``awqjit info`` and ``awqjit explain`` show, as plain data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from awqjit import config, jit, machine, places, select, slots, toolchain, upkeep
from awqjit.errors import ArgumentError, ConfigError, NoCompilerError
from awqjit.ops import dispatcher
from awqjit.spec import COMPUTE, Problem, act_bits_of
from awqjit.weight import resolve_group_size

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "jinja2", "gguf", "numba", "ziglang", "typer", "rich")


def collect() -> dict[str, Any]:
    """Sections of key and value; a setting that cannot be used is shown as such, and does not hide the others."""
    return {
        "version": _versions(),
        "cpu": _cpu(),
        "kernel": _rows(),
        "operator": _operator(),
        "compiler": _compilers(),
        "cache": _caches(),
        "threads": _threads(),
        "setting": {variable.name: _value(variable) for variable in config.VARIABLES},
    }


def lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What :func:`collect` gave, one line for each value: "section: key" and text."""
    for section, values in found.items():
        for row in values if isinstance(values, list) else [values]:
            for key, value in row.items():
                if isinstance(value, dict):
                    yield from ((f"{section}: {key}: {part}", str(text)) for part, text in value.items())
                else:
                    yield f"{section}: {key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("awqjit", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu() -> dict[str, Any]:
    """The CPU, and for each level of ``AWQJIT_MAX_ISA`` "on" or why not."""
    try:
        here = machine.detect()
    except ConfigError as error:
        return {"error": str(error)}
    return {
        "name": here.cpu,
        "architecture": here.architecture,
        "features": sorted(here.features),
        "capped at": here.max_isa or "no cap",
        "levels": {name: here.missing(features) or "on" for name, features in machine.levels_of(here.architecture)},
    }


def _rows() -> dict[str, str]:
    """For each row of the selection table "on", with its compute modes, or why the CPU cannot run it."""
    try:
        here = machine.detect()
    except ConfigError as error:
        return {"error": str(error)}
    found = {}
    for row in select.ROWS:
        modes = row.target.act_bits if row.target else COMPUTE.values()
        # Of a shape that every row takes: what is left is the machine.
        asked = {bits: row.accepts(Problem(64, 16, 32, "bf16", "fp16", True, False, bits), here) for bits in modes}
        served = [f"w4a{bits}" for bits, reason in asked.items() if reason is None]
        found[row.name] = f"on for {' and '.join(served)}" if served else str(next(iter(asked.values())))
    return found


def _operator() -> dict[str, str]:
    """Whether int4_mm can be called without Python, or why not."""
    reason = dispatcher.obstacle()
    return {"int4_mm": f"Python: {reason}" if reason else "C++, once a kernel has run"}


def _compilers() -> list[dict[str, Any]]:
    """Every candidate, in the order they are tried: what it is, or why it is not used."""
    try:
        if not config.JIT.read():
            return [{"none": f"{config.JIT.name}=0 forbids compiling"}]
    except ConfigError as error:
        return [{"error": str(error)}]
    found = []
    for candidate, answer in toolchain.survey():
        text = f"used: {answer.kind} {answer.version}" if isinstance(answer, toolchain.Compiler) else answer
        found.append({candidate.origin: f"{shlex.join(candidate.argv)}: {text}"})
    return found


def _caches() -> list[dict[str, Any]]:
    try:
        found = places.places()
    except ConfigError as error:
        return [{"error": str(error)}]
    rows = []
    for place in found:
        stored = upkeep.items(place.path)
        held = f"entries: {len(stored)}, {sum(item.bytes for item in stored) / 1e6:.1f} MB"
        reason = f" ({place.reason})" if place.reason else ""
        rows.append({str(place.path): f"{place.origin}; {place.use}{reason}; {held}"})
    return rows


def _threads() -> dict[str, Any]:
    backend = torch.__config__.parallel_info().partition("ATen parallel backend: ")[2]
    found: dict[str, Any] = {
        "torch": torch.get_num_threads(),
        "pool": backend.partition("\n")[0] or "unknown",
        "usable cores": slots.usable_cores(),
    }
    try:
        found["compilers at once"] = slots.most()
    except ConfigError as error:
        found["compilers at once"] = str(error)
    return found | {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


def _value(variable: config.Variable) -> str:
    given = os.environ.get(variable.name)
    try:
        value = variable.read()
    except ConfigError as error:
        return f"cannot be used: {error}"
    shown = os.pathsep.join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{shown if value not in (None, ()) else 'unset'}{'' if given else ' (default)'}: {variable.help}"


def here() -> machine.Machine:
    """This computer, with the reason why nothing can be compiled, if so."""
    try:
        toolchain.find_compiler()
    except NoCompilerError as error:
        return machine.detect(no_compiler=str(error))
    return machine.detect()


def shape_problem(k: str, n: str, group_size: int, symmetric: bool, bias: bool, compute: str, dtype: str) -> Problem:
    """The problem of one layer with fp16 scales.

    Raises:
        ArgumentError: an argument is not a number, or out of range.
    """
    for name, value in (("K", k), ("N", n)):
        if not value.isdecimal():
            raise ArgumentError(name, repr(value), "a whole number (or give one FOLDER)")
    from awqjit.integrations.transformers import resolve_dtype

    return Problem(
        k=int(k),
        n=int(n),
        group_size=resolve_group_size(group_size, int(k)),
        x_dtype=jit.DTYPE_NAMES[torch.bfloat16 if dtype == "auto" else resolve_dtype(dtype, None)],
        scale_dtype="fp16",
        symmetric=symmetric,
        bias=bias,
        act_bits=act_bits_of(compute),
    )


def folder_problems(folder: str, compute: str, dtype: str) -> tuple[Problem, ...]:
    """The distinct problems of a model's int4 layers. Loads it: whether zero points are stored is in its tensors."""
    from awqjit.integrations.transformers import from_pretrained

    return jit.problems(from_pretrained(folder, dtype=dtype, compute=compute))


def baking_problems(folders: Sequence[str], computes: Sequence[str], dtypes: Sequence[str]) -> tuple[Problem, ...]:
    """The distinct problems of several models, for every compute mode and dtype of x ("auto": each model's own)."""
    from awqjit.integrations.transformers import from_pretrained, resolve_dtype

    found = []
    for folder in folders:
        model = from_pretrained(folder, dtype="auto")
        for dtype in dtypes:
            activations = None if dtype == "auto" else resolve_dtype(dtype, None)
            for problem in jit.problems(model, activations):
                found += [replace(problem, act_bits=act_bits_of(compute)) for compute in computes]
        del model  # before the next one is loaded
    return tuple(dict.fromkeys(found))


def explain_problems(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """For each problem every row of the selection table, in order, with its reason."""
    computer, forced = here(), config.KERNEL.read()
    explained = []
    for problem in problems:
        if forced is not None:
            select.choose(problem, computer, forced=forced)  # a forced row that cannot run it is an error
        rows = []
        for verdict in select.explain(problem, computer, forced=forced):
            reason = verdict.reason or ("" if verdict.chosen else "a row above it runs it")
            rows.append({"kernel": verdict.row.name, "chosen": verdict.chosen, "reason": reason})
        explained.append({"problem": problem.slug, "rows": rows})
    return explained
