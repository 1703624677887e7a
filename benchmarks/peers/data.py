# SPDX-License-Identifier: Apache-2.0
"""The weights and activations that every contender gets, made with numpy alone so that any environment can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES = ("bf16", "fp16", "fp32")
OUTLIER_FACTOR = 32.0
OUTLIER_EVERY = 256
"""One input channel in so many is an outlier, as a few channels of large language models are."""

CHECKED_COLUMNS = 512
CHECKED_ROWS = 16
"""So many of either end are compared with float64."""


@dataclass(frozen=True)
class Weights:
    """``W[k, n] = (q[k, n] - zeros[k // group, n]) * scales[k // group, n]``.

    Attributes:
        q: uint8 [K, N], 0 to 15.
        scales: float32 [K / group, N]; bf16 and fp16 hold each value exactly, so no contender gains by its own dtype.
        zeros: uint8 [K / group, N], 5 to 10; 8 everywhere for contenders without zero points.
        group: weights of one column that share a scale; divides K.
    """

    q: Array
    scales: Array
    zeros: Array
    group: int

    @property
    def k(self) -> int:
        return int(self.q.shape[0])

    @property
    def n(self) -> int:
        return int(self.q.shape[1])

    def float64(self, columns: Array) -> Array:
        """[K, len(columns)], exact."""
        zeros = np.repeat(self.zeros[:, columns].astype(np.float64), self.group, axis=0)
        return (self.q[:, columns] - zeros) * np.repeat(self.scales[:, columns].astype(np.float64), self.group, axis=0)

    def float32(self) -> Array:
        """[K, N], exact: 5 bits times 7."""
        q = self.q.reshape(-1, self.group, self.n).astype(np.float32)
        q -= self.zeros[:, None]
        q *= self.scales[:, None]
        return q.reshape(self.k, self.n)


def make_weights(k: int, n: int, group: int, *, zero_points: bool) -> Weights:
    """Random weights, the same in every process.

    Raises:
        ValueError: ``group`` does not divide ``k``: most contenders cannot do that.
    """
    if group < 1 or k % group:
        raise ValueError(f"group size {group} does not divide K={k}")
    random = np.random.default_rng((k, n, group))
    q = random.integers(0, 16, (k, n), dtype=np.uint8)
    scales = random.integers(64, 128, (k // group, n)).astype(np.float32) / 2**14
    zeros = random.integers(5, 11, (k // group, n), dtype=np.uint8)
    return Weights(q, scales, zeros if zero_points else np.full_like(zeros, 8), group)


def to_bf16(values: Array) -> Array:
    """Float32 values rounded to the nearest bf16, ties to even; finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def make_x(m: int, k: int, dtype: str, *, outliers: bool) -> Array:
    """Normally distributed activations, float32 [m, k] holding values that ``dtype`` holds exactly.

    Args:
        m: rows.
        k: columns.
        dtype: one of :data:`DTYPES`.
        outliers: multiply one channel in :data:`OUTLIER_EVERY` by :data:`OUTLIER_FACTOR`.
    """
    random = np.random.default_rng((m, k))
    x = random.standard_normal((m, k), dtype=np.float32)
    if outliers:
        x[:, random.permutation(k)[: max(1, k // OUTLIER_EVERY)]] *= OUTLIER_FACTOR
    if dtype == "bf16":
        return to_bf16(x)
    return x.astype(np.float16).astype(np.float32) if dtype == "fp16" else x


def ends(count: int, of_either: int) -> Array:
    """Indices of the first and last ``of_either`` of ``count``, each once."""
    if count <= 2 * of_either:
        return np.arange(count)
    return np.concatenate((np.arange(of_either), np.arange(count - of_either, count)))


def relative_error(y: Array, reference: Array) -> float:
    """Frobenius norm of the difference over that of the reference; NaN or infinite when ``y`` is."""
    return float(np.linalg.norm(y.astype(np.float64) - reference) / np.linalg.norm(reference))
