# SPDX-License-Identifier: Apache-2.0
"""Filling a model skeleton from an int4 checkpoint, a few layers at a time.

The model's parameters are on the meta device, and :func:`awqjit.plan.make_plan` has found every name and shape to fit:
no parameter is ever left with made-up values. :func:`load` packs one layer while a thread reads the next one, and drops
what it read: memory peaks at the packed model plus these two layers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from awqjit import progress
from awqjit.checkpoint import Checkpoint
from awqjit.errors import ArgumentError, AwqJitWarning, FormatError
from awqjit.modules import Int4Linear
from awqjit.plan import Plan, QuantizedLayer, StoredLayer
from awqjit.spec import act_bits_of
from awqjit.weight import SYMMETRIC_ZERO, QuantizedWeight


@dataclass
class _Read:
    """One layer's weight (None where it is not read as int4, for the reason in ``refused``) and bias."""

    weight: QuantizedWeight | None
    bias: Tensor | None
    refused: str | None
    notes: list[str]


def load(
    model: nn.Module,
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    dtype: torch.dtype,
    compute: str = "w4a16",
    keep_fp32: Collection[str] = (),
    show_progress: bool = True,
) -> tuple[str, ...]:
    """Replace the int4 layers by :class:`Int4Linear` and read everything else, in ``dtype``.

    No parameter requires a gradient afterwards.

    Args:
        model: the skeleton, on the meta device; filled in place.
        checkpoint: the folder.
        plan: from :func:`awqjit.plan.make_plan`.
        dtype: of all floating parameters outside of int4 layers, whose scales and biases stay as they are on disk.
        compute: "w4a16" or "w4a8".
        keep_fp32: parts of parameter names that stay fp32 whatever ``dtype`` is.
        show_progress: a bar over the layers on stderr.

    Returns:
        Names of layers that cannot run as int4; they were dequantized to ``nn.Linear``, with one warning for all.

    Raises:
        ArgumentError: ``compute`` is unknown.
        FormatError: a layer's tensors are damaged or in a form that is not read, or another tensor holds integers
            where the model has floats.
    """
    act_bits_of(compute)
    refused: dict[str, str] = {}
    notes = {sentence: list(layers) for sentence, layers in plan.notes.items()}
    with progress.bar("loading layers", len(plan.quantized) + len(plan.dense), show_progress) as advance:
        # Embeddings are the largest tensors of small models: they come first, while little else is in memory.
        for name, sources in plan.dense.items():
            fp32 = any(part in name.split(".") for part in keep_fp32)
            read = checkpoint.read(*sources, dtype=torch.float32 if fp32 else dtype)
            _check_kind(model, name, read)
            _set(model, name, _join([read.pop(source) for source in sources], 0))
            advance()
        for layer, read_layer in _read_ahead(checkpoint, plan.quantized):
            parent, last = _parent(model, layer.name)
            module, reason = _module(checkpoint, layer, read_layer, dtype, compute)
            setattr(parent, last, module.train(getattr(parent, last).training))
            if reason is not None:
                refused[layer.name] = reason
            for sentence in read_layer.notes:
                notes.setdefault(sentence, []).append(layer.name)
            del read_layer
            advance()
    for target, shared in plan.ties.items():
        parent, last = _parent(model, target)
        setattr(parent, last, model.get_parameter(shared))
    _warn(refused, notes)
    return tuple(refused)


