# SPDX-License-Identifier: Apache-2.0
"""Filling a directory with the kernels that other machines will need: the cache of an image, built ahead.

Kernels are compiled, not run, so one image can hold those of CPUs that the machine that builds it does not have.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from awqjit import cache, config, machine, packer, places, progress, select, slots, store, toolchain
from awqjit.errors import ArgumentError, AwqJitError, ConfigError
from awqjit.machine import Machine
from awqjit.ops import dispatcher
from awqjit.render import render
from awqjit.spec import KernelSpec, Problem


@dataclass(frozen=True)
class Baked:
    """One kernel in the directory: ``seconds`` is the time spent compiling it, 0 if it was there already."""

    spec: KernelSpec
    path: Path
    bytes: int
    seconds: float


def specs(
    problems: Iterable[Problem], levels: tuple[str, ...] = (), rows: tuple[str, ...] = ()
) -> tuple[KernelSpec, ...]:
    """The kernels that some machines would choose.

    Args:
        problems: what they compute.
        levels: names in :func:`awqjit.machine.levels_of`: for each, what a CPU with that level and all below chooses.
        rows: rows of the selection table, whichever CPU they need; "all" is every compiled row that can run a problem.
            Without levels and rows: what this machine chooses.

    Returns:
        Distinct specs, in order. A problem that is left to plain torch has none.

    Raises:
        ArgumentError: there is no such level, no such row, or a row can run none of the problems.
        KernelRefusedError: ``AWQJIT_KERNEL`` forces a row that refuses a problem of this machine's.
    """
    wanted = tuple(dict.fromkeys(problems))
    found: list[KernelSpec | None] = []
    if not levels and not rows:
        here, forced = machine.detect(), config.KERNEL.read()
        found += [select.choose(problem, here, forced=forced).spec(problem) for problem in wanted]
    for level in levels:
        there = _machine_of(level)
        found += [select.choose(problem, there).spec(problem) for problem in wanted]
    for name in rows:
        found += _specs_of_rows(name, wanted)
    return _distinct(spec for spec in found if spec is not None)


def bake(directory: Path, wanted: Iterable[KernelSpec], show_progress: bool = True) -> tuple[Baked, ...]:
    """Compile kernels into a directory that ``AWQJIT_CACHE_PATH`` can name for any user, and that needs no writes.

    The operator's dispatcher and the packer of weights come with them. What the directory holds already is kept.
    Directories are made searchable and files readable for everybody, whatever the umask.

    Args:
        directory: made if it does not exist.
        wanted: from :func:`specs`.
        show_progress: show a progress bar on stderr (needs rich).

    Returns:
        One entry per kernel, in order.

    Raises:
        ArgumentError: the directory cannot be made or written, or others can write it too.
        ConfigError: ``AWQJIT_JIT=0``.
        NoCompilerError: no compiler works.
        CompileError: of the first kernel the compiler refuses; the others are finished first.
    """
    if not config.JIT.read():
        raise ConfigError(config.JIT.name, "0", "unset or 1: to bake is to compile")
    compiler = toolchain.find_compiler()
    place = _prepare(directory)

    def build(request: cache.Request) -> cache.Artifact:
        try:
            made = cache.bake(request, compiler, place)
            _open_to_all(made.directory)
        except OSError as error:
            raise _unusable(directory, error) from error
        return made

    def one(spec: KernelSpec) -> Baked:
        made = build(cache.Request(spec.slug, render(spec), spec.target.flags))
        size = sum(file.stat().st_size for file in made.directory.iterdir())
        return Baked(spec, made.directory, size, made.seconds)

    todo = _distinct(wanted)
    if todo:
        build(dispatcher.request())
        build(packer.request())
    failure: AwqJitError | None = None
    done: list[Baked] = []
    with progress.bar("compiling kernels", len(todo), show_progress) as step, ThreadPoolExecutor(slots.most()) as pool:
        for future in [pool.submit(one, spec) for spec in todo]:
            try:
                done.append(future.result())
            except AwqJitError as error:
                failure = failure or error
            step()
    if failure is not None:
        raise failure
    return tuple(done)


def obstacles(directory: Path) -> tuple[str, ...]:
    """What will keep other users from a baked directory if it stays where it is and as it is: one sentence each."""
    real = Path(os.path.realpath(directory))
    found = []
    states = {part: os.lstat(part) for part in (real, *real.parents)}
    foreign = [str(part) for part, state in states.items() if state.st_uid != 0]
    if foreign:
        found.append(f"{', '.join(foreign)} must belong to root (chown), or only its owner will trust the kernels")
    groups = [
        str(part)
        for part, state in states.items()
        if state.st_mode & stat.S_IWGRP and state.st_gid != 0 and (part == real or not state.st_mode & stat.S_ISVTX)
    ]
    if groups:
        found.append(f"{', '.join(groups)} can be written by a group, so others will not trust it (chmod g-w)")
    closed = [str(part) for part in real.parents if not states[part].st_mode & stat.S_IXOTH]
    if closed:
        found.append(f"{', '.join(closed)} cannot be entered by other users (chmod o+x)")
    return tuple(found)


def _distinct(wanted: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    return tuple({spec.slug: spec for spec in wanted}.values())


def _machine_of(level: str) -> Machine:
    table = machine.levels_of(platform.machine())
    names = [name for name, _ in table]
    if level not in names:
        raise ArgumentError("max_isa", repr(level), f"one of {', '.join(names)}")
    features = frozenset[str]().union(*(added for _, added in table[: names.index(level) + 1]))
    return Machine(platform.machine(), platform.system(), f"a CPU of level {level}", features)


def _specs_of_rows(name: str, problems: tuple[Problem, ...]) -> list[KernelSpec | None]:
    compiled = {row.name: row for row in select.ROWS if row.target is not None}
    if name != "all" and name not in compiled:
        raise ArgumentError("kernel", repr(name), f"all or one of {', '.join(compiled)}")
    found: list[KernelSpec | None] = []
    reason = None
    for row in compiled.values() if name == "all" else (compiled[name],):
        features = row.target.features if row.target is not None else frozenset[str]()
        there = Machine(platform.machine(), platform.system(), f"a CPU for {row.name}", features)
        for problem in problems:
            reason = row.accepts(problem, there)
            if reason is None:
                found.append(row.spec(problem))
    if problems and not found:
        raise ArgumentError("kernel", repr(name), f"a row that can run the model: {reason}")
    return found


def _prepare(directory: Path) -> Path:
    """Make the directory; its real path. Parents that exist stay as they are."""
    real = Path(os.path.realpath(directory))
    try:
        missing = [part for part in (real, *real.parents) if not part.exists()]
        for part in reversed(missing):
            part.mkdir(mode=0o755, exist_ok=True)
            part.chmod(0o755)  # whatever the umask
        reason = "" if real.is_dir() else "it is not a directory"
        reason = reason or places.distrust(real)
        if not reason and not os.access(real, os.W_OK | os.X_OK):
            reason = "it cannot be written"
        if not reason:
            real.chmod(0o755)
    except OSError as error:
        raise _unusable(directory, error) from error
    if reason:
        raise _unusable(directory, reason)
    return real


def _unusable(directory: Path, reason: object) -> ArgumentError:
    return ArgumentError("directory", f"{directory} ({reason})", "one that you can write, and nobody else but root")


def _open_to_all(kernel: Path) -> None:
    kernel.chmod(0o755)
    for name in (store.SOURCE, store.LOG, store.META):
        (kernel / name).chmod(0o644)
    store.product(kernel).chmod(0o755)
