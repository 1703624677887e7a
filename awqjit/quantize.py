# SPDX-License-Identifier: Apache-2.0
"""Rounding a float weight to int4: the nearest of 16 levels per group, with a search for the best step of each group.

A group of weights w shares a step s and a zero point z: ``w ~ (q - z) * s`` with q in 0..15. Taking s from the group's
full range keeps its largest weight exact and makes all others coarser. A smaller step clips a few weights and rounds
the rest finer; a larger one moves the levels. The search tries a fixed list of shares of the full range and then the
step that is the least-squares fit for the best one's levels, and keeps whatever gives the smallest squared error of the
weights. The error is that of the step *after* its rounding to fp16, the dtype in which it is stored.
"""

from __future__ import annotations

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


@dataclass
class _Best:
    """The best step, zero point and squared error so far of each group of a chunk, each fp32 [groups, 1]."""

    step: Tensor
    zero: Tensor
    error: Tensor


def _levels(chunk: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """q - z of each weight: the nearest level that 4 bits can name. Clamped first: the bounds are whole numbers."""
    levels = torch.div(chunk, step)
    torch.maximum(levels, -zero, out=levels)
    torch.minimum(levels, 15 - zero, out=levels)
    return levels.add_(_ROUND).sub_(_ROUND)


def _try(chunk: Tensor, step: Tensor, zero: Tensor, best: _Best) -> None:
    """Round a chunk with a candidate step and keep the candidate for the groups whose error it lowers."""
    step = step.to(torch.float16).to(torch.float32).clamp_(min=SMALLEST_STEP)
    error = _levels(chunk, step, zero).mul_(step).sub_(chunk).square_().sum(1, keepdim=True)
    better = error < best.error
    best.step = torch.where(better, step, best.step)
    best.zero = torch.where(better, zero, best.zero)
    best.error = torch.where(better, error, best.error)


def _candidate(low: Tensor, high: Tensor, share: float, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Step and zero point that spread 16 levels over ``share`` of the range low..high (low <= 0 <= high)."""
    if symmetric:
        # Levels -8..7: the positive end decides, or 7/8 of the negative one.
        step = torch.maximum(high / 7, -low / 8) * share
        return step, torch.full_like(step, SYMMETRIC_ZERO)
    step = ((high - low) * (share / 15)).clamp_(min=SMALLEST_STEP)
    return step, (-low * share / step).round_().clamp_(0, 15)


def _range(chunk: Tensor) -> tuple[Tensor, Tensor]:
    """low <= 0 <= high of each group."""
    return chunk.amin(1, keepdim=True).clamp_(max=0), chunk.amax(1, keepdim=True).clamp_(min=0)


def _search(chunk: Tensor, symmetric: bool, shares: tuple[float, ...]) -> _Best:
    low, high = _range(chunk)
    best = _Best(*(torch.full_like(low, value) for value in (SMALLEST_STEP, SYMMETRIC_ZERO, torch.inf)))
    for share in shares:
        _try(chunk, *_candidate(low, high, share, symmetric), best)
    if len(shares) > 1:
        levels = _levels(chunk, best.step, best.zero)
        # argmin over s of |w - s * levels|^2
        fit = (chunk * levels).sum(1, keepdim=True) / levels.square().sum(1, keepdim=True).clamp_(min=1)
        _try(chunk, fit, best.zero, best)
    return best


def quantize_weight(
    weight: Tensor, *, group_size: int = 128, symmetric: bool = False, clip_search: bool = True
) -> QuantizedWeight:
    """Round the weight of a linear layer to int4.

    Args:
        weight: floating [N, K] as ``torch.nn.Linear`` holds it, on the CPU.
        group_size: weights along K that share a step and a zero point; divides K; -1 for K.
        symmetric: every zero point is 8, and none is stored.
        clip_search: search each group's step; False takes it from the group's full range.

    Returns:
        The int4 weight [K, N] with fp16 scales.

    Raises:
        ArgumentError: the weight is not a 2-D floating tensor, holds NaN or infinity, or is so large that a scale does
            not fit fp16; or group_size does not divide K.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ArgumentError("weight", f"{weight.dtype} {list(weight.shape)}", "a floating tensor [N, K]")
    n, k = weight.shape
    group = k if group_size == -1 else group_size
    if group < 1 or k % group:
        raise ArgumentError("group_size", group_size, f"-1 or a divisor of in_features={k}")
    largest = float(weight.abs().max())
    if 0 < largest < _LEAST_VALUE:
        raise ArgumentError("weight", f"values up to {largest:.3g}", "a weight whose scales fit fp16")
    shares = SHARES if clip_search else (1.0,)
    groups = weight.reshape(-1, group)
    rows = max(1, _CHUNK // group)
    values = torch.empty(groups.shape, dtype=torch.uint8)
    steps = torch.empty(groups.shape[0], 1)
    zeros = torch.empty(groups.shape[0], 1, dtype=torch.uint8)
    for start in range(0, groups.shape[0], rows):
        part = slice(start, start + rows)
        chunk = groups[part].to(torch.float32)
        if not bool(torch.isfinite(chunk).all()):
            raise ArgumentError("weight", "NaN or infinity", "finite values")
        # The step of a group's full range decides: a search must not end with a small step where the right one is too
        # large for fp16.
        widest = _candidate(*_range(chunk), 1.0, symmetric)[0]
        if bool((widest > _LARGEST_STEP).any()):
            raise ArgumentError("weight", f"values up to {chunk.abs().max():.3g}", "groups whose scale fits fp16")
        best = _search(chunk, symmetric, shares)
        values[part] = _levels(chunk, best.step, best.zero).add_(best.zero).to(torch.uint8)
        steps[part], zeros[part] = best.step, best.zero.to(torch.uint8)
    by_group = (n, k // group)
    return QuantizedWeight(
        qweight=pack_nibbles(values.reshape(n, k).T.contiguous()),
        scales=steps.reshape(by_group).T.to(torch.float16).contiguous(),
        zeros=None if symmetric else zeros.reshape(by_group).T.contiguous(),
        group_size=group,
        in_features=k,
        out_features=n,
    )
