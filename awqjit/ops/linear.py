# SPDX-License-Identifier: Apache-2.0
"""``int4_linear`` and its gradient: the differentiable sibling of ``int4_mm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from awqjit.errors import ArgumentError
from awqjit.layout import BLOCK, LAYOUT_CPU, unpack
from awqjit.ops.checks import check_perm_values, check_x, packed_weight
from awqjit.ops.matmul import refuse_tangents, refuse_trained_scales


def int4_linear(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return torch.ops.awqjit.int4_mm(x, *rest, **named)


class _Linear(torch.autograd.Function):
    """``int4_linear`` as autograd sees it: differentiable in x and bias."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.awqjit.int4_linear(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _x, weight, scales, zeros, bias, in_features, out_features, group_size, _act_bits, perm, layout = inputs
        ctx.save_for_backward(weight, scales, zeros, perm)
        ctx.ints = (in_features, out_features, group_size)
        ctx.layout = layout
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scales, zeros, perm = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.awqjit.int4_mm_backward(grad, weight, scales, zeros, *ctx.ints, perm, ctx.layout)
        if ctx.needs_input_grad[4] and ctx.bias_dtype is not None:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, None, None, None, grad_bias, None, None, None, None, None, None


class _Backward(torch.autograd.Function):
    """``int4_mm_backward`` as autograd sees it. grad W^T is linear in grad: its own gradient multiplies with W."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.awqjit.int4_mm_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _grad, weight, scales, zeros, in_features, out_features, group_size, perm, layout = inputs
        ctx.save_for_backward(weight, scales, zeros, perm)
        ctx.ints = (in_features, out_features, group_size)
        ctx.layout = layout

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scales, zeros, perm = ctx.saved_tensors
        back = torch.ops.awqjit.int4_linear(grad, weight, scales, zeros, None, *ctx.ints, 16, perm, ctx.layout)
        return back, *(None,) * 8


def _refuse_functorch(**tensors: Tensor | None) -> None:
    """torch has no way from an operator to an autograd.Function under torch.func, and a message that hides it."""
    if not (torch.is_grad_enabled() and torch._C._are_functorch_transforms_active()):
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(
                name, "a tensor that torch.func differentiates", "torch.autograd: backward() or torch.autograd.grad"
            )


def int4_linear_autograd(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    act_bits: int = 16,
    perm: Tensor | None = None,
    layout: int = LAYOUT_CPU,
) -> Tensor:
    refuse_tangents(x=x, scales=scales, bias=bias)
    refuse_trained_scales(scales)
    _refuse_functorch(x=x, bias=bias)
    ints = (in_features, out_features, group_size, act_bits)
    return _Linear.apply(x, weight, scales, zeros, bias, *ints, perm, layout)


def int4_mm_backward_autograd(
    grad: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    perm: Tensor | None = None,
    layout: int = LAYOUT_CPU,
) -> Tensor:
    refuse_tangents(grad=grad, scales=scales)
    refuse_trained_scales(scales)
    _refuse_functorch(grad=grad)
    return _Backward.apply(grad, weight, scales, zeros, in_features, out_features, group_size, perm, layout)


_BACKWARD_BLOCKS = 32  # blocks of 16 columns dequantized at a time: 8 MB of fp32 at K = 4096


def int4_mm_backward(
    grad: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    perm: Tensor | None = None,
    layout: int = LAYOUT_CPU,
) -> Tensor:
    packed = packed_weight(weight, scales, zeros, perm, in_features, out_features, group_size, layout)
    check_x("grad", grad, out_features, "out_features", weight)
    check_perm_values(packed.perm)
    rows = grad.reshape(-1, out_features).to(torch.float32)
    grad_x = torch.zeros(rows.shape[0], in_features, dtype=torch.float32, device=grad.device)
    for block in range(0, weight.shape[0], _BACKWARD_BLOCKS):
        part = packed.columns(block, block + _BACKWARD_BLOCKS)
        columns = slice(block * BLOCK, block * BLOCK + part.out_features)
        grad_x.addmm_(rows[:, columns], unpack(part).dequantize(torch.float32).t())
    return grad_x.to(grad.dtype).reshape(*grad.shape[:-1], in_features)


def int4_mm_backward_fake(
    grad: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    perm: Tensor | None = None,
    layout: int = LAYOUT_CPU,
) -> Tensor:
    packed_weight(weight, scales, zeros, perm, in_features, out_features, group_size, layout)
    check_x("grad", grad, out_features, "out_features", weight)
    return grad.new_empty((*grad.shape[:-1], in_features))