def _read_ahead(checkpoint: Checkpoint, layers: Sequence[QuantizedLayer]) -> Iterator[tuple[QuantizedLayer, _Read]]:
    """The layers in their order; while one is being used, a thread reads the next.

    What stays is allocated in the thread that packs, what is temporary in the other one: mixed, they would leave holes
    in the allocator's memory that count as used.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="awqjit-load") as pool:
        previous: tuple[QuantizedLayer, Future[_Read]] | None = None
        for layer in layers:
            future = pool.submit(_read_layer, checkpoint, layer)
            try:
                if previous is not None:
                    yield previous[0], previous[1].result()
            except BaseException:
                future.cancel()
                raise
            previous = layer, future
        if previous is not None:
            yield previous[0], previous[1].result()


def _read_layer(checkpoint: Checkpoint, layer: QuantizedLayer) -> _Read:
    notes: list[str] = []
    biases = [checkpoint.read(part.bias)[part.bias] for part in layer.parts if part.bias is not None]
    bias = _join(biases, 0) if biases else None
    refused = next((part.format.refused for part in layer.parts if part.format.refused), None)
    if refused is not None:
        return _Read(None, bias, refused, notes)
    weights = [_read(checkpoint, part, notes) for part in layer.parts]
    if len(weights) == 1:
        return _Read(weights[0], bias, None, notes)
    try:
        return _Read(join_columns(weights), bias, None, notes)
    except FormatError as error:
        return _Read(None, bias, str(error), notes)


def _module(
    checkpoint: Checkpoint, layer: QuantizedLayer, read: _Read, dtype: torch.dtype, compute: str
) -> tuple[nn.Module, str | None]:
    """One layer, packed; dequantized if it cannot be, and why."""
    reason = read.refused
    if read.weight is not None:
        weight, read.weight = read.weight, None
        try:
            return Int4Linear.from_quantized(weight, read.bias, compute=compute, format=layer.parts[0].format), None
        except (ArgumentError, FormatError) as error:
            reason = str(error)
    # Read again: that a layer cannot be packed is rare, and keeping its tensors for the case would always cost memory.
    return _linear([_dequantize(checkpoint, part).to(dtype) for part in layer.parts], read.bias), reason


def _tensors(checkpoint: Checkpoint, part: StoredLayer) -> dict[str, Tensor]:
    read = checkpoint.read(*part.tensors.values())
    return {last: read.pop(source) for last, source in part.tensors.items()}


def _read(checkpoint: Checkpoint, part: StoredLayer, notes: list[str]) -> QuantizedWeight:
    with _named(part):
        return part.format.read(_tensors(checkpoint, part), part.in_features, part.out_features, notes=notes)


def _dequantize(checkpoint: Checkpoint, part: StoredLayer) -> Tensor:
    with _named(part):
        return part.format.dequantize(_tensors(checkpoint, part), part.in_features, part.out_features)


@contextmanager
def _named(part: StoredLayer) -> Iterator[None]:
    """Name the layer in what its reader raises."""
    try:
        yield
    except (ArgumentError, FormatError) as error:
        raise FormatError(f"the layer {part.name} cannot be read: {error}", "") from error


def join_columns(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight of several with the same rows, side by side.

    Raises:
        FormatError: their groups or the dtypes of their scales differ.
    """
    first = weights[0]
    for weight in weights:
        same_groups = weight.group_size == first.group_size and torch.equal(weight.row_groups(), first.row_groups())
        if not same_groups or weight.scales.dtype != first.scales.dtype:
            raise FormatError("its parts are stored with different groups or scales", "")
    symmetric = all(weight.zeros is None for weight in weights)
    zeros = [
        torch.full_like(w.scales, SYMMETRIC_ZERO, dtype=torch.uint8) if w.zeros is None else w.zeros for w in weights
    ]
    return dataclasses.replace(
        first,
        qweight=_join([weight.qweight for weight in weights], 1),
        scales=_join([weight.scales for weight in weights], 1),
        zeros=None if symmetric else _join(zeros, 1),
        out_features=sum(weight.out_features for weight in weights),
    )


def _join(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _linear(weights: list[Tensor], bias: Tensor | None) -> nn.Linear:
    """An ``nn.Linear`` of weights [K, N] side by side, in their dtype."""
    weight = _join(weights, 1)
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
    return linear


def _warn(refused: dict[str, str], notes: dict[str, list[str]]) -> None:
    """One warning for all layers that run as float, one for all that are not stored as the config says."""
    if refused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:5])
        warnings.warn(
            f"{len(refused)} int4 layers run as dequantized float layers, because they cannot be packed ({reasons}"
            f"{'; ...' if len(refused) > 5 else ''})",
            AwqJitWarning,
            stacklevel=4,
        )
    if notes:
        lines = [
            f"{sentence} ({len(layers)} layers: {', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''})"
            for sentence, layers in notes.items()
        ]
        warnings.warn(f"the checkpoint is not as its config says: {'; '.join(lines)}", AwqJitWarning, stacklevel=4)


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _check_kind(model: nn.Module, name: str, stored: Mapping[str, Tensor]) -> None:
    """Integers where the model has floats are a quantized form whose scales are lost: they would run, and mean nothing.

    Raises:
        FormatError: a tensor is such.
    """
    parent, last = _parent(model, name)
    wanted = parent.get_parameter(last) if last in parent._parameters else parent.get_buffer(last)
    for source, tensor in stored.items():
        if wanted.is_floating_point() and not tensor.is_floating_point():
            raise FormatError(
                f"the tensor {source} is stored as {tensor.dtype}, and the model has floats there",
                "Use a checkpoint that keeps it float.",
            )


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, last = _parent(model, name)
    if last in parent._parameters:
        parent._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    else:
        parent._buffers[last] = tensor
