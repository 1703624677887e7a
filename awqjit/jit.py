# SPDX-License-Identifier: Apache-2.0
"""From a Problem to a kernel that runs: select, render, compile or find cached, load. Once per problem and process."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from awqjit import cache, config, launch, machine, progress, records, reference, select, slots
from awqjit.backends import triton
from awqjit.backends.dense import DenseKernel
from awqjit.backends.numba import NumbaKernel
from awqjit.errors import (
    ArgumentError,
    AwqJitError,
    AwqJitWarning,
    CompileError,
    KernelMissingError,
    KernelRefusedError,
    NoCompilerError,
    NumbaError,
    SyclError,
    TritonError,
)
from awqjit.layout import PackedWeight, unpack
from awqjit.render import render
from awqjit.spec import KernelSpec, Problem
from awqjit.xpu import device as xpu_device
from awqjit.xpu import selftest

DTYPE_NAMES: dict[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Kernel(Protocol):
    """What runs a problem: ``kernel(x [M, K], weight, scales, zeros, fp32 bias) -> y [M, N]`` on packed tensors."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class TorchKernel:
    """The last row: unpacks the weight and computes the definition in plain torch. Right, and slow."""

    problem: Problem
    name: str = "torch"

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
        problem = self.problem
        packed = PackedWeight(weight, scales, zeros, None, problem.k, problem.n, problem.group_size)
        return reference.int4_mm(x, unpack(packed), bias, problem.act_bits)


WITHOUT_COMPILER: dict[str, Callable[[Problem], Kernel]] = {"numba": NumbaKernel.load, "torch": TorchKernel}
"""The CPU's rows that are not C++ -> what makes their kernel for a problem."""

ON_ACCELERATORS: dict[tuple[str, str], Callable[[Problem, str], Kernel]] = {
    ("xpu", "sycl_dpas"): partial(selftest.load, "sycl_dpas"),
    ("xpu", "sycl"): partial(selftest.load, "sycl"),
    ("xpu", "triton"): triton.TritonKernel.load,
    ("xpu", "torch"): DenseKernel,
    ("cuda", "triton"): triton.TritonKernel.load,
    ("cuda", "torch"): DenseKernel,
}
"""(type of device, row) -> what makes the row's kernel for a problem on one device, "xpu:0" for example."""


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a problem in this process, and how it came to be.

    Attributes:
        problem: what it computes.
        kernel: what computes it.
        refusals: rows that come before it in the selection table, each with the reason why it was passed over.
        origin: "built", "cache" or "baked" for a compiled kernel; else the row's name, "numba" or "torch".
        compile_seconds: time in the compiler or in numba; 0 when the kernel came from a cache or was there.
        seconds: time for everything: selecting, rendering, compiling or finding, loading.
        device: what it computes on, "cpu" or for example "xpu:0".
    """

    problem: Problem
    kernel: Kernel
    refusals: tuple[tuple[str, str], ...]
    origin: str
    compile_seconds: float
    seconds: float
    device: str = "cpu"


class _Memo:
    """The choices of this process. One lock guards the tables; one per problem keeps threads from building twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.building: dict[tuple[Problem, str], threading.Lock] = {}
        self.choices: dict[tuple[Problem, str], Choice] = {}
        self.warned: set[str] = set()


_memo = _Memo()


def _after_fork_in_child() -> None:
    # A lock that another thread held at the fork would never be released in the child.
    global _memo
    old, _memo = _memo, _Memo()
    _memo.choices, _memo.warned = dict(old.choices), set(old.warned)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def forget() -> None:
    """Drop every choice, so that ``AWQJIT_KERNEL``, ``AWQJIT_MAX_ISA`` and the like are read again on the next use."""
    with _memo.lock:
        _memo.choices.clear()
        _memo.building.clear()
        _memo.warned.clear()


def choices() -> tuple[Choice, ...]:
    """What this process has chosen so far, in order of first use."""
    with _memo.lock:
        return tuple(_memo.choices.values())


def choose(problem: Problem, device: str = "cpu") -> Choice:
    """The kernel for a problem: the one already chosen, else selected and made ready now.

    Thread-safe: other threads that want the same problem wait for the one that builds it.

    Args:
        problem: what is to be computed.
        device: where, "cpu" or for example "xpu:0".

    Raises:
        MissingDependencyError: the device is an XPU, and what compiles for it is not installed.
        KernelRefusedError: ``AWQJIT_KERNEL`` names a row that does not exist or refuses the problem.
        KernelMissingError: ``AWQJIT_JIT=0`` and the kernel is in no cache.
        NoCompilerError, CompileError, NumbaError: only when ``AWQJIT_KERNEL`` forces a row that has to be compiled.
    """
    key = (problem, device)
    choice = _memo.choices.get(key)
    if choice is not None:
        return choice
    memo = _memo
    with memo.lock:
        building = memo.building.setdefault(key, threading.Lock())
    with building:
        choice = memo.choices.get(key)
        if choice is None:
            choice = _make(problem, device)
            with memo.lock:
                memo.choices[key] = choice
    return choice


