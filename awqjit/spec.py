# SPDX-License-Identifier: Apache-2.0
"""What is asked for (`Problem`) and how it is done (`KernelSpec`): small frozen structs with a readable slug."""

from __future__ import annotations

from dataclasses import dataclass

from awqjit.errors import ArgumentError
from awqjit.target import DTYPES, Target, Tile

COMPUTE: dict[str, int] = {"w4a16": 16, "w4a8": 8}
"""Names of the compute modes in Python -> ``act_bits`` of the operator."""

MAX_W4A8_GROUP = 1 << 20
"""Longest group of a w4a8 kernel: 127 * 15 * 2**20 still fits an int32."""

MAX_FEATURES = 1 << 30
"""Largest in_features and out_features."""


def act_bits_of(compute: str) -> int:
    """``act_bits`` for a compute mode's name.

    Raises:
        ArgumentError: ``compute`` is neither "w4a16" nor "w4a8".
    """
    if compute not in COMPUTE:
        raise ArgumentError("compute", repr(compute), " or ".join(map(repr, COMPUTE)))
    return COMPUTE[compute]


@dataclass(frozen=True)
class Problem:
    """One int4 linear: everything a kernel is compiled for. The number of rows of x is a run-time argument.

    Attributes:
        k: in_features.
        n: out_features.
        group_size: rows of W that share a scale; 1 to k (-1 is replaced by k before a Problem is made).
        x_dtype: dtype of x and y: "bf16", "fp16" or "fp32".
        scale_dtype: dtype of the packed scales.
        symmetric: no zero points stored; each is 8.
        bias: a bias is added.
        act_bits: 16 (w4a16, exact weights times x) or 8 (w4a8, x rounded to int8 per row and group).
    """

    k: int
    n: int
    group_size: int
    x_dtype: str
    scale_dtype: str
    symmetric: bool
    bias: bool
    act_bits: int

    def __post_init__(self) -> None:
        for name in ("k", "n"):
            if not 1 <= getattr(self, name) <= MAX_FEATURES:
                raise ArgumentError(f"Problem.{name}", getattr(self, name), f"1 to {MAX_FEATURES}")
        if not 1 <= self.group_size <= self.k:
            raise ArgumentError("Problem.group_size", self.group_size, f"1 to k={self.k}")
        for name in ("x_dtype", "scale_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ArgumentError(f"Problem.{name}", getattr(self, name), " or ".join(DTYPES))
        if self.act_bits not in COMPUTE.values():
            raise ArgumentError("Problem.act_bits", self.act_bits, "16 or 8")

    @property
    def compute(self) -> str:
        return f"w4a{self.act_bits}"

    @property
    def groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def slug(self) -> str:
        """For example ``w4a8-bf16-k4096-n11008-g128-sfp16-asym``."""
        return (
            f"{self.compute}-{self.x_dtype}-k{self.k}-n{self.n}-g{self.group_size}-s{self.scale_dtype}"
            f"-{'sym' if self.symmetric else 'asym'}{'-bias' if self.bias else ''}"
        )


@dataclass(frozen=True)
class KernelSpec:
    """A Problem, the row that runs it and the row's tiles: all that a rendered kernel depends on."""

    problem: Problem
    target: Target
    tile: Tile

    @property
    def slug(self) -> str:
        """For example ``w4a8-bf16-k4096-n11008-g128-sfp16-asym-avx512_vnni``, then the tile if not the default."""
        name = f"{self.problem.slug}-{self.target.name}"
        default = self.target.tile(self.problem.act_bits, self.problem.x_dtype)
        return name if self.tile == default else f"{name}-{self.tile.slug}"
