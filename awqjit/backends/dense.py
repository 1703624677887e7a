# SPDX-License-Identifier: Apache-2.0
"""The last row of GPUs: dequantises the weight, some columns at a time, and multiplies with torch's own matmul."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from awqjit import reference
from awqjit.layout import LAYOUT_GPU, PackedWeight, unpack
from awqjit.spec import Problem

_BLOCKS = 128  # of 16 columns: 32 MB of fp32 at K = 4096


@dataclass(frozen=True)
class DenseKernel:
    """y = x W + bias in plain torch, on whatever device the tensors are. Right, and slow: W is made anew at each call.

    w4a16 multiplies in fp32; w4a8 is computed as :mod:`awqjit.reference` defines it.
    """

    problem: Problem
    device: str
    name: str = "torch"

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
        problem = self.problem
        packed = PackedWeight(weight, scales, zeros, None, problem.k, problem.n, problem.group_size, LAYOUT_GPU)
        if problem.act_bits == 8:
            return reference.int4_mm(x, unpack(packed), bias, problem.act_bits)
        rows = x.to(torch.float32)
        y = torch.empty((x.shape[0], problem.n), dtype=torch.float32, device=x.device)
        for block in range(0, weight.shape[0], _BLOCKS):
            some = packed.columns(block, block + _BLOCKS)
            first = 16 * block
            y[:, first : first + some.out_features] = rows @ unpack(some).dequantize(torch.float32)
        if bias is not None:
            y += bias
        return y.to(x.dtype)