def prepare(device: str) -> None:
    """Find out, before a layer is packed for a device, that it computes right there; warn once if not.

    Raises:
        MissingDependencyError: the device is an XPU, and what compiles for it is not installed.
    """
    if device.partition(":")[0] in ("xpu", "cuda"):
        choose(selftest.problem(16, "fp16"), device)


def _make(problem: Problem, device: str) -> Choice:
    """Walk down the selection table until a row accepts the problem and its kernel can be had."""
    start = time.perf_counter()
    here, forced, kind = machine.detect(), config.KERNEL.read(), device.partition(":")[0]
    if kind == "xpu":
        here = xpu_device.describe(here, device)
        if forced is None:
            xpu_device.require_wheels()
    elif kind == "cuda":
        here = triton.describe(here)
    select.choose(problem, here, kind, forced)  # raises when the forced row does not exist or refuses
    refusals: list[tuple[str, str]] = []
    broken: list[tuple[str, str, str]] = []
    for verdict in select.explain(problem, here, kind, forced):
        row, reason = verdict.row, verdict.reason
        if reason is None:
            try:
                choice = _ready(problem, row, device, tuple(refusals), start)
                if forced is None:
                    _warn_of_fallback(row, refusals, broken)
                return choice
            except (NoCompilerError, CompileError, NumbaError, SyclError, TritonError, OSError) as error:
                # A row that was asked for by name must not be replaced in silence.
                if forced is not None:
                    raise
                reason = error.first_error if isinstance(error, CompileError) else str(error)
                where = f" (in {error.directory})" if isinstance(error, CompileError) else ""
                broken.append((row.name, reason, where))
        refusals.append((row.name, reason))
    raise KernelRefusedError(str(forced), problem.slug, "; ".join(f"{name}: {reason}" for name, reason in refusals))


def _warn_of_fallback(row: select.Row, refusals: list[tuple[str, str]], broken: list[tuple[str, str, str]]) -> None:
    """One warning when not the row that was meant to serves a problem: the reasons are in it, not in more of them."""
    told = [(name, reason + where) for name, reason, where in broken]
    if row.name in WITHOUT_COMPILER:
        # Why wider rows refuse is of no interest where the compiler is what is missing; why numba does is.
        told += [(name, reason) for name, reason in refusals if not broken or name in WITHOUT_COMPILER]
        slowly = "slowly in plain torch" if row.name == "torch" else "with numba, slower than a compiled kernel"
        _warn(f"no compiled kernel for an int4 layer, computing it {slowly}", told)
    elif broken:
        names = ", ".join(name for name, _, _ in broken)
        _warn(f"the kernel row {names} cannot be built here, {row.name} is used", told)


def _ready(
    problem: Problem, row: select.Row, device: str, refusals: tuple[tuple[str, str], ...], start: float
) -> Choice:
    if row.device != "cpu":
        kernel = ON_ACCELERATORS[row.device, row.name](problem, device)
        origin, seconds = getattr(kernel, "origin", row.name), getattr(kernel, "seconds", 0.0)
        return Choice(problem, kernel, refusals, origin, seconds, time.perf_counter() - start, device)
    spec = row.spec(problem)
    if spec is None:
        if row.name == "numba" and not config.JIT.read():
            raise KernelRefusedError(
                row.name, problem.slug, "AWQJIT_JIT=0 forbids compiling, and no cache has its code"
            )
        kernel = WITHOUT_COMPILER[row.name](problem)
        seconds = kernel.seconds if isinstance(kernel, NumbaKernel) else 0.0
        return Choice(problem, kernel, refusals, row.name, seconds, time.perf_counter() - start)
    kernel, artifact = _compiled(spec)
    return Choice(problem, kernel, refusals, artifact.origin, artifact.seconds, time.perf_counter() - start)


def _compiled(spec: KernelSpec) -> tuple[launch.CompiledKernel, cache.Artifact]:
    """The kernel with the tile that tuning found, else with the row's default: both give the same results."""
    tuned = records.tuned(spec)
    if tuned.tile != spec.tile:
        try:
            return _loaded(tuned)
        except (KernelMissingError, NoCompilerError, CompileError, OSError) as error:
            # A cache that is read only, or baked, may hold the default kernel alone.
            reason = error.first_error if isinstance(error, CompileError) else str(error)
            _warn("a tuned kernel cannot be had, the one with the default tile runs", [(tuned.slug, reason)])
    return _loaded(spec)


