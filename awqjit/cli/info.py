# SPDX-License-Identifier: Apache-2.0
"""What ``awqjit info`` and ``awqjit explain`` show, as plain data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
from collections.abc import Iterable
from typing import Any

import torch

from awqjit import config, jit, machine, places, select, toolchain
from awqjit.errors import ArgumentError, ConfigError, NoCompilerError
from awqjit.spec import Problem, act_bits_of
from awqjit.weight import resolve_group_size

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "jinja2", "gguf", "typer", "rich")


def collect() -> dict[str, Any]:
    """Sections of key and value; a setting that cannot be used is shown as such, and does not hide the others."""
    return {
        "version": _versions(),
        "cpu": _cpu(),
        "compiler": _compiler(),
        "cache": _caches(),
        "threads": {"torch": torch.get_num_threads(), "usable cores": jit.usable_cores()},
        "setting": {variable.name: _value(variable) for variable in config.VARIABLES},
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("awqjit", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu() -> dict[str, Any]:
    try:
        here = machine.detect()
    except ConfigError as error:
        return {"error": str(error)}
    return {
        "name": here.cpu,
        "architecture": here.architecture,
        "features": sorted(here.features),
        "capped at": here.max_isa or "no cap",
        "levels": [name for name, _ in machine.ISA_LEVELS],
    }


def _compiler() -> dict[str, Any]:
    try:
        found = toolchain.find_compiler()
    except NoCompilerError as error:
        return {"error": str(error)}
    return {"command": shlex.join(found.argv), "kind": found.kind, "version": found.version}


def _caches() -> list[dict[str, Any]]:
    try:
        return [
            {str(place.path): f"{place.origin}; {_use(place)}{f' ({place.reason})' if place.reason else ''}"}
            for place in places.places()
        ]
    except ConfigError as error:
        return [{"error": str(error)}]


def _use(place: places.Place) -> str:
    if not place.trusted:
        return "not used"
    return "read and written" if place.writable else "read only"


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
