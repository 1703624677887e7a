# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors checkpoints of format "pack-quantized" with 4-bit integers.

For an in_features K, an out_features N and G groups (1 for strategy "channel") a layer has

- weight_packed int32 [N, ceil(K / 8)]: nibble i (bits 4i to 4i+3) of word c is row (k) 8c + i,
- weight_scale [N, G],
- weight_zero_point int32 [ceil(N / 8), G], only when asymmetric: nibble i of word r is column (n) 8r + i; old producers
  stored it unpacked, one signed integer (or whole float) each, [N, G],
- weight_shape int [2]: (N, K), as the words at the edges are padded,
- weight_g_idx int32 [K], with actorder "group": the group of each row; a -1 in it says there is no order.

The producer's values are signed, -8 to 7, and stored plus 8, weights and packed zero points alike. So the nibbles are
q and z as they are here, and a zero point that is not stored is 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from awqjit.errors import ArgumentError
from awqjit.formats.whole import whole_numbers
from awqjit.weight import (
    SCALE_DTYPES,
    SYMMETRIC_ZERO,
    QuantizedWeight,
    ceil_div,
    check_tensor,
    clear_padding,
    pack_nibbles,
    resolve_group_size,
    unpack_nibbles,
)


def pack_quantized_to_standard(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    group_size: int,
    *,
    in_features: int,
    weight_shape: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
) -> QuantizedWeight:
    """One pack-quantized layer as a canonical weight. No value changes.

    Args:
        weight_packed: int32 [N, ceil(K / 8)].
        weight_scale: fp16, bf16 or fp32 [N, G].
        weight_zero_point: int32 [ceil(N / 8), G] packed, or int8 or float [N, G]; None when symmetric.
        group_size: rows that share a scale; -1 for all K (strategy "channel").
        in_features: K.
        weight_shape: int32 or int64 [2], (N, K); checked if it is given.
        weight_g_idx: int32 or int64 [K].

    Returns:
        The canonical weight, in memory of its own; ``zeros`` is None only if ``weight_zero_point`` is.

    Raises:
        ArgumentError: a tensor has another dtype or shape, or group_size is not -1 or at least 1.
        FormatError: an unpacked zero point is not a whole number from -8 to 7.
    """
    if not isinstance(weight_packed, Tensor) or weight_packed.dim() != 2:
        got = getattr(weight_packed, "shape", type(weight_packed).__name__)
        raise ArgumentError("weight_packed", got, "a 2-D tensor [N, K / 8]")
    n, k = weight_packed.shape[0], in_features
    check_tensor("weight_packed", weight_packed, (n, ceil_div(k, 8)), torch.int32)
    if weight_shape is not None:
        check_tensor("weight_shape", weight_shape, (2,), torch.int32, torch.int64)
        if not weight_shape.is_meta and weight_shape.tolist() != [n, k]:
            raise ArgumentError("weight_shape", weight_shape.tolist(), f"{[n, k]}, as weight_packed has it")
    group_size = resolve_group_size(group_size, k)
    groups = ceil_div(k, group_size)
    check_tensor("weight_scale", weight_scale, (n, groups), *SCALE_DTYPES)
    g_idx = weight_g_idx
    if g_idx is not None:
        check_tensor("weight_g_idx", g_idx, (k,), torch.int32, torch.int64)
        in_order = torch.arange(k, device=g_idx.device) // group_size
        g_idx = None if bool((g_idx < 0).any()) or torch.equal(g_idx.long(), in_order) else g_idx.to(torch.int32)
    return QuantizedWeight(
        qweight=weight_packed.t().contiguous(),
        scales=weight_scale.t().contiguous(),
        zeros=None if weight_zero_point is None else _zero_points(weight_zero_point, n, groups),
        group_size=group_size,
        in_features=k,
        out_features=n,
        g_idx=g_idx,
    )


def _zero_points(stored: Tensor, n: int, groups: int) -> Tensor:
    """uint8 [G, N]."""
    if stored.dtype == torch.int32:
        check_tensor("weight_zero_point", stored, (ceil_div(n, 8), groups), torch.int32)
        return unpack_nibbles(stored, n).t().contiguous()
    signed = whole_numbers("weight_zero_point", stored, (n, groups), -8, 7)
    return (signed + SYMMETRIC_ZERO).to(torch.uint8).t().contiguous()


def standard_to_pack_quantized(weight: QuantizedWeight, *, sym: bool) -> dict[str, Tensor]:
    """The pack-quantized tensors of a canonical weight; the inverse of :func:`pack_quantized_to_standard`.

    Args:
        weight: a canonical weight.
        sym: leave out the zero points if all are 8.

    Returns:
        weight_packed, weight_scale, weight_shape (int64), weight_zero_point (packed; not if ``sym`` and all are 8) and
        weight_g_idx (only in act-order).
    """
    n, k = weight.out_features, weight.in_features
    tensors = {
        "weight_packed": clear_padding(weight.qweight, k).t().contiguous(),
        "weight_scale": weight.scales.t().contiguous(),
        "weight_shape": torch.tensor([n, k], dtype=torch.int64, device=weight.device),
    }
    zeros = weight.zeros
    if zeros is None and not sym:
        zeros = torch.full(weight.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8, device=weight.device)
    if zeros is not None and not (sym and bool((zeros == SYMMETRIC_ZERO).all())):
        tensors["weight_zero_point"] = pack_nibbles(zeros.t().contiguous())
    if weight.g_idx is not None and not weight.in_group_order():
        tensors["weight_g_idx"] = weight.g_idx
    return tensors
