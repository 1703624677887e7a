# SPDX-License-Identifier: Apache-2.0
"""Rounding a float weight to int4: the nearest of 16 levels per group, with a search for the best step of each group.

A group of weights w shares a step s and a zero point z: ``w ~ (q - z) * s`` with q in 0..15. Taking s from the group's
full range keeps its largest weight exact and makes all others coarser. A smaller step clips a few weights and rounds
the rest finer; a larger one moves the levels. The search tries a fixed list of shares of the full range and then the
step that is the least-squares fit for the best one's levels, and keeps whatever gives the smallest squared error: of
the weights, or, where inputs of the layer are given, of what the group adds to the layer's outputs for them. The error
is that of the step *after* its rounding to fp16, the dtype in which it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from awqjit.errors import ArgumentError
from awqjit.weight import SYMMETRIC_ZERO, QuantizedWeight, pack_nibbles

SHARES: tuple[float, ...] = tuple(1.15 - 0.025 * i for i in range(23))
"""Shares of a group's full range that the search tries, 1.15 down to 0.6."""

SMALLEST_STEP = 2.0**-24
"""The smallest positive fp16: the step of a group whose weights are all (nearly) zero."""

_CHUNK = 32_767
"""Weights handled at a time: the temporaries stay in a core's cache, and torch does not split so small an operation
over threads, whose meeting would cost more than the work."""

_LARGEST_STEP = 65504.0  # of fp16
_LEAST_VALUE = 2.0**-20  # a weight without a larger one would become nothing but zeros and the smallest steps of fp16

_ROUND = 1.5 * 2.0**23
"""Adding and subtracting it rounds an fp32 below 2**22 in magnitude half to even; torch.round always wakes threads."""

_DAMPING = 0.01
"""Share of the inputs' mean square that every weight's own error counts beside the outputs' error: the tokens at hand
are a sample, and a weight whose inputs happen to be zero in it still has to be near its value."""


class _Cost:
    """The squared error that deltas of weights fp32 [..., groups, group_size] cause, [..., groups, 1]."""

    def of(self, deltas: Tensor) -> Tensor:
        return deltas.square().sum(-1, keepdim=True)

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """The scalar product that :meth:`of` is the square of."""
        return (left * right).sum(-1, keepdim=True)


class _OutputCost(_Cost):
    """The error of a layer's outputs for a sample of inputs, which a group's deltas cause on their own."""

    def __init__(self, inputs: Tensor) -> None:
        """Args:
        inputs: fp32 [groups of columns, tokens, group_size], as :func:`_by_group` gives them.
        """
        # Whichever is smaller: the sample, or the products of its columns.
        self._gram = inputs.shape[1] > inputs.shape[2]
        transposed = inputs.transpose(1, 2)
        self._matrix = torch.matmul(transposed, inputs) if self._gram else transposed

    def of(self, deltas: Tensor) -> Tensor:
        return self.dot(deltas, deltas).clamp_(min=0)

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        product = torch.matmul(left, self._matrix)
        other = right if self._gram else torch.matmul(right, self._matrix)
        return (product * other).sum(-1, keepdim=True).add_(super().dot(left, right), alpha=_DAMPING)


@dataclass
class _Best:
    """The best step, zero point and squared error so far of each group of a chunk, each fp32 [..., groups, 1]."""

    step: Tensor
    zero: Tensor
    error: Tensor


