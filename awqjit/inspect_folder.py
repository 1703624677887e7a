# SPDX-License-Identifier: Apache-2.0
"""What an int4 folder holds, layer by layer, and whether its numbers look like weights under the labels it carries.

Labels can be wrong, and a wrong one gives a model that runs and talks nonsense. Shapes tell how words are laid out; the
numbers tell two things more, by statistics of q - z, the weight in units of its scale:

- **Zero point convention.** The mean of q - z over a layer is near 0, because weights of a linear layer have a mean
  near 0 while q - z has a standard deviation of 2 to 4. Zero points that are one too high or too low (GPTQ version 1
  read as 2 or the other way round) move it to -1 or 1. More than half a step from 0 counts as doubtful. This is no
  proof: a layer whose weights do not centre on 0 can look doubtful, and one that is off centre by as much as a step
  could hide the error.
- **Order of columns.** Asymmetric zero points follow the weights of their own column: the mean of q over a group is
  near that group's z. So of the orders in which the 8 columns of a word of zero points can be read (straight, or AWQ's
  interleave, or its inverse), the right one makes the mean square of (mean of q - z) smallest. It is doubtful if
  another order than the label's does. This compares zero points with weights: it cannot see an order that is wrong for
  both, nor the order of rows (GPTQ, gemv and pack-quantized), nor anything in symmetric layers.

Both are computed over the first 2**21 weights of a layer at most.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from awqjit import progress
from awqjit.checkpoint import Checkpoint
from awqjit.errors import ArgumentError, FormatError
from awqjit.formats import MARKS, FormatConfig, LayerFormat, find_config, parse
from awqjit.formats.awq import ORDER
from awqjit.weight import QuantizedWeight, ceil_div, unpack_nibbles

SAMPLE = 1 << 21
"""Weights of a layer that the statistics look at, at most."""

_STRAIGHT = tuple(range(8))
_INVERSE = tuple(sorted(_STRAIGHT, key=lambda i: ORDER[i]))


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer of a folder.

    Attributes:
        name: its full name.
        packing: how it is packed, such as "AWQ gemm".
        in_features: K; 0 if it cannot be told.
        out_features: N; 0 if it cannot be told.
        bits: as the config says.
        group_size: rows that share a scale; K if all do.
        symmetric: every zero point is 8.
        order: "no" without act-order, "act-order" if all groups have as many rows, else "uneven act-order".
        scale_dtype: of the scales, such as "float16".
        bias: it has a bias.
        refused: why it cannot be read as int4, or None.
        as_float: it cannot, and loading dequantizes it to a float layer instead of failing.
        notes: where its tensors contradict the config.
        mean: mean of q - z, or None if the layer was not read.
        centred: ``mean`` is within half a step of 0.
        columns: the columns' order is the label's, as far as the zero points tell; None if they tell nothing.
    """

    name: str
    packing: str
    in_features: int
    out_features: int
    bits: int
    group_size: int
    symmetric: bool
    order: str
    scale_dtype: str
    bias: bool
    refused: str | None
    as_float: bool
    notes: tuple[str, ...]
    mean: float | None
    centred: bool | None
    columns: bool | None

    @property
    def doubts(self) -> tuple[str, ...]:
        """What the statistics find unusual."""
        found = []
        if self.centred is False:
            found.append(f"mean of q - z is {self.mean:+.2f}: zero points may be off by one")
        if self.columns is False:
            found.append("zero points fit the weights better in another order of columns")
        return tuple(found)


@dataclass(frozen=True)
class FolderReport:
    """What a folder holds.

    Attributes:
        folder: the folder.
        format: what its quantization config says.
        layers: the quantized layers, in the order of their names.
        kept: names of matrices that are float, in the order of their names.
        dtype: the model's own, such as "bfloat16", as config.json has it; "float32" if it has none.
    """

    folder: Path
    format: FormatConfig
    layers: tuple[LayerReport, ...]
    kept: tuple[str, ...]
    dtype: str


def inspect_folder(folder: str | os.PathLike[str], *, show_progress: bool = True) -> FolderReport:
    """Read a folder's headers and, one layer at a time, its int4 tensors. The model itself need not be known.

    Args:
        folder: a folder with config.json and safetensors.
        show_progress: a bar over the layers on stderr.

    Raises:
        FormatError: the folder is damaged, holds no quantized layer, or its config's form is not read.
    """
    folder = Path(folder).expanduser()
    checkpoint = Checkpoint.open(folder)
    parts: dict[str, dict[str, str]] = {}
    for name in checkpoint.files:
        layer, _, last = name.rpartition(".")
        parts.setdefault(layer, {})[last] = name
    marked = sorted((name for name, found in parts.items() if any(mark in found for mark in MARKS)), key=_natural)
    if not marked:
        raise FormatError(f"{folder} holds no int4 layer", "Quantize it first: awqjit quantize FOLDER DESTINATION.")
    format = parse(find_config(folder, checkpoint.config))
    layers = []
    with progress.bar("reading layers", len(marked), show_progress) as advance:
        for name in marked:
            layers.append(_layer(name, format.layer(name), parts[name], checkpoint))
            advance()
    kept = [
        name
        for name, found in parts.items()
        if name not in marked and "weight" in found and len(checkpoint.shapes[found["weight"]]) == 2
    ]
    config = checkpoint.config
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return FolderReport(folder, format, tuple(layers), tuple(sorted(kept, key=_natural)), str(dtype))


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts layers.2 before layers.10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in name.split("."))


