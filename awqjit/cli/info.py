# SPDX-License-Identifier: Apache-2.0
"""What ``awqjit info`` and ``awqjit explain`` show, as plain data."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from awqjit import cache, config, jit, machine, places, records, select, slots, toolchain, upkeep
from awqjit.backends import triton
from awqjit.cli import kernels
from awqjit.errors import ArgumentError, ConfigError
from awqjit.ops import dispatcher
from awqjit.spec import COMPUTE, Problem, act_bits_of
from awqjit.weight import resolve_group_size
from awqjit.xpu import device as xpu_device

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "jinja2", "gguf", "numba", "ziglang", "typer", "rich")
XPU_PACKAGES = ("intel-sycl-rt", "intel-opencl-rt")


def collect() -> dict[str, Any]:
    """Sections of key and value; a setting that cannot be used is shown as such, and does not hide the others."""
    return {
        "version": _versions(),
        "cpu": _cpu(),
        "kernel": _rows(),
        "operator": _operator(),
        "compiler": _compilers(),
        "cache": _caches(),
        "tuning": _tuning(),
        "threads": _threads(),
        "setting": {variable.name: _value(variable) for variable in config.VARIABLES},
    }


def lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What :func:`collect` gave as lines, "section: key" and text; neighbours with the same text share one."""
    for section, values in found.items():
        for row in values if isinstance(values, list) else [values]:
            for key, value in row.items():
                if isinstance(value, dict):
                    yield from ((f"{section}: {key}: {parts}", text) for parts, text in _merged(value))
            plain = {key: value for key, value in row.items() if not isinstance(value, dict)}
            yield from ((f"{section}: {keys}", text) for keys, text in _merged(plain))


def _merged(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    texts = ((key, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for key, v in values.items())
    for text, group in itertools.groupby(texts, key=lambda pair: pair[1]):
        yield ", ".join(key for key, _ in group), text


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("awqjit", *PACKAGES, *XPU_PACKAGES):
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
        **({"capped at": here.max_isa} if here.max_isa else {}),
        "levels": {name: here.missing(features) or "on" for name, features in machine.levels_of(here.architecture)},
    }


def _rows() -> dict[str, str]:
    """For each row of the selection table "on", with its compute modes, or why it cannot run here."""
    try:
        here, lacking = machine.detect(), kernels.no_compiler()
    except ConfigError as error:
        return {"error": str(error)}
    found = {}
    for row in select.ROWS:
        modes = row.target.act_bits if row.target else COMPUTE.values()
        # Of a shape that every row takes: what is left is the machine.
        asked = {bits: row.accepts(Problem(64, 16, 32, "bf16", "fp16", True, False, bits), here) for bits in modes}
        served = [f"w4a{bits}" for bits, reason in asked.items() if reason is None]
        state = "on"
        if lacking is not None and row.target is not None:
            state = f"{lacking}: only from a cache"
        elif row.name == "numba" and not config.JIT.read():
            state, served = f"{lacking} forbids compiling", []
        if served:
            found[row.name] = f"{state} for {' and '.join(served)}"
        else:
            found[row.name] = state if state != "on" else str(next(iter(asked.values())))
    return found | _accelerator_rows(here)


def _accelerator_rows(here: machine.Machine) -> dict[str, str]:
    """The same for the rows of other devices than the CPU, by the device's type and the row's name."""
    here = triton.describe(xpu_device.describe(here))
    found = {}
    for row in select.ACCELERATOR_ROWS:
        asked = {
            bits: row.accepts(Problem(64, 16, 32, "bf16", "fp16", True, False, bits), here) for bits in COMPUTE.values()
        }
        served = [f"w4a{bits}" for bits, reason in asked.items() if reason is None]
        state = f"on for {' and '.join(served)}" if served else str(next(iter(asked.values())))
        found[f"{row.device} {row.name}"] = state
    return found


def _operator() -> dict[str, str]:
    """Whether int4_mm can be called without Python, or why not."""
    try:
        reason = dispatcher.obstacle() or kernels.no_compiler()
        if reason is not None and dispatcher.obstacle() is None and cache.find(dispatcher.request()) is not None:
            reason = None
    except ConfigError as error:
        return {"error": str(error)}
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
        untried = not isinstance(answer, toolchain.Compiler) and answer.startswith("not tried")
        command = "" if untried or candidate.argv == (candidate.origin,) else f"{shlex.join(candidate.argv)}: "
        found.append({candidate.origin: f"{command}{text}"})
    if config.CXX.read() is None and importlib.util.find_spec("ziglang") is None:
        found.append({"ziglang": "not installed"})
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


def _tuning() -> dict[str, Any]:
    """How many tuning records there are, how many of these hold here, and why others do not."""
    try:
        here, threads, found = records.cpu_model(), torch.get_num_threads(), tuple(records.everywhere())
    except ConfigError as error:
        return {"error": str(error)}
    used = 0
    reasons: dict[str, int] = {}
    for path in found:
        try:
            body = records.load(path)
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error)
        else:
            reason = records.foreign(body, here, threads)
        used += not reason
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
    passed_over = "".join(f"; {count} not used: {reason}" for reason, count in reasons.items())
    return {"records": f"{used} for this CPU and {threads} threads{passed_over}"}


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


def explain_problems(problems: Iterable[Problem], device: str = "cpu") -> list[dict[str, Any]]:
    """For each problem every row of the selection table for a type of device, in order, with its reason.

    Raises:
        ArgumentError: the table has no row for such a device.
        KernelRefusedError: ``AWQJIT_KERNEL`` forces a row that cannot run a problem.
    """
    devices = dict.fromkeys(row.device for row in (*select.ROWS, *select.ACCELERATOR_ROWS))
    if device not in devices:
        raise ArgumentError("device", repr(device), " or ".join(devices))
    computer, forced = machine.detect(), config.KERNEL.read()
    if device != "cpu":
        computer = triton.describe(xpu_device.describe(computer))
    explained = []
    for problem in problems:
        if forced is not None:
            select.choose(problem, computer, device, forced)  # a forced row that cannot run it is an error
        rows = []
        for verdict in kernels.explain(problem, computer, forced, device):
            rows.append({"kernel": verdict.row.name, "chosen": verdict.chosen, "reason": verdict.reason or ""})
        explained.append({"problem": problem.slug, "rows": rows})
    return explained
