# SPDX-License-Identifier: Apache-2.0
"""Measuring tiles on this machine and remembering the fastest: ``awqjit tune``.

Candidates are compiled several at once into a temporary directory, then timed in turns, call by call, on weights that
no cache keeps from one call to the next. A first pass leaves the few fastest, a longer one compares these with the best
so far. A tile wins only if it is faster by more than the noise, costs no earlier regime more than that, and gives the
very same outputs;
and only if a last comparison with the default confirms it.
"""

from __future__ import annotations

import logging
import math
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from awqjit import cache, config, jit, launch, machine, pages, places, progress, records, select, slots, toolchain
from awqjit.errors import ArgumentError, AwqJitError, ConfigError
from awqjit.layout import BLOCK, packed_rows
from awqjit.render import render
from awqjit.spec import KernelSpec, Problem
from awqjit.target import Tile
from awqjit.tiles import REGIMES, Regime, candidates

ROTATE_BYTES = 300_000_000
"""Copies of a weight together: more than a cache holds."""

FINALISTS = 4
LEAST_GAIN = 0.02
"""Gains below this are not told from noise, however often they are measured."""

_DTYPES = {name: dtype for dtype, name in jit.DTYPE_NAMES.items()}

logger = logging.getLogger("awqjit")


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        screen: seconds of calls, for each candidate and M, of the first pass; each is called 5 to 60 times.
        final: of the second pass; 15 to 400 times.
    """

    screen: float = 0.08
    final: float = 0.5

    def __post_init__(self) -> None:
        for name in ("screen", "final"):
            if not 0 <= getattr(self, name) <= 3600:
                raise ArgumentError(f"Effort.{name}", getattr(self, name), "0 to 3600 seconds")


@dataclass(frozen=True)
class Outcome:
    """What tuning one problem found.

    Attributes:
        problem: the layer.
        row: of the selection table.
        default: the row's own tile.
        tile: the fastest; the default where none was faster by more than the noise.
        microseconds: regime -> with the default, with the tile: geometric means over the regime's M of median times.
        tried: regime -> number of candidates.
        path: the record; None where the row has no tiles.
        reason: why nothing was tuned, or "".
    """

    problem: Problem
    row: str
    default: Tile | None = None
    tile: Tile | None = None
    microseconds: dict[str, tuple[float, float]] | None = None
    tried: dict[str, int] | None = None
    path: Path | None = None
    reason: str = ""


def tune(
    problems: Iterable[Problem], *, effort: Effort | None = None, show_progress: bool = True
) -> tuple[Outcome, ...]:
    """Find the fastest tile for each problem with torch's present number of threads, and keep it as a record.

    Kernels chosen before in this process stay as they are; see :func:`awqjit.ops.forget`. The machine should do nothing
    else meanwhile.

    Args:
        problems: layers; of equal ones, one is measured.
        effort: how long to measure; None takes some two minutes a layer on two cores.
        show_progress: a bar on stderr (needs rich).

    Raises:
        ArgumentError: no directory can keep the records.
        ConfigError: ``AWQJIT_JIT=0``.
        NoCompilerError, CompileError, KernelRefusedError: as for any kernel.
    """
    if not config.JIT.read():
        raise ConfigError(config.JIT.name, "0", "unset or 1: to tune is to compile")
    here, forced = machine.detect(), config.KERNEL.read()
    effort = effort or Effort()
    found = []
    for problem in dict.fromkeys(problems):
        row = select.choose(problem, here, forced=forced)
        spec = row.spec(problem)
        if spec is None:
            found.append(Outcome(problem, row.name, reason=f"the row {row.name} has no tiles"))
        else:
            found.append(_tune(spec, effort, show_progress))
    return tuple(found)


def _tune(spec: KernelSpec, effort: Effort, show_progress: bool) -> Outcome:
    folder = places.loadable_directory(places.places())
    try:
        bench = _Bench(spec, folder)
        best, tried = spec.tile, dict[str, int]()
        for place, regime in enumerate(REGIMES):
            problem = spec.problem
            rivals = candidates(regime, best, spec.target, problem.act_bits, problem.x_dtype)
            tried[regime.name] = len(rivals)
            title = f"{regime.name}, {problem.k}x{problem.n} {problem.compute}"
            with progress.bar(title, 2 * len(rivals), show_progress) as step:
                bench.compile(rivals, step)
                best = _winner(bench, rivals, regime, REGIMES[:place], effort, step)
        microseconds = _compare(bench, best, effort)
        if not _confirmed(microseconds):
            best, microseconds = spec.tile, {name: (time, time) for name, (time, _) in microseconds.items()}
        path = records.write(records.Record(records.key_of(spec), best, microseconds))
        return Outcome(spec.problem, spec.target.name, spec.tile, best, microseconds, tried, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays mapped


class _Bench:
    """One problem's weights, activations and compiled candidates."""

    def __init__(self, spec: KernelSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.compiler = toolchain.find_compiler()
        self.kernels: dict[Tile, launch.CompiledKernel] = {}
        self.copies = _random_copies(spec.problem)
        self.turn = 0
        generator = torch.Generator().manual_seed(0)
        problem = spec.problem
        self.x = {
            m: torch.randn(m, problem.k, generator=generator).to(_DTYPES[problem.x_dtype])
            for m in {m for regime in REGIMES for m in regime.rows}
        }
        self.bias = torch.randn(problem.n, generator=generator) if problem.bias else None

    def compile(self, tiles: Sequence[Tile], step: progress.Step) -> None:
        """Make the kernels of these tiles ready, several compilers at once.

        Raises:
            CompileError: of the first that the compiler refuses; the others are finished first.
        """
        failure: AwqJitError | None = None
        with ThreadPoolExecutor(slots.most()) as pool:
            for tile, future in [(tile, pool.submit(self._kernel, tile)) for tile in tiles]:
                try:
                    self.kernels[tile] = future.result()
                except AwqJitError as error:
                    failure = failure or error
                step()
        if failure is not None:
            raise failure

    def _kernel(self, tile: Tile) -> launch.CompiledKernel:
        if tile in self.kernels:
            return self.kernels[tile]
        spec = replace(self.spec, tile=tile)
        request = cache.Request(spec.slug, render(spec), spec.target.flags)
        return launch.CompiledKernel.load(spec, cache.bake(request, self.compiler, self.folder).path)

    def call(self, tile: Tile, m: int, copy: int) -> Tensor:
        return self.kernels[tile](self.x[m], *self.copies[copy % len(self.copies)], self.bias)

    def same_results(self, tile: Tile, rows: Iterable[int]) -> bool:
        """Whether a tile's outputs are the default's, bit for bit."""
        for m in rows:
            expected, got = self.call(self.spec.tile, m, 0), self.call(tile, m, 0)
            if not torch.equal(expected.view(torch.uint8), got.view(torch.uint8)):
                return False
        return True

    def times(self, tiles: Sequence[Tile], m: int, seconds: float, least: int, most: int) -> list[list[float]]:
        """Seconds of each call, in turns that begin with another tile each time."""
        found: list[list[float]] = [[] for _ in tiles]
        for tile in tiles:
            self.call(tile, m, 0)  # code and scratch memory
        end = time.perf_counter() + seconds * len(tiles)
        turn = 0
        while turn < least or (turn < most and time.perf_counter() < end):
            for step in range(len(tiles)):
                index = (turn + step) % len(tiles)
                self.turn += 1
                start = time.perf_counter()
                self.call(tiles[index], m, self.turn)
                found[index].append(time.perf_counter() - start)
            turn += 1
        return found


def _random_copies(problem: Problem) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Packed tensors of any words, scales and zero points: copies of :data:`ROTATE_BYTES` together, at least 2."""
    blocks, words = -(-problem.n // BLOCK), packed_rows(problem.k, problem.group_size) // 8
    generator = torch.Generator().manual_seed(1)
    cpu = torch.device("cpu")

    def made(shape: tuple[int, ...], dtype: torch.dtype, low: int, high: int) -> Tensor:
        return pages.empty(shape, dtype, cpu).copy_(
            torch.randint(low, high, shape, generator=generator, dtype=torch.int32)
        )

    weight = made((blocks, words, BLOCK), torch.int32, -(2**31), 2**31 - 1)
    scales = made((blocks, problem.groups, BLOCK), _DTYPES[problem.scale_dtype], 64, 128).div_(2**14)
    zeros = None if problem.symmetric else made((blocks, problem.groups, BLOCK), torch.uint8, 0, 16)
    size = sum(one.numel() * one.element_size() for one in (weight, scales, zeros) if one is not None)

    def again(tensor: Tensor) -> Tensor:
        return pages.empty(tuple(tensor.shape), tensor.dtype, cpu).copy_(tensor)

    first = (weight, scales, zeros)
    count = max(2, ROTATE_BYTES // size)
    return [first, *((again(weight), again(scales), None if zeros is None else again(zeros)) for _ in range(count - 1))]


def _winner(
    bench: _Bench,
    rivals: Sequence[Tile],
    regime: Regime,
    before: Sequence[Regime],
    effort: Effort,
    step: progress.Step,
) -> Tile:
    """The fastest of the rivals, the first of which is the best so far and wins unless another is clearly faster."""
    best, *others = rivals
    right = [tile for tile in others if bench.same_results(tile, regime.rows)]
    if len(right) < len(others):  # a compiler's fault: the order of sums is the same in all
        logger.warning("%d tiles of %s give other results and are left out", len(others) - len(right), bench.spec.slug)
    entered = [best, *right]
    scores = [0.0] * len(entered)
    for m in regime.rows:
        for place, times in enumerate(bench.times(entered, m, effort.screen, 5, 60)):
            scores[place] += math.log(statistics.median(times)) / len(regime.rows)
    for _ in rivals:
        step()
    fastest = sorted(range(1, len(entered)), key=lambda place: scores[place])[:FINALISTS]
    finalists = [best, *(entered[place] for place in fastest)]
    gains, noise = _gains(bench, finalists, regime.rows, effort)
    guard = [m for earlier in before for m in earlier.rows]
    losses, guard_noise = _gains(bench, finalists, guard, effort) if guard else ([0.0] * len(finalists), noise)
    for place in sorted(range(1, len(finalists)), key=lambda place: -gains[place]):
        if gains[place] > max(LEAST_GAIN, noise[place]) and -losses[place] <= max(LEAST_GAIN, guard_noise[place]):
            return finalists[place]
    return best


def _gains(
    bench: _Bench, tiles: Sequence[Tile], rows: Sequence[int], effort: Effort
) -> tuple[list[float], list[float]]:
    """How much less time each tile takes than the first, as a fraction, and how far that may be off.

    Tiles are compared turn by turn, so that drift of the machine hits both sides; a gain counts by the lesser of what
    medians and minima say.
    """
    gains, noises = [0.0] * len(tiles), [0.0] * len(tiles)
    for m in rows:
        base, *others = bench.times(tiles, m, effort.final, 15, 400)
        for place, times in enumerate(others, 1):
            ratios = sorted(mine / theirs for mine, theirs in zip(times, base, strict=True))
            low, middle, high = (ratios[len(ratios) * part // 4] for part in (1, 2, 3))
            gains[place] += (1 - max(middle, min(times) / min(base))) / len(rows)
            # Twice the standard error of a median, from the distance of the quartiles.
            noises[place] += 2 * 0.93 * (high - low) / math.sqrt(len(ratios)) / len(rows)
    return gains, noises


def _confirmed(microseconds: dict[str, tuple[float, float]]) -> bool:
    """Whether a last comparison says the same: a gain in some regime, and no loss in any.

    The best of many measurements is partly the luckiest one; this one had no part in the choice.
    """
    gains = [1 - after / before for before, after in microseconds.values()]
    return max(gains) > LEAST_GAIN and min(gains) >= -LEAST_GAIN


def _compare(bench: _Bench, best: Tile, effort: Effort) -> dict[str, tuple[float, float]]:
    """Microseconds with the default tile and with the best, geometric means over each regime's M."""
    found = {}
    for regime in REGIMES:
        logs = [0.0, 0.0]
        for m in regime.rows:
            for place, times in enumerate(bench.times([bench.spec.tile, best], m, effort.final, 15, 400)):
                logs[place] += math.log(statistics.median(times) * 1e6) / len(regime.rows)
        found[regime.name] = (round(math.exp(logs[0]), 2), round(math.exp(logs[1]), 2))
    return found