def _loaded(spec: KernelSpec) -> tuple[launch.CompiledKernel, cache.Artifact]:
    request = cache.Request(spec.slug, render(spec), spec.target.flags)
    artifact = cache.fetch(request)
    try:
        return launch.CompiledKernel.load(spec, artifact.path), artifact
    except OSError as error:
        # Replaced by another process between the look and the load; or whole, and still not for this system.
        artifact = cache.replace(request, artifact, str(error))
        try:
            return launch.CompiledKernel.load(spec, artifact.path), artifact
        except OSError:
            cache.discard(artifact)
            raise


def grouped(reasons: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Rows and why they are passed over, as text; those that share a reason, such as a missing compiler, as one."""
    rows: dict[str, dict[str, None]] = {}
    for name, reason in reasons:
        rows.setdefault(reason, {})[name] = None
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in rows.items())


def _warn(text: str, reasons: list[tuple[str, str]]) -> None:
    """Warn once per process and text, whatever the warning filters say about repetition."""
    detail = "; ".join(grouped(reasons))
    with _memo.lock:
        if text in _memo.warned:
            return
        _memo.warned.add(text)
    warnings.warn(f"{text} ({detail})", AwqJitWarning, stacklevel=2)


def problems(model: torch.nn.Module, dtype: torch.dtype | None = None) -> tuple[Problem, ...]:
    """The distinct problems of a model's int4 layers, in order of first appearance.

    Args:
        model: any module; its int4 layers are found by their ``problem(dtype)`` method.
        dtype: dtype of the activations; None takes that of the model's first floating-point parameter.

    Raises:
        ArgumentError: no dtype was given and the model has no floating-point parameter.
    """
    return tuple(dict.fromkeys(problem for problem, _ in _placed(model, dtype)))


def _placed(model: torch.nn.Module, dtype: torch.dtype | None) -> tuple[tuple[Problem, str], ...]:
    """The distinct problems of a model's int4 layers, each with the device it is computed on."""
    if dtype is None:
        dtype = next((p.dtype for p in model.parameters() if p.dtype in DTYPE_NAMES), None)
        if dtype is None:
            raise ArgumentError("dtype", None, f"one of {', '.join(map(str, DTYPE_NAMES))}: the model has no parameter")
    layers = (module for module in model.modules() if callable(getattr(module, "problem", None)))
    found = ((layer.problem(dtype), str(getattr(layer, "computes_on", "cpu"))) for layer in layers)  # type: ignore[operator]
    return tuple(dict.fromkeys(found))


def warm(
    what: torch.nn.Module | Iterable[Problem],
    *,
    dtype: torch.dtype | None = None,
    jobs: int | None = None,
    show_progress: bool = True,
) -> tuple[Choice, ...]:
    """Make the kernels of a model ready ahead of their first use, compiling several at once.

    Args:
        what: a model with int4 layers, where they are; or problems, for the CPU.
        dtype: dtype of the activations, if ``what`` is a model; None takes that of its parameters.
        jobs: compilers run at once; None takes ``AWQJIT_JOBS``, else as many as cores and memory allow.
        show_progress: show a progress bar on stderr (needs rich).

    Returns:
        One choice per distinct problem.

    Raises:
        ArgumentError: ``jobs`` is less than 1.
        AwqJitError: what :func:`choose` raises for the first problem that fails; the others are finished first.
    """
    if isinstance(what, torch.nn.Module):
        wanted = _placed(what, dtype)
    else:
        wanted = tuple((problem, "cpu") for problem in dict.fromkeys(what))
    for problem, _ in wanted:
        if not isinstance(problem, Problem):
            raise ArgumentError("what", repr(problem), "a model with int4 layers, or Problems")
    if jobs is not None and jobs < 1:
        raise ArgumentError("jobs", jobs, "at least 1")
    failure: AwqJitError | None = None
    done: list[Choice] = []
    # Without a number a slot has to be had for each compiler; threads beyond these would only wait.
    pool = ThreadPoolExecutor(jobs or slots.most(), initializer=slots.choose, initargs=(jobs,))
    with progress.bar("compiling kernels", len(wanted), show_progress) as step, pool:
        try:
            for future in [pool.submit(choose, *one) for one in wanted]:
                try:
                    done.append(future.result())
                except AwqJitError as error:
                    failure = failure or error
                step()
        except BaseException:  # Ctrl-C: what has not begun is not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failure is not None:
        raise failure
    return tuple(done)
