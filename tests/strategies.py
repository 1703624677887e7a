# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies shared by the suite: shapes from a bounded pool, hostile weights, hostile activations.

Big tensors come from a NumPy generator seeded by a drawn number; what makes a case hostile is drawn by name, so that a
failure prints as names and a seed and shrinks to the plain kinds, which stand first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from awqjit.weight import QuantizedWeight, ceil_div, pack_nibbles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Shape:
    """in_features, out_features, group_size (-1 already replaced)."""

    k: int
    n: int
    group: int

    @property
    def groups(self) -> int:
        return ceil_div(self.k, self.group)


SHAPES = (
    Shape(32, 16, 32),
    Shape(64, 8, 32),
    Shape(64, 1, 8),
    Shape(48, 24, 16),
    Shape(100, 40, 7),  # groups that end inside a word
    Shape(130, 24, 130),  # one group (-1), K not a multiple of 8
    Shape(72, 17, 1),  # a scale a row
    Shape(264, 72, 128),  # a short last group
    Shape(131, 33, 64),  # a short last group that ends inside a word
    Shape(576, 192, 32),
)
"""A bounded pool: each entry may cost a compile."""


def shapes(multiple_of_8: bool = False) -> st.SearchStrategy[Shape]:
    """A shape of the pool; with ``multiple_of_8``, one whose K and N both formats can pack."""
    return st.sampled_from([s for s in SHAPES if not multiple_of_8 or (s.k % 8 == 0 and s.n % 8 == 0)])


@dataclass(frozen=True, repr=False)
class RawWeight:
    """An int4 weight before any packing: q uint8 [K, N], z uint8 [G, N] or None, s [G, N], as the oracle takes it."""

    shape: Shape
    q: Tensor
    z: Tensor | None
    s: Tensor
    name: str

    def __repr__(self) -> str:
        return f"RawWeight({self.shape}, {self.s.dtype}, {self.name})"

    @property
    def dense_z(self) -> Tensor:
        """z uint8 [G, N], 8 where none is stored."""
        return torch.full(self.s.shape, 8, dtype=torch.uint8) if self.z is None else self.z

    def quantized(self) -> QuantizedWeight:
        """The library's canonical form."""
        return QuantizedWeight(pack_nibbles(self.q), self.s, self.z, self.shape.group, self.shape.k, self.shape.n)


ZERO_KINDS = ("random", "by_column", "all_0", "all_15", "only_0_and_15", "none")
SCALE_KINDS = ("positive", "any_sign", "some_zero", "some_subnormal", "all_zero")


@st.composite
def weights(
    draw: st.DrawFn,
    shape: Shape | st.SearchStrategy[Shape] | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    zero_kinds: tuple[str, ...] = ZERO_KINDS,
    scale_kinds: tuple[str, ...] = SCALE_KINDS,
) -> RawWeight:
    """A weight of a shape (or of one drawn): random q with each value at the ends, named zero points and scales."""
    if not isinstance(shape, Shape):
        shape = draw(shapes() if shape is None else shape)
    dtype = draw(st.sampled_from(dtypes))
    zeros, scales = draw(st.sampled_from(zero_kinds)), draw(st.sampled_from(scale_kinds))
    seed = draw(SEEDS)
    rng = np.random.default_rng(seed)
    size = (shape.groups, shape.n)
    return RawWeight(
        shape,
        q=torch.from_numpy(rng.integers(0, 16, (shape.k, shape.n), dtype=np.uint8)),
        z=_zeros(rng, zeros, size),
        s=_scales(rng, scales, size, dtype),
        name=f"z {zeros}, s {scales}, seed {seed}",
    )


def _zeros(rng: np.random.Generator, kind: str, size: tuple[int, int]) -> Tensor | None:
    groups, columns = size
    if kind == "none":
        return None
    if kind == "by_column":  # any eight neighbours are distinct: a permuted column shows
        z = (np.arange(columns)[None, :] * 5 + np.arange(groups)[:, None] * 3) % 16
    elif kind == "only_0_and_15":
        z = rng.choice([0, 15], size)
    else:
        low, high = {"random": (0, 16), "all_0": (0, 1), "all_15": (15, 16)}[kind]
        z = rng.integers(low, high, size)
    return torch.from_numpy(z.astype(np.uint8))


