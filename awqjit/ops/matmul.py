# SPDX-License-Identifier: Apache-2.0
"""``int4_mm``: the kernels behind one operator, for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from awqjit import jit, launch, select
from awqjit.errors import ArgumentError
from awqjit.layout import LAYOUT_CPU, LAYOUT_GPU
from awqjit.ops.checks import check_int4_mm, check_perm_values, refuse_none
from awqjit.xpu import device as xpu_device

AUTOCAST: dict[str, str] = {"cpu": "AutocastCPU", "xpu": "AutocastXPU", "cuda": "AutocastCUDA"}
"""Type of device -> dispatch key of its autocast."""

_checked: dict[tuple[Any, ...], jit.Kernel] = {}
"""Argument shapes, dtypes and ints that were checked before -> the kernel that serves them."""


def _describe(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def forget() -> None:
    """Drop the kernels that calls have been matched with."""
    _checked.clear()


def int4_mm(
    x: Tensor | None,  # torch lets None through
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
    if x is None:
        raise ArgumentError("x", None, "a tensor")
    kernel = kernel_for(x, weight, scales, zeros, bias, in_features, out_features, group_size, act_bits, perm, layout)
    if launch.in_forked_child():
        with launch.one_thread():  # copies, conversions and the row in plain torch included
            return _run(kernel, x, weight, scales, zeros, bias, perm, in_features, out_features)
    return _run(kernel, x, weight, scales, zeros, bias, perm, in_features, out_features)


def kernel_for(
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
) -> jit.Kernel:
    """The kernel that serves a call with these arguments, which are checked unless ones just like them were before."""
    tensors = (("x", x), ("weight", weight), ("scales", scales), ("zeros", zeros), ("bias", bias), ("perm", perm))
    for name, tensor in tensors:
        if tensor is not None and tensor.layout is not torch.strided:
            raise ArgumentError(name, f"layout {tensor.layout}", "a dense tensor")
    key = (
        x.dtype,
        x.device,
        _describe(weight),
        _describe(scales),
        _describe(zeros),
        _describe(bias),
        _describe(perm),
        in_features,
        out_features,
        group_size,
        act_bits,
        layout,
    )
    kernel = _checked.get(key)
    if kernel is None or x.dim() < 1 or x.shape[-1] != in_features:
        problem = check_int4_mm(
            x, weight, scales, zeros, bias, in_features, out_features, group_size, act_bits, perm, layout
        )
        kernel = _checked[key] = jit.choose(problem, _place(x, layout)).kernel
    return kernel


def _place(x: Tensor, layout: int) -> str:
    """What the device goes by that computes a call, which its layout has to be for."""
    if x.device.type not in {row.device for row in (*select.ROWS, *select.ACCELERATOR_ROWS)}:
        raise ArgumentError("x", f"device {x.device}", "device cpu, xpu or cuda: there is no kernel for another one")
    if layout == LAYOUT_GPU:
        return xpu_device.name_of(x.device)
    if x.device.type != "cpu":
        raise ArgumentError("layout", f"{layout} on {x.device}", f"{LAYOUT_GPU}, which kernels for that device read")
    return "cpu"


def _run(
    kernel: jit.Kernel,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    perm: Tensor | None,
    in_features: int,
    out_features: int,
) -> Tensor:
    """The kernel on checked arguments, which it takes in fewer forms than the operator does."""
    if perm is not None and perm.numel():
        x = _gather(x, perm)
    rows = x if x.dim() == 2 else x.reshape(-1, in_features)
    # A row has to be contiguous; how far apart the rows are does not matter.
    if rows.stride(1) != 1 and in_features != 1:
        rows = rows.contiguous()
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    y = kernel(rows, weight, scales, zeros if zeros is not None and zeros.numel() else None, bias)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], out_features)


def refuse_tangents(**tensors: Tensor | None) -> None:
    """Without this, forward-mode differentiation (jvp) would take the output for a constant."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(
                name,
                "a tensor with a tangent",
                "reverse-mode differentiation through torch.ops.awqjit.int4_linear: there is no forward mode",
            )


def refuse_trained_scales(scales: Tensor) -> None:
    refuse_none(scales=scales)
    if scales.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("scales", "a tensor that requires grad", "scales.detach(): the weight gets no gradient")


def _gather(x: Tensor, perm: Tensor) -> Tensor:
    try:
        return x.index_select(-1, perm)
    except (RuntimeError, IndexError):
        check_perm_values(perm)  # index_select knows that an index is out of range, not whose
        raise


def int4_mm_fake(
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
    check_int4_mm(x, weight, scales, zeros, bias, in_features, out_features, group_size, act_bits, perm, layout)
    return x.new_empty((*x.shape[:-1], out_features))


def int4_mm_autograd(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, *rest: Any, **named: Any
) -> Tensor:
    bias = rest[0] if rest else named.get("bias")
    refuse_tangents(x=x, scales=scales, bias=bias)
    refuse_trained_scales(scales)
    if torch.is_grad_enabled():
        for name, tensor in (("x", x), ("bias", bias)):
            if tensor is not None and tensor.requires_grad:
                raise ArgumentError(
                    name,
                    "a tensor that requires grad",
                    "torch.no_grad() or inference_mode around torch.ops.awqjit.int4_mm, or its differentiable sibling "
                    "torch.ops.awqjit.int4_linear (same arguments)",
                )
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.awqjit.int4_mm.default(x, weight, scales, zeros, *rest, **named)


def autocast(name: str, device: str) -> Any:
    """The operator under ``torch.autocast(device)``: x and bias are cast, nothing else."""
    op = getattr(torch.ops.awqjit, name).default

    def lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        # As torch's own rule has it: integers and fp64 stay as they are, and the operator refuses them.
        return tensor.to(dtype) if tensor is not None and tensor.dtype in jit.DTYPE_NAMES else tensor

    def cast(
        x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, *rest: Any, **named: Any
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST[device]))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(
                lower(x, dtype), weight, scales, zeros, None if bias is None else lower(bias, dtype), *rest, **named
            )

    return cast


def vmap(name: str) -> Any:
    """The batching rule of an operator whose first argument is [..., features] and may be batched, alone."""
    op = getattr(torch.ops.awqjit, name).default

    def batch(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            first = op._schema.arguments[0].name
            raise ArgumentError("vmap in_dims", in_dims, f"only {first} batched: the batch shares weight and bias")
        return op(x.movedim(in_dims[0], 0), *rest, **named), 0

    return batch