def _layer(name: str, label: LayerFormat, parts: Mapping[str, str], checkpoint: Checkpoint) -> LayerReport:
    stored = {last: source for last, source in parts.items() if last in label.tensor_names}
    shapes = {last: checkpoint.shapes[source] for last, source in stored.items()}
    notes: list[str] = []
    layer, size = _reading(label, shapes, notes)
    refused, weight = layer.refused, None
    if size is None:
        refused = refused or "its tensors have the shapes of no format that is read"
    elif refused is None:
        tensors = checkpoint.read(*stored.values())
        tensors = {last: tensors[source] for last, source in stored.items()}
        shape = tensors.get("weight_shape")
        if shape is not None and shapes["weight_shape"] == (2,) and not shape.is_floating_point():
            size = (int(shape[1]), size[1])
        try:
            weight = layer.read(tensors, *size, notes=notes).symmetric_if_possible()
        except (ArgumentError, FormatError) as error:
            refused = str(error)
    k, n = size or (0, 0)
    mean, columns = (None, None) if weight is None else statistics(weight)
    return LayerReport(
        name=name,
        packing=layer.packing.title,
        in_features=k,
        out_features=n,
        bits=layer.bits,
        group_size=weight.group_size if weight is not None else layer.group_size,
        symmetric=layer.sym if weight is None else weight.zeros is None,
        order="no" if weight is None else _order(weight),
        scale_dtype="" if weight is None else str(weight.scales.dtype).removeprefix("torch."),
        bias="bias" in parts,
        refused=refused,
        as_float=refused is not None and refused == layer.refused and size is not None and layer.dequantizable,
        notes=tuple(notes),
        mean=mean,
        centred=None if mean is None else abs(mean) <= 0.5,
        columns=columns,
    )


def _reading(
    label: LayerFormat, shapes: Mapping[str, tuple[int, ...]], notes: list[str]
) -> tuple[LayerFormat, tuple[int, int] | None]:
    """The format that the shapes are in, the label's if they can be, with the layer's size (None: in none)."""
    for candidate in (label, *label.readings(shapes)):
        size = candidate.features(shapes)
        if size is None:
            continue
        fitted, note = label.fit(shapes, *size)
        if fitted.fits(shapes, *size):
            notes += [note] if note else []
            return fitted, size
    return label, None


def _order(weight: QuantizedWeight) -> str:
    if weight.in_group_order():
        return "no"
    sizes = torch.bincount(weight.row_groups(), minlength=weight.groups)
    even = torch.bincount(torch.arange(weight.in_features) // weight.group_size, minlength=weight.groups)
    return "act-order" if torch.equal(sizes, even) else "uneven act-order"


def statistics(weight: QuantizedWeight) -> tuple[float, bool | None]:
    """The mean of q - z, and whether the zero points' columns are in the order that fits the weights best.

    See the head of this module for what they say. The second is None for weights that cannot tell: symmetric ones, in
    act-order, or with less than two words of columns or zero points that are the same in every order.

    Args:
        weight: a canonical weight.
    """
    rows = min(weight.in_features, 8 * max(1, ceil_div(SAMPLE, 8 * weight.out_features)))
    q = unpack_nibbles(weight.qweight[: ceil_div(rows, 8)], rows).float()
    if weight.zeros is None:
        return float(q.mean()) - 8, None
    groups = weight.row_groups()[:rows]
    mean = float((q - weight.zeros[groups].float()).mean())
    n = weight.out_features // 8 * 8
    if n < 16 or not weight.in_group_order():
        return mean, None
    used = int(groups[-1]) + 1
    sums = torch.zeros(used, weight.out_features).index_add_(0, groups, q)
    means = (sums / torch.bincount(groups)[:, None])[:, :n]
    zeros = weight.zeros[:used, :n].float()
    errors = [float((means - _reordered(zeros, order)).square().mean()) for order in (_STRAIGHT, ORDER, _INVERSE)]
    if errors[1] == errors[0] == errors[2]:
        return mean, None
    return mean, errors[0] <= min(errors[1:])


def _reordered(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """Columns of [G, 8 C], each 8 of them in another order."""
    return values.reshape(values.shape[0], -1, 8)[:, :, list(order)].reshape(values.shape)