def _scales(rng: np.random.Generator, kind: str, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    s = rng.uniform(0.002, 0.03, size)
    if kind != "positive":
        s *= rng.choice([-1.0, 1.0], size)
    some = rng.random(size) < 0.3
    if kind == "some_zero":
        s[some] = 0.0
    elif kind == "some_subnormal":
        s[some] *= 1e-4 if dtype == torch.float16 else 1e-37
    elif kind == "all_zero":
        s[:] = 0.0
    return torch.from_numpy(s).to(dtype)


ROW_KINDS = ("normal", "zero", "plus_minus_127", "integers", "outlier", "subnormal_span", "edge_of_tiny", "one_hot")
LOST_ROW_KINDS = ("nan", "inf", "minus_inf", "nan_and_inf")
STRIDES = ("contiguous", "row_gap", "transposed", "every_other", "expanded", "three_d")


@st.composite
def activations(
    draw: st.DrawFn,
    k: int,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    max_rows: int = 40,
    row_kinds: tuple[str, ...] = ROW_KINDS + LOST_ROW_KINDS,
    strides: tuple[str, ...] = STRIDES,
) -> Tensor:
    """x [M, K] (or [2, M / 2, K]), M from 0 to ``max_rows``, each row of a drawn kind, with drawn strides.

    Small M are as likely as large ones. What lies between strided rows and columns is NaN: reading it shows.
    """
    dtype = draw(st.sampled_from(dtypes))
    m = draw(st.one_of(st.integers(0, min(9, max_rows)), st.integers(0, max_rows)))
    kinds = draw(st.lists(st.sampled_from(row_kinds), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(SEEDS))
    rows = [_row(rng, kinds[i % len(kinds)], k, dtype) for i in range(m)]
    x = torch.stack(rows) if rows else torch.empty(0, k, dtype=dtype)
    return with_strides(x, draw(st.sampled_from(strides)))


def _row(rng: np.random.Generator, kind: str, k: int, dtype: torch.dtype) -> Tensor:
    x = rng.standard_normal(k)
    at = int(rng.integers(k))
    start, stop = sorted(int(i) for i in rng.integers(0, k + 1, 2))
    if kind == "zero":
        x[:] = 0.0
    elif kind == "plus_minus_127":  # the int8 range at its ends, in every product
        x = rng.choice([-127.0, 127.0], k)
    elif kind == "integers":
        x = rng.integers(-8, 9, k).astype(np.float64)
    elif kind == "outlier":
        x[at] = rng.choice([-1e4, 1e4])
    elif kind == "subnormal_span":
        x[start:stop] *= 1e-6 if dtype == torch.float16 else 1e-39
    elif kind == "edge_of_tiny":  # around 2^-119, where w4a8 begins to take a group for zero
        x = rng.choice([-1.0, 1.0], k) * 2.0 ** rng.integers(-121, -116, k)
    elif kind == "one_hot":
        x[:] = 0.0
        x[at] = 1.0
    elif kind == "nan":
        x[at] = np.nan
    elif kind == "inf":
        x[at] = np.inf
    elif kind == "minus_inf":
        x[at] = -np.inf
    elif kind == "nan_and_inf":
        x[start:stop] = np.inf
        x[at] = np.nan
    return torch.from_numpy(x).to(dtype)


def with_strides(x: Tensor, kind: str) -> Tensor:
    """The values of x [M, K] with other strides; kind "expanded" repeats the first row, "three_d" splits an even M."""
    m, k = x.shape
    if kind == "row_gap":
        wide = x.new_full((m, k + 5), torch.nan)
        wide[:, 3 : 3 + k] = x
        return wide[:, 3 : 3 + k]
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "every_other":
        wide = x.new_full((m, 2 * k), torch.nan)
        wide[:, ::2] = x
        return wide[:, ::2]
    if kind == "expanded" and m:
        return x[:1].expand(m, k)
    if kind == "three_d" and m % 2 == 0:
        return x.reshape(2, m // 2, k)
    return x


def biases(n: int) -> st.SearchStrategy[Tensor | None]:
    """None, or a bias [N] of any dtype."""

    def make(choice: tuple[torch.dtype, int]) -> Tensor:
        return torch.from_numpy(np.random.default_rng(choice[1]).standard_normal(n)).to(choice[0])

    return st.one_of(st.none(), st.tuples(st.sampled_from(DTYPES), SEEDS).map(make))