@dataclass(frozen=True)
class _Levels:
    """Which levels a group may have."""

    symmetric: bool
    lowest_zero: int

    def candidate(self, low: Tensor, high: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Step and zero point that spread 16 levels over ``share`` of the range low..high (low <= 0 <= high)."""
        if self.symmetric:
            # Levels -8..7: the positive end decides, or 7/8 of the negative one.
            step = torch.maximum(high / 7, -low / 8) * share
            return step, torch.full_like(step, SYMMETRIC_ZERO)
        step = ((high - low) * (share / 15)).clamp_(min=SMALLEST_STEP)
        zero = (-low * share / step).round_().clamp_(0, 15)
        if self.lowest_zero and bool((zero < self.lowest_zero).any()):
            # Levels run from -lowest_zero: what lies above has fewer of them.
            zero.clamp_(min=self.lowest_zero)
            step = torch.maximum(step, high * share / (15 - zero).clamp_(min=1))
        return step, zero


def _nearest(chunk: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """q - z of each weight: the nearest level that 4 bits can name. Clamped first: the bounds are whole numbers."""
    levels = torch.div(chunk, step)
    torch.maximum(levels, -zero, out=levels)
    torch.minimum(levels, 15 - zero, out=levels)
    return levels.add_(_ROUND).sub_(_ROUND)


def _stored(step: Tensor) -> Tensor:
    return step.to(torch.float16).to(torch.float32).clamp_(min=SMALLEST_STEP)


def _try(chunk: Tensor, step: Tensor, zero: Tensor, best: _Best, cost: _Cost) -> None:
    """Round a chunk with a candidate step and keep the candidate for the groups whose error it lowers."""
    step = _stored(step)
    error = cost.of(_nearest(chunk, step, zero).mul_(step).sub_(chunk))
    better = error < best.error
    best.step = torch.where(better, step, best.step)
    best.zero = torch.where(better, zero, best.zero)
    best.error = torch.where(better, error, best.error)


def _range(chunk: Tensor) -> tuple[Tensor, Tensor]:
    """low <= 0 <= high of each group."""
    return chunk.amin(-1, keepdim=True).clamp_(max=0), chunk.amax(-1, keepdim=True).clamp_(min=0)


def _search(chunk: Tensor, grid: _Levels, shares: tuple[float, ...], cost: _Cost) -> _Best:
    low, high = _range(chunk)
    best = _Best(*(torch.full_like(low, value) for value in (SMALLEST_STEP, SYMMETRIC_ZERO, torch.inf)))
    for share in shares:
        _try(chunk, *grid.candidate(low, high, share), best, cost)
    if len(shares) > 1:
        levels = _nearest(chunk, best.step, best.zero)
        # argmin over s of |w - s * levels|^2
        fit = cost.dot(levels, chunk) / cost.of(levels).clamp_(min=SMALLEST_STEP)
        _try(chunk, fit, best.zero, best, cost)
    return best


def _chunks(weight: Tensor, group: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, groups, and their weights, fp32 [groups, rows, group]: for some groups of columns all rows, in parts."""
    n, k = weight.shape
    by_group = weight.reshape(n, k // group, group)
    rows = max(1, min(n, _CHUNK // group))
    columns = max(1, _CHUNK // (rows * group))
    for first in range(0, k // group, columns):
        for row in range(0, n, rows):
            part = slice(row, row + rows), slice(first, first + columns)
            yield *part, by_group[part].transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)


def _by_group(inputs: Tensor, group: int) -> Tensor:
    """fp32 [groups, tokens, group]: inputs [tokens, K], those of each group scaled so that a column's squares add up
    to 1 on average. Scaling changes no choice within a group; inputs that are all zero stay so."""
    by_group = inputs.to(torch.float32).reshape(len(inputs), -1, group).transpose(0, 1)
    size = by_group.square().sum((1, 2), keepdim=True).div_(group).sqrt_()
    return by_group / torch.where(size > 0, size, 1)


def _check(weight: Tensor, group_size: int, inputs: Tensor | None) -> int:
    """The group size in rows, after all arguments have been checked but the weights' values."""
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ArgumentError("weight", f"{weight.dtype} {list(weight.shape)}", "a floating tensor [N, K]")
    k = weight.shape[1]
    group = k if group_size == -1 else group_size
    if group < 1 or k % group:
        raise ArgumentError("group_size", group_size, f"-1 or a divisor of in_features={k}")
    largest = float(weight.abs().max())
    if 0 < largest < _LEAST_VALUE:
        raise ArgumentError("weight", f"values up to {largest:.3g}", "a weight whose scales fit fp16")
    if inputs is not None and (inputs.dim() != 2 or inputs.shape[1] != k or not inputs.is_floating_point()):
        raise ArgumentError("inputs", f"{inputs.dtype} {list(inputs.shape)}", f"a floating tensor [tokens, {k}]")
    if inputs is not None and not bool(torch.isfinite(inputs).all()):
        raise ArgumentError("inputs", "NaN or infinity", "finite values")
    return group


def quantize_weight(
    weight: Tensor,
    *,
    group_size: int = 128,
    symmetric: bool = False,
    clip_search: bool = True,
    inputs: Tensor | None = None,
    lowest_zero: int = 0,
) -> QuantizedWeight:
    """Round the weight of a linear layer to int4.

    Args:
        weight: floating [N, K] as ``torch.nn.Linear`` holds it, on the CPU.
        group_size: weights along K that share a step and a zero point; divides K; -1 for K.
        symmetric: every zero point is 8, and none is stored.
        clip_search: search each group's step; False takes it from the group's full range.
        inputs: floating [tokens, K], a sample of what the layer is given: the search then lowers the error of its
            outputs for them instead of the weights' own.
        lowest_zero: smallest zero point to use, 0 or 1.

    Returns:
        The int4 weight [K, N] with fp16 scales.

    Raises:
        ArgumentError: the weight is not a 2-D floating tensor, holds NaN or infinity, or is so large that a scale does
            not fit fp16; group_size does not divide K; or the inputs do not fit.
    """
    group = _check(weight, group_size, inputs)
    n, k = weight.shape
    grid = _Levels(symmetric, lowest_zero)
    shares = SHARES if clip_search else (1.0,)
    given = _by_group(inputs, group) if inputs is not None and clip_search else None
    cost, costed = _Cost(), slice(0)
    values = torch.empty(n, k // group, group, dtype=torch.uint8)
    steps = torch.empty(k // group, n)
    zeros = torch.empty(k // group, n, dtype=torch.uint8)
    for rows, columns, chunk in _chunks(weight, group):
        if not bool(torch.isfinite(chunk).all()):
            raise ArgumentError("weight", "NaN or infinity", "finite values")
        # The step of a group's full range decides: a search must not end with a small step where the right one is too
        # large for fp16.
        widest = grid.candidate(*_range(chunk), 1.0)[0]
        if bool((widest > _LARGEST_STEP).any()):
            raise ArgumentError("weight", f"values up to {chunk.abs().max():.3g}", "groups whose scale fits fp16")
        if given is not None and columns != costed:
            cost, costed = _OutputCost(given[columns]), columns
        best = _search(chunk, grid, shares, cost)
        levels = _nearest(chunk, best.step, best.zero).add_(best.zero)
        values[rows, columns] = levels.to(torch.uint8).transpose(0, 1)
        steps[columns, rows], zeros[columns, rows] = best.step[..., 0], best.zero[..., 0].to(torch.uint8)
    return QuantizedWeight(
        qweight=pack_nibbles(values.reshape(n, k).T.contiguous()),
        scales=steps.to(torch.float16),
        zeros=None if symmetric else zeros,
        group_size=group,
        in_features=k,
        out_features=n,
    )


def round_trip(weight: Tensor, *, group_size: int, symmetric: bool = False) -> Tensor:
    """The weight after plain rounding to int4 and back, each step taken from its group's full range.

    What :func:`quantize_weight` gives without its search, but fast enough to be tried many times.

    Args:
        weight: floating [N, K], finite.
        group_size: a divisor of K, or -1 for K.
        symmetric: every zero point is 8.

    Returns:
        fp32 [N, K].

    Raises:
        ArgumentError: the weight is not a 2-D floating tensor, or group_size does not divide K.
    """
    group = _check(weight, group_size, None)
    n, k = weight.shape
    grid = _Levels(symmetric, 0)
    rounded = torch.empty(n, k // group, group)
    for rows, columns, chunk in _chunks(weight, group):
        step, zero = grid.candidate(*_range(chunk), 1.0)
        step = _stored(step)
        rounded[rows, columns] = _nearest(chunk, step, zero).mul_(step).transpose(0, 1)
    return rounded.reshape(n, k)
