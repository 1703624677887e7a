# SPDX-License-Identifier: Apache-2.0
"""Which kernel a layer would get in this process, found out without compiling or writing anything."""

from __future__ import annotations

from dataclasses import replace

from awqjit import cache, config, machine, records, select, toolchain
from awqjit.errors import NoCompilerError
from awqjit.render import render
from awqjit.select import Verdict
from awqjit.spec import KernelSpec, Problem


def no_compiler() -> str | None:
    """Why nothing can be compiled here, in a few words; None when a compiler works. Starts it, unless forbidden."""
    if not config.JIT.read():
        return f"{config.JIT.name}=0"
    try:
        toolchain.find_compiler()
    except NoCompilerError:
        return "no compiler"
    return None


def explain(
    problem: Problem, computer: machine.Machine, forced: str | None = None, device: str = "cpu"
) -> tuple[Verdict, ...]:
    """What :func:`awqjit.select.explain` says, and whether the kernel can be had: compiled, or found in a cache.

    Where nothing can be compiled, the chosen row's reason says in which cache its kernel is; where a tuning record
    chooses its tile, or lies there and is not used, it says so.

    Args:
        problem: what is to be computed.
        computer: this computer.
        forced: the only row that may be chosen (``AWQJIT_KERNEL``), or None.
        device: type of the device that computes. What a cache holds is only told for the CPU.
    """
    if device != "cpu":
        return select.explain(problem, computer, device, forced)
    lacking = no_compiler()
    verdicts: list[Verdict] = []
    closed = ""  # why no later row is taken
    for verdict in select.explain(problem, computer, forced=forced):
        reason, chosen = verdict.reason, False
        if reason is None and closed:
            reason = closed
        elif reason is None:
            spec = verdict.row.spec(problem)
            if spec is not None and lacking is not None:
                chosen, reason = _cached(spec, lacking)
            elif verdict.row.name == "numba" and not config.JIT.read():
                reason = f"{lacking} forbids compiling"
            else:
                chosen = True
            if chosen and spec is not None:
                reason = "; ".join(filter(None, (reason, *_tuning(spec)))) or None
            if chosen:
                closed = "a row above it runs it"
            elif not config.JIT.read():
                closed = f"with {lacking} the missing kernel above is an error"
        verdicts.append(Verdict(verdict.row, reason, chosen))
    return tuple(verdicts)


def _tuning(spec: KernelSpec) -> tuple[str, ...]:
    """What the tuning records have to do with a spec: a sentence each."""
    record, reasons = records.find(spec)
    notes = [f"tuning record not used: {reason}" for reason in reasons]
    if record is not None:
        same = record.tile == spec.tile
        notes.append("tuned: the default tile is the fastest" if same else f"tuned: tile {record.tile.slug}")
    return tuple(notes)


def _cached(spec: KernelSpec, lacking: str) -> tuple[bool, str]:
    """Whether a cache holds a kernel that cannot be compiled here, and where or why it is not used."""
    record, _ = records.find(spec)
    found = None
    for tile in dict.fromkeys((spec.tile if record is None else record.tile, spec.tile)):
        wanted = replace(spec, tile=tile)
        found = found or cache.find(cache.Request(wanted.slug, render(wanted), wanted.target.flags))
    if found is None:
        return False, f"{lacking}, and not in a cache"
    if found.origin == "cache" and config.CXX.read() and config.JIT.read():
        return False, f"the compiler {config.CXX.name} asks for does not work"  # never replaced by another's work
    return True, f"{lacking}; {'in AWQJIT_CACHE_PATH' if found.origin == 'baked' else 'cached'}"
