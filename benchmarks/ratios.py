# SPDX-License-Identifier: Apache-2.0
"""From times to statements: which peer is the fastest, by how much, and how sure that is. Pure functions.

The fastest of several noisy measurements looks faster than it is. So a cell's fastest peer is picked on one half of
the rounds, and the ratio taken on the other half alone, where it had no say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = Mapping[str, Sequence[float | None]]
"""Contender -> its time in each round; None where it was not measured."""

RESAMPLES = 4000
LEVEL = 0.90


@dataclass(frozen=True)
class Comparison:
    """One cell: awqjit against the fastest of a set of peers.

    Attributes:
        peer: the fastest, by its median over the picking rounds.
        ratios: peer's time / awqjit's in each of the other rounds; above 1 awqjit is faster.
    """

    peer: str
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def halves(rounds: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rounds to pick on and rounds to measure on, every other one: drift hits both alike.

    Raises:
        ValueError: fewer than two rounds.
    """
    if len(rounds) < 2:
        raise ValueError(f"{len(rounds)} rounds cannot be halved")
    return list(rounds[1::2]), list(rounds[0::2])


def quiet_rounds(foreign: Sequence[float], limit: float) -> list[int]:
    """The rounds in which other programs took no more than ``limit`` of the machine."""
    return [index for index, share in enumerate(foreign) if share <= limit]


def _known(times: Sequence[float | None], rounds: Sequence[int]) -> list[float]:
    return [time for index in rounds if (time := times[index]) is not None]


def fastest(times: Times, peers: Sequence[str], rounds: Sequence[int]) -> str | None:
    """The peer of the smallest median over the rounds; None if none was measured in any of them."""
    medians = {
        peer: statistics.median(known) for peer in peers if peer in times and (known := _known(times[peer], rounds))
    }
    return min(medians, key=lambda peer: medians[peer]) if medians else None


def compare(times: Times, own: str, peers: Sequence[str], rounds: Sequence[int]) -> Comparison | None:
    """Pick the fastest peer on half of the rounds, take the ratios on the other half.

    Args:
        times: of the cell.
        own: awqjit's contender.
        peers: those to choose from; the ones without times are passed over.
        rounds: indices of the rounds that count, at least two.

    Returns:
        None if no peer, or not ``own``, was measured, or the fastest not in the other half.
    """
    picking, measuring = halves(rounds)
    peer = fastest(times, peers, picking)
    if peer is None or own not in times:
        return None
    pairs = ((times[peer][index], times[own][index]) for index in measuring)
    ratios = tuple(theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None)
    return Comparison(peer, ratios) if ratios else None


def geometric_mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else math.nan


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds that bootstrap gives for it."""

    estimate: float
    low: float
    high: float


def bootstrap(ratios_of_cells: Sequence[Sequence[float]], *, level: float = LEVEL, seed: int = 0) -> Interval:
    """Geometric mean over cells of each cell's median ratio, with its percentile interval.

    Each cell's rounds are drawn anew with replacement, :data:`RESAMPLES` times, independently of the other cells'.

    Args:
        ratios_of_cells: one sequence of positive ratios for each cell, at least one cell.
        level: share of the resampled means between the bounds.
        seed: of the draws.

    Raises:
        ValueError: no cells, or one without ratios.
    """
    if not ratios_of_cells or not all(ratios_of_cells):
        raise ValueError("every cell needs ratios")
    random = np.random.default_rng(seed)
    logs: NDArray[np.float64] = np.zeros(RESAMPLES)
    for ratios in ratios_of_cells:
        known = np.asarray(ratios, dtype=np.float64)
        draws = random.integers(0, len(known), (RESAMPLES, len(known)))
        logs += np.log(np.median(known[draws], axis=1))
    means = np.exp(logs / len(ratios_of_cells))
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    estimate = geometric_mean([statistics.median(ratios) for ratios in ratios_of_cells])
    return Interval(estimate, float(low), float(high))


def cliffs(times: Mapping[int, float], tolerance: float) -> list[tuple[int, int]]:
    """Pairs (smaller M, larger M) where fewer rows take longer: time(smaller) > time(larger) * (1 + tolerance).

    Args:
        times: M -> time.
        tolerance: relative, for noise.
    """
    found = []
    ordered = sorted(times)
    for position, m in enumerate(ordered[:-1]):
        larger = min(ordered[position + 1 :], key=lambda other: times[other])
        if times[m] > times[larger] * (1 + tolerance):
            found.append((m, larger))
    return found
