# SPDX-License-Identifier: Apache-2.0
"""Filling a model skeleton from an int4 checkpoint, layer by layer.

The model's parameters are on the meta device, and :func:`awqjit.plan.make_plan` has found every name and shape to fit:
no parameter is ever left with made-up values. A few threads each read one layer at a time, into memory that they use
again for the next, and pack it: memory peaks at the packed model plus one stored layer a thread.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from awqjit import packer, pages, progress
from awqjit.checkpoint import Checkpoint
from awqjit.errors import ArgumentError, AwqJitWarning, FormatError, LostScaleError
from awqjit.layout import PackedWeight
from awqjit.modules import Int4Linear
from awqjit.plan import Plan, QuantizedLayer, StoredLayer
from awqjit.spec import act_bits_of
from awqjit.weight import SYMMETRIC_ZERO, QuantizedWeight

_THREADS = 4
"""The most that read and pack: more would wait for the memory, and each holds a layer."""


@dataclass(frozen=True)
class _Loaded:
    """One layer of the model: its module, why that is not an int4 one, and where the checkpoint contradicts itself."""

    module: nn.Module
    refused: str | None
    notes: tuple[str, ...]


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
    reader = _Reader(checkpoint, plan, dtype, compute)

    def dense(name: str, sources: Sequence[str]) -> Tensor:
        fp32 = any(part in name.split(".") for part in keep_fp32)
        read = checkpoint.read(*sources, dtype=torch.float32 if fp32 else dtype)
        _check_kind(model, name, read)
        return _join([read.pop(source) for source in sources], 0)

    with (
        progress.bar("loading layers", len(plan.quantized) + len(plan.dense), show_progress) as advance,
        _pool(len(plan.quantized) + len(plan.dense)) as pool,
    ):
        # Embeddings are the largest tensors of small models: they come first, and no thread is left alone with them.
        parameters = {name: pool.submit(dense, name, sources) for name, sources in plan.dense.items()}
        layers = [pool.submit(reader.load, layer) for layer in plan.quantized]
        for name in plan.dense:
            _set(model, name, parameters.pop(name).result())
            advance()
        for layer in plan.quantized:
            loaded = layers.pop(0).result()
            parent, last = _parent(model, layer.name)
            setattr(parent, last, loaded.module.train(getattr(parent, last).training))
            if loaded.refused is not None:
                refused[layer.name] = loaded.refused
            for sentence in loaded.notes:
                notes.setdefault(sentence, []).append(layer.name)
            advance()
    for target, shared in plan.ties.items():
        parent, last = _parent(model, target)
        setattr(parent, last, model.get_parameter(shared))
    _warn(refused, notes)
    return tuple(refused)


@contextmanager
def _pool(tasks: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for so many tasks. Those that have not begun when the block fails never do."""
    threads = max(1, min(_THREADS, torch.get_num_threads(), tasks))
    with ThreadPoolExecutor(threads, thread_name_prefix="awqjit-load") as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Reader:
    """Reads and packs int4 layers, in any number of threads."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, dtype: torch.dtype, compute: str) -> None:
        self._checkpoint, self._dtype, self._compute = checkpoint, dtype, compute
        parts = [part for layer in plan.quantized for part in layer.parts]
        self._pack: Callable[[packer.Weight], PackedWeight] = packer.packer_for(
            sum(part.in_features * part.out_features for part in parts)
        )
        self._room = max((checkpoint.room_for(*part.tensors.values()) for part in parts), default=0)
        self._local = threading.local()

    def load(self, layer: QuantizedLayer) -> _Loaded:
        """One layer, packed; dequantized if it cannot be."""
        notes: list[str] = []
        biases = [self._checkpoint.read(part.bias)[part.bias] for part in layer.parts if part.bias is not None]
        bias = _join(biases, 0) if biases else None
        reason = next((part.format.refused for part in layer.parts if part.format.refused), None)
        if reason is None:
            weights = [self._weight(part, len(layer.parts), notes) for part in layer.parts]
            try:
                packed = self._pack(weights[0] if len(weights) == 1 else join_columns(weights))
                module = Int4Linear(packed, bias, compute=self._compute, format=layer.parts[0].format)
                return _Loaded(module, None, tuple(notes))
            except LostScaleError as error:
                raise _unreadable(layer.parts[0], error) from error
            except (ArgumentError, FormatError) as error:
                reason = str(error)
        # Read again: that a layer cannot be packed is rare, and keeping its tensors for the case would cost memory.
        floats = [self._dequantized(part).to(self._dtype) for part in layer.parts]
        return _Loaded(_linear(floats, bias), reason, tuple(notes))

    def _weight(self, part: StoredLayer, parts: int, notes: list[str]) -> Any:
        """A weight that is packed before the next one is read; that of one of several parts is all its own."""
        memory = None
        if parts == 1:
            if not hasattr(self._local, "memory"):
                self._local.memory = pages.empty((self._room,), torch.uint8, torch.device("cpu"))
            memory = self._local.memory
        tensors = self._checkpoint.read(*part.tensors.values(), into=memory)
        named = {last: tensors[source] for last, source in part.tensors.items()}
        with _named(part):
            if parts == 1:
                return part.format.read_stored(named, part.in_features, part.out_features, notes=notes)
            return part.format.read(named, part.in_features, part.out_features, notes=notes)

    def _dequantized(self, part: StoredLayer) -> Tensor:
        tensors = self._checkpoint.read(*part.tensors.values())
        with _named(part):
            named = {last: tensors.pop(source) for last, source in part.tensors.items()}
            return part.format.dequantize(named, part.in_features, part.out_features)


def _unreadable(part: StoredLayer, error: Exception) -> FormatError:
    return FormatError(f"the layer {part.name} cannot be read: {error}", "")


@contextmanager
def _named(part: StoredLayer) -> Iterator[None]:
    """Name the layer in what its reader raises."""
    try:
        yield
    except (ArgumentError, FormatError) as error:
        raise _unreadable(part, error) from error


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
