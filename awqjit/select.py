# SPDX-License-Identifier: Apache-2.0
"""The one place where a kernel is chosen: an ordered table of rows, best first; the first that accepts wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from awqjit.errors import KernelRefusedError
from awqjit.fragments import FRAGMENT
from awqjit.machine import Machine
from awqjit.spec import MAX_W4A8_GROUP, KernelSpec, Problem
from awqjit.target import TARGETS, Target


@dataclass(frozen=True)
class Row:
    """One line of the selection table.

    Attributes:
        name: what slugs, ``explain`` and ``AWQJIT_KERNEL`` call it.
        device: device type of the tensors it takes.
        target: how its C++ is compiled; None for the rows without any: those of other devices than the CPU, numba's
            and those in plain torch.
        accepts: ``accepts(problem, machine)`` is None when the row runs the problem on the machine, else the reason.
    """

    name: str
    device: str
    target: Target | None
    accepts: Callable[[Problem, Machine], str | None]

    def spec(self, problem: Problem) -> KernelSpec | None:
        """What to render for ``problem``, with the row's default tile; None for the rows without C++."""
        if self.target is None:
            return None
        return KernelSpec(problem, self.target, self.target.tile(problem.act_bits, problem.x_dtype))


@dataclass(frozen=True)
class Verdict:
    """One row's answer to a problem. ``reason`` is None when it accepts."""

    row: Row
    reason: str | None
    chosen: bool


def _compiled(target: Target) -> Row:
    def accepts(problem: Problem, machine: Machine) -> str | None:
        if refusal := _no_pool(machine):
            return refusal
        if target.machines and machine.architecture not in target.machines:
            return f"needs {target.machines[0]}, this is {machine.architecture}"
        if problem.act_bits not in target.act_bits:
            return f"computes {' and '.join(f'w4a{bits}' for bits in target.act_bits)} only"
        return _too_long(problem) or machine.missing(target.features) or machine.no_compiler

    return Row(target.name, "cpu", target, accepts)


def _numba(problem: Problem, machine: Machine) -> str | None:
    return _no_pool(machine) or _too_long(problem) or machine.no_numba


def _no_pool(machine: Machine) -> str | None:
    if machine.system in ("Linux", "Darwin"):
        return None
    return f"compiled kernels run on Linux and macOS, this is {machine.system}"


def _too_long(problem: Problem) -> str | None:
    if problem.act_bits == 16 or problem.group_size <= MAX_W4A8_GROUP:
        return None
    return f"int32 sums hold groups of at most {MAX_W4A8_GROUP} rows"


ROWS: tuple[Row, ...] = (
    *(_compiled(target) for target in TARGETS),
    Row("numba", "cpu", None, _numba),
    Row("torch", "cpu", None, lambda problem, machine: None),
)
"""The CPU's rows, best first, the reference last."""


def _no_sycl(machine: Machine) -> str | None:
    return machine.no_xpu if machine.xpu is None else machine.xpu.no_sycl


def _sycl_dpas(problem: Problem, machine: Machine) -> str | None:
    if machine.xpu is not None and not machine.xpu.dpas:
        return f"{machine.xpu.name} has no DPAS"
    if problem.act_bits == 16 and problem.x_dtype == "fp32":
        return "the matrix unit takes no fp32 activations"
    if problem.group_size % FRAGMENT and problem.group_size != problem.k:
        return f"groups of {problem.group_size} rows are no multiple of {FRAGMENT}"
    return _too_long(problem) or _no_sycl(machine)


def _sycl(problem: Problem, machine: Machine) -> str | None:
    return _too_long(problem) or _no_sycl(machine)


def _torch_on_xpu(problem: Problem, machine: Machine) -> str | None:
    return machine.no_xpu if machine.xpu is None else None


def _triton_on_xpu(problem: Problem, machine: Machine) -> str | None:
    return _torch_on_xpu(problem, machine) or _too_long(problem) or machine.no_triton


def _torch_on_cuda(problem: Problem, machine: Machine) -> str | None:
    return machine.no_cuda


def _triton_on_cuda(problem: Problem, machine: Machine) -> str | None:
    return machine.no_cuda or _too_long(problem) or machine.no_triton


ACCELERATOR_ROWS: tuple[Row, ...] = (
    Row("sycl_dpas", "xpu", None, _sycl_dpas),
    Row("sycl", "xpu", None, _sycl),
    Row("triton", "xpu", None, _triton_on_xpu),
    Row("torch", "xpu", None, _torch_on_xpu),
    Row("triton", "cuda", None, _triton_on_cuda),
    Row("torch", "cuda", None, _torch_on_cuda),
)
"""The rows of each other device, best first, the reference last."""


def explain(problem: Problem, machine: Machine, device: str = "cpu", forced: str | None = None) -> tuple[Verdict, ...]:
    """Every row of the device, in order, with its answer; at most one is chosen.

    Args:
        problem: what is to be computed.
        machine: where.
        device: device type of the tensors.
        forced: the only row that may be chosen (``AWQJIT_KERNEL``), or None.
    """
    verdicts: list[Verdict] = []
    for row in (*ROWS, *ACCELERATOR_ROWS):
        if row.device != device:
            continue
        reason = row.accepts(problem, machine)
        if reason is None and forced is not None and row.name != forced:
            reason = f"AWQJIT_KERNEL={forced}"
        verdicts.append(Verdict(row, reason, reason is None and not any(verdict.chosen for verdict in verdicts)))
    return tuple(verdicts)


def choose(problem: Problem, machine: Machine, device: str = "cpu", forced: str | None = None) -> Row:
    """The first row that accepts.

    Raises:
        KernelRefusedError: ``forced`` names no row of the device, or one that refuses the problem.
    """
    verdicts = explain(problem, machine, device, forced)
    for verdict in verdicts:
        if verdict.chosen:
            return verdict.row
    rows = [verdict.row.name for verdict in verdicts]
    reason = next((verdict.reason for verdict in verdicts if verdict.row.name == forced), None)
    raise KernelRefusedError(str(forced), problem.slug, reason or f"there is no such row; rows: {', '.join(rows)}")
