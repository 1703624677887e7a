# SPDX-License-Identifier: Apache-2.0
"""How one layer of a checkpoint is stored: its settings, and its tensors read and written through the table."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from awqjit.errors import ArgumentError, AwqJitWarning, FormatError, LostScaleError
from awqjit.formats.awq import AwqWeight
from awqjit.formats.shapes import Shapes
from awqjit.formats.table import PACK_QUANTIZED, PACKINGS, Packing, packing_of
from awqjit.formats.wide import dequantize_gptq, dequantize_pack_quantized
from awqjit.weight import QuantizedWeight


@dataclass(frozen=True)
class LayerFormat:
    """How one quantized layer is stored.

    Attributes:
        method: "awq", "gptq", "compressed-tensors" or "auto-round".
        bits: 4; or 8, see :attr:`refused`.
        group_size: rows that share a scale; -1 for all of the layer's.
        zero_point: zero points other than 8 occur (not ``sym``).
        version: which packing of the method's: "gemm" or "gemv" (AWQ), "gptq" or "gptq_v2", "pack-quantized"
            (compressed-tensors), "auto_round:auto_gptq", "auto_round:gptqmodel" or "auto_round:auto_awq" (AutoRound).
        reason: why the config's exception for this layer is not read, if so.

    Raises:
        FormatError: the version is not read, or group_size is neither -1 nor at least 1.
    """

    method: str
    bits: int
    group_size: int
    zero_point: bool
    version: str
    reason: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        packing_of(self.method, self.version)
        if self.group_size != -1 and self.group_size < 1:
            raise FormatError(f"group_size {self.group_size} is neither -1 nor at least 1", "Correct the config.")

    @property
    def packing(self) -> Packing:
        """The row of the table that reads and writes the layer's tensors."""
        return packing_of(self.method, self.version)

    @property
    def sym(self) -> bool:
        """Labelled symmetric: every zero point is 8."""
        return not self.zero_point

    @property
    def checkpoint_format(self) -> str:
        """The name that GPTQ configs give :attr:`version`."""
        return self.version

    @property
    def v2(self) -> bool:
        """GPTQ zero points are labelled as stored as they are, not minus one."""
        return self.packing.v2

    @property
    def mark(self) -> str:
        """Last name of the tensor whose presence makes a layer quantized: "qweight" or "weight_packed"."""
        return self.packing.mark

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Last names of all tensors that a quantized layer may have, :attr:`mark` first; a bias is not among them."""
        return self.packing.tensor_names

    @property
    def saved_names(self) -> tuple[str, ...]:
        """Those of :attr:`tensor_names` that :meth:`write` may give; the others are only tolerated."""
        return tuple(name for name in self.tensor_names if name not in self.packing.tolerated)

    @property
    def refused(self) -> str | None:
        """Why the layer cannot be read as int4, or None if it can."""
        if self.reason is not None:
            return self.reason
        return None if self.bits == 4 else f"it has {self.bits} bits, only 4 are read"

    @property
    def dequantizable(self) -> bool:
        """Whether :meth:`dequantize` reads the layer: 4 bits, and 8 bits where the packing is the same but for them."""
        return self.reason is None and (self.bits == 4 or (self.bits == 8 and self.packing.eight_bits))

    def shapes(self, in_features: int, out_features: int) -> dict[str, Shapes]:
        """For each of :attr:`tensor_names` the shapes it may have, and whether it must be there."""
        return self.packing.shapes(self, in_features, out_features)

    def fit(
        self, shapes: Mapping[str, tuple[int, ...]], in_features: int, out_features: int
    ) -> tuple[LayerFormat, str | None]:
        """This format, or where the tensors' shapes contradict it and fit one other reading, that one.

        Args:
            shapes: last name -> shape, of the tensors that are there.
            in_features: K.
            out_features: N.

        Returns:
            The format that the shapes are in (this one, if there is none), and a sentence if it is another.
        """
        if self.reason is not None or self.fits(shapes, in_features, out_features):
            return self, None
        found: list[LayerFormat] = []
        for other in self.readings(shapes):
            # Its own packing first with the labelled group size, then with the one that the scales tell.
            sizes = (other.group_size, other._group_size(shapes, in_features))
            candidates = (dataclasses.replace(other, group_size=size) for size in sizes if size is not None)
            fitting = next((one for one in candidates if one.fits(shapes, in_features, out_features)), None)
            if fitting is not None:
                found.append(fitting)
        if len(found) != 1:
            return self, None
        return found[0], (
            f"a layer is labelled {self._title()}, but its tensors have the shapes of {found[0]._title()}: they are "
            "believed"
        )

    def _title(self) -> str:
        return f"{self.packing.title} with {self.bits} bits and group_size {self.group_size}"

    def readings(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[LayerFormat, ...]:
        """This format and the others whose tensors have the same names, with 4 or 8 bits where both are known."""
        found = []
        for packing, (method, version) in _REPRESENTATIVES:
            if packing.mark != self.mark:
                continue
            same = packing.shapes is self.packing.shapes
            method, version = (self.method, self.version) if same else (method, version)
            for bits in dict.fromkeys((self.bits, 4, 8)):
                if bits == 4 or packing.eight_bits:
                    found.append(LayerFormat(method, bits, self.group_size, self.zero_point, version))
        return tuple(found)

    def features(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
        """(K, N) of a layer in this format, as its tensors' shapes tell it; for those who have no model to ask.

        K is rounded up to what fills its words, unless g_idx tells it (a stored weight_shape does too).

        Args:
            shapes: last name -> shape, of the tensors that are there.

        Returns:
            None if there is no such matrix. That the shapes fit each other is for :meth:`fit` to tell.
        """
        names = (self.mark, self.packing.scales)
        if any(len(shapes.get(name, ())) != 2 for name in names):
            return None
        k, n = self.packing.features(shapes[names[0]], shapes[names[1]])
        if self.bits == 8 and self.packing.eight_bits:
            k //= 2  # 4 values to a word, not 8
        order = next((shapes[name] for name in ("g_idx", "weight_g_idx") if len(shapes.get(name, ())) == 1), None)
        if order is not None and k - 8 < order[0] < k:
            k = order[0]
        return (k, n) if k > 0 and n > 0 else None

    def fits(self, shapes: Mapping[str, tuple[int, ...]], in_features: int, out_features: int) -> bool:
        """Whether all tensors that a layer needs are there, in shapes that they may have."""
        wanted = self.shapes(in_features, out_features)
        return all(
            shapes[name] in allowed.allowed if name in shapes else not allowed.required
            for name, allowed in wanted.items()
        )

    def _group_size(self, shapes: Mapping[str, tuple[int, ...]], in_features: int) -> int | None:
        """The group size that the scales' shape tells, if only one can be meant."""
        scales = shapes.get(self.packing.scales)
        groups = self.packing.groups(scales) if scales is not None and len(scales) == 2 else None
        if not groups or in_features % groups:
            return None
        size = in_features // groups
        return -1 if groups == 1 else size if size & (size - 1) == 0 else None

    def read(
        self,
        tensors: Mapping[str, Tensor],
        in_features: int | None = None,
        out_features: int | None = None,
        *,
        notes: list[str] | None = None,
    ) -> QuantizedWeight:
        """The canonical weight of one layer's tensors. No value changes; act-order comes back as ``g_idx``.

        Where the bytes contradict the label (which version wrote the zero points, symmetric or not), they decide.

        Args:
            tensors: last name -> tensor; those of :attr:`tensor_names` that the layer has.
            in_features: K, to be checked against the tensors; None for whatever they say.
            out_features: N, likewise.
            notes: gets a sentence for each contradiction; None to get one warning for all of them instead.

        Raises:
            ArgumentError: the tensors do not fit together or have another dtype.
            FormatError: they are in a form that is not read, or hold scales that are NaN or infinite.
        """
        weight = self.read_stored(tensors, in_features, out_features, notes=notes)
        weight = weight.standard() if isinstance(weight, AwqWeight) else weight
        if not weight.scales.is_meta and not bool(torch.isfinite(weight.scales).all()):
            raise LostScaleError
        return weight

    def read_stored(
        self,
        tensors: Mapping[str, Tensor],
        in_features: int | None = None,
        out_features: int | None = None,
        *,
        notes: list[str] | None = None,
    ) -> QuantizedWeight | AwqWeight:
        """As :meth:`read`, for those who pack the weight: its values may still be as they are stored.

        That every scale is a number is for them to find out too (:mod:`awqjit.packer` does both).
        """
        if self.refused is not None:
            raise FormatError(f"the layer cannot be read: {self.refused}", "Use the float model's weights for it.")
        found: list[str] = []
        weight = self.packing.read(self, tensors, in_features, found)
        got, wanted = (weight.in_features, weight.out_features), (in_features, out_features)
        if any(size not in (None, actual) for size, actual in zip(wanted, got, strict=True)):
            raise ArgumentError(self.mark, f"a weight of {got[0]} x {got[1]}", f"{wanted[0]} x {wanted[1]}")
        _tell(found, notes)
        return weight

    def dequantize(
        self, tensors: Mapping[str, Tensor], in_features: int, out_features: int, *, notes: list[str] | None = None
    ) -> Tensor:
        """The float weight of a layer that is :attr:`dequantizable`; for layers with 8 bits the only way to read them.

        Args:
            tensors: as for :meth:`read`.
            in_features: K.
            out_features: N.
            notes: as for :meth:`read`.

        Returns:
            fp32 [K, N].

        Raises:
            ArgumentError, FormatError: as :meth:`read`, or the layer is not dequantizable.
        """
        if not self.dequantizable:
            raise FormatError(f"the layer cannot be read: {self.refused}", "Use the float model's weights for it.")
        if self.bits == 4:
            return self.read(tensors, in_features, out_features, notes=notes).dequantize()
        found: list[str] = []
        sizes = (self.group_size, in_features, out_features)
        if self.packing is PACK_QUANTIZED:
            weight = dequantize_pack_quantized(tensors, *sizes)
        else:
            weight = dequantize_gptq(tensors, *sizes, v2=self.v2, sym=self.sym, notes=found)
        _tell(found, notes)
        return weight

    def write(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        """The layer's tensors by their last names; the inverse of :meth:`read`.

        Raises:
            FormatError: the format cannot express the weight.
        """
        return self.packing.write(self, weight)

    def one(self) -> LayerFormat:
        """Just these settings, without what subclasses add."""
        return LayerFormat(**{field.name: getattr(self, field.name) for field in dataclasses.fields(LayerFormat)})


def _tell(found: list[str], notes: list[str] | None) -> None:
    if notes is not None:
        notes.extend(found)
    elif found:
        warnings.warn("; ".join(found), AwqJitWarning, stacklevel=3)


_REPRESENTATIVES: tuple[tuple[Packing, tuple[str, str]], ...] = tuple(
    (PACKINGS[name], name)
    for name in (("awq", "gemm"), ("awq", "gemv"), ("gptq", "gptq"), ("compressed-tensors", "pack-quantized"))
)
"""One name for each way to shape tensors."""
