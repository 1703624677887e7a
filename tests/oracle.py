# SPDX-License-Identifier: Apache-2.0
"""What y = x W + bias must be, in float64, with a bound on what a correct kernel may differ by. No code of the library.

Notation: u = 2^-24, the largest relative error of one fp32 rounding; gamma(n) = n u / (1 - n u), which bounds the
relative error that n such roundings in a row leave on a term (Higham, Accuracy and Stability of Numerical Algorithms,
lemma 3.1). A sum of terms computed in *any* order, each term passing through at most n roundings, is off by at most
gamma(n) * sum |term|.

A kernel computes some fp32 number v in [y - e, y + e] and rounds it once to the output's dtype. Rounding is monotone,
so its output lies in [round(y - e), round(y + e)]: :meth:`Expected.check` compares with those two numbers of the
output's own dtype. Halves of an ulp, subnormal outputs and overflow of fp16 to infinity need no terms of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-24
SMALLEST_NORMAL = 2.0**-126
SMALLEST_SUBNORMAL = 2.0**-149
TINY_GROUP = 2.0**-119
OVERFLOW = 2.0**127  # intermediate sums as large as this may overflow fp32 in one order and not in another


def gamma(n: int) -> float:
    return n * UNIT / (1 - n * UNIT)


@dataclass(frozen=True)
class Expected:
    """The exact result y, the bound e, and where fp32 may overflow (nothing is claimed there): float64/bool [M, N]."""

    y: Tensor
    bound: Tensor
    unclaimed: Tensor

    def check(self, actual: Tensor) -> None:
        """Assert that a kernel's output, [..., N] in the output's dtype, is one that a correct kernel can give."""
        got = actual.detach().reshape(-1, self.y.shape[1])
        assert got.shape == self.y.shape, f"output has shape {list(actual.shape)}, wanted rows {list(self.y.shape)}"
        # Through fp32 first, as the kernel goes: two monotone roundings make a monotone one.
        low = (self.y - self.bound).float().to(got.dtype).double()
        high = (self.y + self.bound).float().to(got.dtype).double()
        value = got.double()
        # A y that is not finite is reproduced as it is: NaN for NaN, an infinity for the same infinity.
        special = torch.where(self.y.isnan(), value.isnan(), value == self.y)
        good = torch.where(self.y.isfinite(), (low <= value) & (value <= high), special) | self.unclaimed
        if not bool(good.all()):
            m, n = (~good).nonzero()[0].tolist()
            raise AssertionError(
                f"{int((~good).sum())} of {good.numel()} outputs are out of bounds; the first is y[{m}, {n}] = "
                f"{float(value[m, n])!r}, exact {float(self.y[m, n])!r}, "
                f"allowed [{float(low[m, n])!r}, {float(high[m, n])!r}]"
            )


def expected(
    x: Tensor,
    q: Tensor,
    z: Tensor | None,
    s: Tensor,
    group_size: int,
    *,
    bias: Tensor | None = None,
    act_bits: int = 16,
    g_idx: Tensor | None = None,
) -> Expected:
    """The oracle.

    Args:
        x: fp16, bf16 or fp32 [..., K], as the kernel gets it.
        q: integers [K, N], 0 to 15.
        z: integers [G, N], 0 to 15; None for 8.
        s: fp16, bf16 or fp32 [G, N].
        group_size: rows of W that share a scale.
        bias: [N] or None.
        act_bits: 16 or 8.
        g_idx: the group of each row; None for k // group_size.
    """
    k, n = q.shape
    rows = x.reshape(-1, k).double()
    groups = torch.arange(k) // group_size if g_idx is None else g_idx.long()
    sums = _Sums(rows.shape[0], n)
    for group in range(s.shape[0]):
        of_group = (groups == group).nonzero()[:, 0]
        centred = q[of_group].double() - (8.0 if z is None else z[group].double())
        if act_bits == 16:
            sums.add_w4a16(rows[:, of_group], centred, s[group].double())
        else:
            sums.add_w4a8(rows[:, of_group], centred, s[group].double())
    added = torch.zeros(n, dtype=torch.float64) if bias is None else bias.double()
    # Roundings that one term passes through. w4a16: in its group's sum (a product, then at most size - 1 adds; doubled,
    # for kernels that split x into two terms); the scale's product; one add per group; the bias.
    # w4a8: d, d * s, t, the fused add (or product and add) of its own group and the adds of later ones; the bias.
    longest = int(torch.bincount(groups).max())
    roundings = 2 * longest + s.shape[0] + 4 if act_bits == 16 else s.shape[0] + 6
    magnitude = sums.magnitude + added.abs()
    bound = gamma(roundings) * magnitude + sums.absolute + SMALLEST_SUBNORMAL
    return Expected(
        y=sums.y + added, bound=bound, unclaimed=~(magnitude < OVERFLOW) & magnitude.isfinite() | sums.overflow
    )


class _Sums:
    """Running sums over the groups: y, sum of |terms|, terms of the bound that are absolute, possible fp32 overflow."""

    def __init__(self, m: int, n: int) -> None:
        self.y = torch.zeros(m, n, dtype=torch.float64)
        self.magnitude = torch.zeros_like(self.y)
        self.absolute = torch.zeros_like(self.y)
        self.overflow = torch.zeros(m, n, dtype=torch.bool)

    def add_w4a16(self, x: Tensor, centred: Tensor, s: Tensor) -> None:
        """One group: (x @ (q - z)) * s."""
        terms = x.abs() @ centred.abs()
        self.y += (x @ centred) * s
        self.magnitude += terms * s.abs()
        self.overflow |= (terms >= OVERFLOW) & x.isfinite().all(dim=1, keepdim=True)
        # Instructions for bf16 dot products take subnormal inputs for zero (|x| < 2^-126 lost, times at most 15) and
        # flush a subnormal sum (2^-126 lost), at each of the group's terms; then s scales the loss. The scaled product
        # and its add may be subnormal, which costs half of the smallest one each.
        self.absolute += x.shape[1] * 16 * SMALLEST_NORMAL * s.abs() + SMALLEST_SUBNORMAL

    def add_w4a8(self, x: Tensor, centred: Tensor, s: Tensor) -> None:
        """One group: x rounded to int8 steps of d = amax / 127, then as above."""
        amax = x.abs().amax(dim=1, keepdim=True)  # of float64 numbers that are fp32 numbers: no rounding; keeps NaN
        lost = ~amax.isfinite()
        used = ~lost & (amax >= TINY_GROUP)
        d = torch.where(used, amax / 127, 0.0)
        scaled = torch.where(used, x, 0.0) * 127 / torch.where(used, amax, 1.0)
        xq = scaled.round()  # torch rounds half to even
        # Kernels form x * fp32(127 / amax) in fp32: two roundings, off by at most 2 u |scaled| (1 + u) from the exact
        # quotient. Where a tie (an integer plus a half) is that close, the neighbour is right too: within
        # 2^-20 |scaled|, to be generous. It changes xq by 1 and so y by |q - z| d |s|.
        near = ((scaled - scaled.floor()) - 0.5).abs() <= 2.0**-20 * scaled.abs()
        dot = xq @ centred
        self.y += torch.where(lost, torch.nan, dot * (d * s))
        self.magnitude += dot.abs() * d * s.abs()
        self.absolute += (near.double() @ centred.abs()) * d * s.abs() * (1 + 2.0**-20)
        # d * s may be subnormal: half of the smallest one is lost, times |t|. So may the sum.
        self.absolute += (dot.abs() + 1) * SMALLEST_SUBNORMAL
        self.overflow |= d * s.abs() >= OVERFLOW


def w4a8_bits(
    x: Tensor,
    q: Tensor,
    z: Tensor | None,
    s: Tensor,
    group_size: int,
    *,
    bias: Tensor | None = None,
    fused: bool = True,
) -> Tensor:
    """The one result that every compiled w4a8 kernel gives, bit for bit: each fp32 step of the definition in turn.

    ``inv = 127 / amax``, ``d = amax / 127``, ``xq = round_half_even(x * inv)``, ``t`` the exact integer dot product
    rounded to fp32, ``y = fma(t, d * s, y)`` over the groups in order, then the bias, then one rounding to x's dtype.

    Args:
        x, q, z, s, group_size, bias: as for :func:`expected`.
        fused: False rounds t * (d * s) before it is added, as kernels written in torch and numba do.

    Returns:
        [M, N] of x's dtype.
    """
    k, n = q.shape
    rows = x.reshape(-1, k).float().numpy()
    y = np.zeros((rows.shape[0], n), dtype=np.float32)
    lost = np.zeros(rows.shape[0], dtype=bool)
    with np.errstate(all="ignore"):
        for group, start in enumerate(range(0, k, group_size)):
            part = rows[:, start : start + group_size]
            amax = np.abs(part).max(axis=1, keepdims=True, initial=0)
            finite = np.isfinite(amax)
            lost |= ~finite[:, 0]
            used = finite & (amax >= np.float32(TINY_GROUP))
            safe = np.where(used, amax, np.float32(127))
            inv, d = np.float32(127) / safe, np.where(used, safe / np.float32(127), np.float32(0))
            xq = np.rint(np.where(used, part, np.float32(0)) * inv).astype(np.int64)
            centred = q[start : start + group_size].long() - (8 if z is None else z[group].long())
            t = (xq @ centred.numpy()).astype(np.float32)
            step = d * s[group].float().numpy()
            y = fma(t, step, y) if fused else y + t * step
    result = torch.from_numpy(y)
    if bias is not None:
        result = result + bias.float()
    result[torch.from_numpy(lost)] = torch.nan
    return result.to(x.dtype)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 a * b + c with one rounding.

    The product of two fp32 numbers is exact in fp64. The fp64 sum is rounded to odd (its last bit set whenever it is
    not exact), so that rounding it again, to fp32, rounds the exact value once (Boldo and Melquiond, 2008).
    """
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)  # exact: Knuth's two-sum
    even = (total.view(np.int64) & 1) == 0
    # One step towards the exact value: away from zero if error and total agree in sign, else towards it.
    step = np.where(np.signbit(error) == np.signbit(total), 1, -1)
    inexact = (error > 0) | (error < 0)  # false where an infinity made the error NaN
    return (total.view(np.int64) + np.where(inexact & even, step, 0)).view(np.float64).astype(np.float32)
