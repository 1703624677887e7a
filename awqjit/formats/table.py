# SPDX-License-Identifier: Apache-2.0
"""The table of packings: for each how a layer's tensors are called and shaped, how they are read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from awqjit.errors import ArgumentError, FormatError
from awqjit.formats.awq import AwqWeight, standard_to_awq
from awqjit.formats.gemv import gemv_to_standard, standard_to_gemv, zeros_width
from awqjit.formats.gptq import gptq_to_standard, standard_to_gptq
from awqjit.formats.pack_quantized import pack_quantized_to_standard, standard_to_pack_quantized
from awqjit.formats.refusals import refuse
from awqjit.formats.shapes import Shapes
from awqjit.weight import SYMMETRIC_ZERO, QuantizedWeight, ceil_div, resolve_group_size

Tensors = Mapping[str, Tensor]


class Settings(Protocol):
    """What the rows of the table ask of a :class:`awqjit.formats.LayerFormat`."""

    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def zero_point(self) -> bool: ...
    @property
    def v2(self) -> bool: ...


@dataclass(frozen=True)
class Packing:
    """One row: how one layer's tensors lie in a checkpoint.

    Attributes:
        title: what messages call it.
        tensor_names: last names of the tensors a layer may have; the first marks the layer as quantized.
        shapes: ``shapes(layer, K, N)``, see :meth:`awqjit.formats.LayerFormat.shapes`.
        read: ``read(layer, tensors, K or None, notes)``: the canonical weight, or, where rearranging the values can be
            left to whoever packs them, the weight as it is stored.
        write: ``write(layer, weight)``.
        groups: ``groups(shape of the scales)``: G, or None where padding hides it.
        features: ``features(shape of the marking tensor, shape of the scales)``: (K, N) as far as they tell it: K is
            rounded up to whole words where it is packed.
        tolerated: names that other packers write and this one does without.
        v2: GPTQ zero points are stored as they are.
        eight_bits: layers with 8 bits are packed likewise, and can be dequantized.
    """

    title: str
    tensor_names: tuple[str, ...]
    shapes: Callable[[Settings, int, int], dict[str, Shapes]]
    read: Callable[[Settings, Tensors, int | None, list[str]], QuantizedWeight | AwqWeight]
    write: Callable[[Settings, QuantizedWeight], dict[str, Tensor]]
    groups: Callable[[tuple[int, ...]], int | None]
    features: Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, int]]
    tolerated: tuple[str, ...] = ()
    v2: bool = False
    eight_bits: bool = False

    @property
    def mark(self) -> str:
        """The tensor that marks a layer as quantized."""
        return self.tensor_names[0]

    @property
    def scales(self) -> str:
        """The tensor that holds the scales."""
        return self.tensor_names[1]


def _need(tensors: Tensors, *names: str) -> None:
    for name in names:
        if name not in tensors:
            raise ArgumentError(name, "nothing", f"a tensor ({', '.join(names)} make a layer)")


def _groups(layer: Settings, k: int) -> int:
    return ceil_div(k, resolve_group_size(layer.group_size, k))


def _trivial_g_idx(tensors: Tensors, weight: QuantizedWeight | AwqWeight) -> None:
    """AWQ has no act-order; some packers write the trivial g_idx all the same."""
    g_idx = tensors.get("g_idx")
    if g_idx is not None and not torch.equal(
        g_idx.long(), torch.arange(weight.in_features, device=g_idx.device) // weight.group_size
    ):
        raise FormatError("an AWQ layer has a g_idx other than k // group_size", "Use the checkpoint's GPTQ form.")


# ---- AWQ gemm


def _awq_shapes(layer: Settings, k: int, n: int) -> dict[str, Shapes]:
    groups, words = _groups(layer, k), ceil_div(n * layer.bits, 32)
    return {
        "qweight": Shapes(((k, words),), True),
        "scales": Shapes(((groups, n),), True),
        "qzeros": Shapes(((groups, words),), layer.zero_point),
        "g_idx": Shapes(((k,),), False),
    }


def _read_awq(layer: Settings, tensors: Tensors, k: int | None, notes: list[str]) -> AwqWeight:
    _need(tensors, "qweight", "scales")
    weight = AwqWeight(tensors["qweight"], tensors["scales"], tensors.get("qzeros"), layer.group_size)
    _trivial_g_idx(tensors, weight)
    return weight


def _write_awq(layer: Settings, weight: QuantizedWeight) -> dict[str, Tensor]:
    return dict(zip(("qweight", "scales", "qzeros"), standard_to_awq(weight), strict=True))


# ---- AWQ gemv


def _gemv_shapes(layer: Settings, k: int, n: int) -> dict[str, Shapes]:
    groups = _groups(layer, k)
    widths = tuple(dict.fromkeys((zeros_width(groups, resolve_group_size(layer.group_size, k)), ceil_div(groups, 8))))
    return {
        "qweight": Shapes(((n, ceil_div(k, 8)),), True),
        "scales": Shapes(tuple((n, 8 * width) for width in widths), True),
        "qzeros": Shapes(tuple((n, width) for width in widths), layer.zero_point),
        "g_idx": Shapes(((k,),), False),
    }


def _read_gemv(layer: Settings, tensors: Tensors, k: int | None, notes: list[str]) -> QuantizedWeight:
    _need(tensors, "qweight", "scales")
    weight = gemv_to_standard(tensors["qweight"], tensors["scales"], tensors.get("qzeros"), layer.group_size)
    _trivial_g_idx(tensors, weight)
    return weight


def _write_gemv(layer: Settings, weight: QuantizedWeight) -> dict[str, Tensor]:
    return dict(zip(("qweight", "scales", "qzeros"), standard_to_gemv(weight), strict=True))


# ---- GPTQ


def _gptq_shapes(layer: Settings, k: int, n: int) -> dict[str, Shapes]:
    groups = _groups(layer, k)
    return {
        "qweight": Shapes(((ceil_div(k * layer.bits, 32), n),), True),
        "scales": Shapes(((groups, n),), True),
        "qzeros": Shapes(((groups, ceil_div(n * layer.bits, 32)), (groups, n)), layer.zero_point),
        "g_idx": Shapes(((k,),), False),
    }


def _read_gptq(layer: Settings, tensors: Tensors, k: int | None, notes: list[str]) -> QuantizedWeight:
    _need(tensors, "qweight", "scales")
    return gptq_to_standard(
        tensors["qweight"],
        tensors["scales"],
        tensors.get("qzeros"),
        layer.group_size,
        v2=layer.v2,
        sym=not layer.zero_point,
        g_idx=tensors.get("g_idx"),
        act_order=True,
        in_features=k,
        notes=notes,
    )


def _write_gptq(layer: Settings, weight: QuantizedWeight) -> dict[str, Tensor]:
    return dict(zip(("qweight", "scales", "qzeros", "g_idx"), standard_to_gptq(weight, v2=layer.v2), strict=True))


# ---- compressed-tensors pack-quantized


def _pack_quantized_shapes(layer: Settings, k: int, n: int) -> dict[str, Shapes]:
    groups = _groups(layer, k)
    return {
        "weight_packed": Shapes(((n, ceil_div(k * layer.bits, 32)),), True),
        "weight_scale": Shapes(((n, groups),), True),
        "weight_zero_point": Shapes(((ceil_div(n * layer.bits, 32), groups), (n, groups)), layer.zero_point),
        "weight_shape": Shapes(((2,),), False),
        "weight_g_idx": Shapes(((k,),), False),
    }


def _read_pack_quantized(layer: Settings, tensors: Tensors, k: int | None, notes: list[str]) -> QuantizedWeight:
    _need(tensors, "weight_packed", "weight_scale")
    shape = tensors.get("weight_shape")
    if k is None:
        _need(tensors, "weight_packed", "weight_scale", "weight_shape")
        k = int(tensors["weight_shape"].flatten()[-1])
    zero_point = tensors.get("weight_zero_point")
    if zero_point is None and layer.zero_point:
        raise FormatError(
            "weight_zero_point is missing and the checkpoint is not labelled symmetric", "Check the checkpoint."
        )
    weight = pack_quantized_to_standard(
        tensors["weight_packed"],
        tensors["weight_scale"],
        zero_point,
        layer.group_size,
        in_features=k,
        weight_shape=shape,
        weight_g_idx=tensors.get("weight_g_idx"),
    )
    if not layer.zero_point and weight.zeros is not None and bool((weight.zeros != SYMMETRIC_ZERO).any()):
        notes.append("a layer is labelled symmetric, but stores zero points that are not all 8: they are used")
    return weight


def _write_pack_quantized(layer: Settings, weight: QuantizedWeight) -> dict[str, Tensor]:
    return standard_to_pack_quantized(weight, sym=not layer.zero_point)


# ---- the tables

_NAMES = ("qweight", "scales", "qzeros", "g_idx")
_CT_NAMES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

AWQ_GEMM = Packing(
    title="AWQ gemm",
    tensor_names=_NAMES,
    shapes=_awq_shapes,
    read=_read_awq,
    write=_write_awq,
    groups=lambda scales: scales[0],
    features=lambda qweight, scales: (qweight[0], scales[1]),
    tolerated=("g_idx",),
)
AWQ_GEMV = Packing(
    title="AWQ gemv",
    tensor_names=_NAMES,
    shapes=_gemv_shapes,
    read=_read_gemv,
    write=_write_gemv,
    groups=lambda scales: None,
    features=lambda qweight, scales: (8 * qweight[1], qweight[0]),
    tolerated=("g_idx",),
)
GPTQ = Packing(
    title="GPTQ",
    tensor_names=_NAMES,
    shapes=_gptq_shapes,
    read=_read_gptq,
    write=_write_gptq,
    groups=lambda scales: scales[0],
    features=lambda qweight, scales: (8 * qweight[0], qweight[1]),
    eight_bits=True,
)
GPTQ_V2 = dataclasses.replace(GPTQ, title="GPTQ v2", v2=True)
PACK_QUANTIZED = Packing(
    title="pack-quantized",
    tensor_names=_CT_NAMES,
    shapes=_pack_quantized_shapes,
    read=_read_pack_quantized,
    write=_write_pack_quantized,
    groups=lambda scales: scales[1],
    features=lambda packed, scales: (8 * packed[1], packed[0]),
    eight_bits=True,
)

PACKINGS: Mapping[tuple[str, str], Packing] = {
    ("awq", "gemm"): AWQ_GEMM,
    ("awq", "gemv"): AWQ_GEMV,
    ("gptq", "gptq"): GPTQ,
    ("gptq", "gptq_v2"): GPTQ_V2,
    ("gptq", "gptq_p"): GPTQ_V2,  # another layout for 3, 5, 6 and 7 bits only
    ("compressed-tensors", "pack-quantized"): PACK_QUANTIZED,
    # AutoRound names the layout, or the kernel whose layout it is; "auto_round" stores zero points as they are.
    ("auto-round", "auto_round:auto_gptq"): GPTQ,
    ("auto-round", "auto_round:gptqmodel"): GPTQ_V2,
    ("auto-round", "auto_round:auto_awq"): AWQ_GEMM,
}
"""(method, version) of a config -> the packing it means."""


def packing_of(method: str, version: str) -> Packing:
    """The packing that a config's method and version mean.

    Raises:
        FormatError: none that is read.
    """
    found = PACKINGS.get((method, version))
    if found is not None:
        return found
    if method not in {known for known, _ in PACKINGS}:
        raise refuse(f"a checkpoint of quant_method {method!r}", method)
    raise refuse(f"a checkpoint of quant_method {method!r} and version {version!r}", version)
