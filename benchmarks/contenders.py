# SPDX-License-Identifier: Apache-2.0
"""Ways to compute one linear layer on the same int4 weight, each with enough copies of it to never run from a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from awqjit import jit, launch, layout
from awqjit.spec import COMPUTE
from awqjit.weight import QuantizedWeight, pack_nibbles
from benchmarks import limits
from benchmarks.common import layer_problem

DENSE, TORCH_INT4 = "dense bf16", "torch int4pack"


@dataclass(frozen=True)
class Contender:
    """One way to compute the layer.

    Attributes:
        name: as tables show it.
        call: ``call(x, copy)`` with the copy's number.
        copies: how many copies of the weights there are.
        bytes_read: bytes of one copy.
        kind: the instructions that bound it, see :data:`benchmarks.limits.KIND_OF`; None if not known.
    """

    name: str
    call: Callable[[torch.Tensor, int], torch.Tensor]
    copies: int
    bytes_read: int
    kind: str | None


def make_weight(k: int, n: int, group_size: int) -> QuantizedWeight:
    """Random int4 weights with zero points 5 to 10 and scales that bf16 and fp16 hold exactly, alike for all."""
    generator = torch.Generator().manual_seed(k * 31 + n)
    groups = -(-k // group_size)
    values = torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8)
    scales = torch.randint(128, 256, (groups, n), generator=generator).float().div_(2**15)
    zeros = torch.randint(5, 11, (groups, n), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(pack_nibbles(values), scales.to(torch.float16), zeros, group_size, k, n)


def _size(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _copies(tensors: tuple[torch.Tensor, ...], rotate_bytes: int) -> list[tuple[torch.Tensor, ...]]:
    """The tensors and clones of them, together more than ``rotate_bytes``."""
    count = rotate_bytes // _size(tensors) + 1
    return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(count - 1))]


def int4_contender(mode: str, weight: QuantizedWeight, rotate_bytes: int) -> Contender:
    packed = layout.pack(weight)
    assert packed.zeros is not None
    copies = _copies((packed.weight, packed.scales, packed.zeros), rotate_bytes)
    k, n, group, bits = weight.in_features, weight.out_features, weight.group_size, COMPUTE[mode]
    op = torch.ops.awqjit.int4_mm.default
    kernel = jit.choose(layer_problem(k, n, group, compute=mode)).kernel
    kind = None
    if isinstance(kernel, launch.CompiledKernel):
        kind = limits.KIND_OF.get(kernel.spec.target.vocabulary("bf16").name)

    def call(x: torch.Tensor, copy: int) -> torch.Tensor:
        words, scales, zeros = copies[copy]
        y: torch.Tensor = op(x, words, scales, zeros, None, k, n, group, bits)
        return y

    return Contender(mode, call, len(copies), _size(copies[0]), kind)


def dense_contender(weight: QuantizedWeight, rotate_bytes: int, kind: str | None) -> Contender:
    copies = _copies((weight.dequantize(torch.bfloat16).T.contiguous(),), rotate_bytes)
    return Contender(DENSE, lambda x, copy: F.linear(x, copies[copy][0]), len(copies), _size(copies[0]), kind)


def torch_int4_contender(weight: QuantizedWeight, rotate_bytes: int, kind: str | None) -> Contender | str:
    """torch's int4 kernel, or why it does not run here. It computes (q - 8) * s + b: b is (8 - z) * s."""
    assert weight.zeros is not None
    scales = weight.scales.to(torch.float32)
    offsets = (8 - weight.zeros.to(torch.float32)) * scales
    pairs = torch.stack((scales, offsets), dim=2).to(torch.bfloat16).contiguous()
    try:
        words = torch._convert_weight_to_int4pack_for_cpu(weight.values().T.to(torch.int32).contiguous(), 1)
        probe = torch.zeros(1, weight.in_features, dtype=torch.bfloat16)
        torch._weight_int4pack_mm_for_cpu(probe, words, weight.group_size, pairs)
    except (RuntimeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    copies = _copies((words, pairs), rotate_bytes)

    def call(x: torch.Tensor, copy: int) -> torch.Tensor:
        packed, scales_and_offsets = copies[copy]
        return torch._weight_int4pack_mm_for_cpu(x, packed, weight.group_size, scales_and_offsets)

    return Contender(TORCH_INT4, call, len(copies), _size(copies[0]), kind)
