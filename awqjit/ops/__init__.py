# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.awqjit.*``: the stable surface. Schemas hold tensors and ints only.

======================  ===============================================================================
``int4_mm``             y = x W + bias on a packed weight; inference only
``int4_linear``         the same, differentiable in x and bias (the int4 weight gets no gradient)
``int4_mm_backward``    grad_x = grad W^T, used by ``int4_linear``
``pack``, ``unpack``    canonical weight <-> packed weight
``pack_awq``            AWQ checkpoint tensors -> packed weight
======================  ===============================================================================

A tensor of numel 0 stands for "none" wherever a schema cannot say so (results) and is accepted as such (arguments).
"""

from __future__ import annotations

import torch

from awqjit import jit
from awqjit.ops import dispatcher, linear, matmul, packing

_SIGNATURE = (
    "(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor? bias, int in_features, int out_features, "
    "int group_size, int act_bits=16, Tensor? perm=None, int layout=1) -> Tensor"
)
SCHEMAS: dict[str, str] = {
    "int4_mm": _SIGNATURE,
    "int4_linear": _SIGNATURE,
    "int4_mm_backward": "(Tensor grad, Tensor weight, Tensor scales, Tensor? zeros, int in_features, int out_features, "
    "int group_size, Tensor? perm=None, int layout=1) -> Tensor",
    "pack": "(Tensor qweight, Tensor scales, Tensor? zeros, Tensor? g_idx, int group_size, int in_features) "
    "-> (Tensor weight, Tensor scales, Tensor zeros, Tensor perm)",
    "pack_awq": "(Tensor qweight, Tensor scales, Tensor? qzeros, int group_size) "
    "-> (Tensor weight, Tensor scales, Tensor zeros)",
    "unpack": "(Tensor weight, Tensor scales, Tensor? zeros, Tensor? perm, int in_features, int out_features, "
    "int group_size, int layout=1) -> (Tensor qweight, Tensor scales, Tensor zeros, Tensor g_idx)",
}

_library = torch.library.Library("awqjit", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.needs_contiguous_strides, torch.Tag.pt2_compliant_tag))

for _name, _function, _fake in (
    ("int4_linear", linear.int4_linear, matmul.int4_mm_fake),
    ("int4_mm_backward", linear.int4_mm_backward, linear.int4_mm_backward_fake),
    ("pack", packing.pack, packing.pack_fake),
    ("pack_awq", packing.pack_awq, packing.pack_awq_fake),
    ("unpack", packing.unpack, packing.unpack_fake),
):
    for _key in ("CPU", "XPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"awqjit::{_name}", _fake, lib=_library)
# An alias key, for the dispatcher in C++ to take precedence over with the key CPU itself.
_library.impl("int4_mm", dispatcher.int4_mm, "CompositeExplicitAutograd")
for _key in ("XPU", "CUDA"):
    _library.impl("int4_mm", matmul.int4_mm, _key)
torch.library.register_fake("awqjit::int4_mm", matmul.int4_mm_fake, lib=_library)
for _name, _function in (
    ("int4_mm", matmul.int4_mm_autograd),
    ("int4_linear", linear.int4_linear_autograd),
    ("int4_mm_backward", linear.int4_mm_backward_autograd),
):
    _library.impl(_name, _function, "Autograd")
for _name in ("int4_mm", "int4_linear"):
    for _device, _key in matmul.AUTOCAST.items():
        _library.impl(_name, matmul.autocast(_name, _device), _key)
for _name in ("int4_mm", "int4_linear", "int4_mm_backward"):
    torch.library.register_vmap(f"awqjit::{_name}", matmul.vmap(_name), lib=_library)


def forget() -> None:
    """Drop every kernel choice of this process, here and in :mod:`awqjit.jit`; variables are then read again."""
    matmul.forget()
    dispatcher.forget()
    jit.forget()
