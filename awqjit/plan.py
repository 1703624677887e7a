# SPDX-License-Identifier: Apache-2.0
"""What of an int4 checkpoint goes where in a model, found out from names and shapes before any layer is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from awqjit.checkpoint import Checkpoint
from awqjit.errors import CheckpointMismatchError, FormatError
from awqjit.formats import MARKS, FormatConfig, LayerFormat

Shape = tuple[int, ...]


FUSED: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj")}
"""Last name of a linear layer -> layers of equal size, one below the other in its weight, that some packers store."""


LINEAR_CLASSES = ("Linear", "FalconLinear")
"""Names of ``nn.Linear`` and of those of its subclasses that compute x W + bias too; another may do something else."""


@dataclass(frozen=True)
class StoredLayer:
    """One int4 layer of the checkpoint.

    Attributes:
        name: its name there.
        format: how it is stored.
        in_features: K.
        out_features: N.
        tensors: last name, such as "qweight" -> tensor of the checkpoint.
        bias: its bias in the checkpoint, or None.
    """

    name: str
    format: LayerFormat
    in_features: int
    out_features: int
    tensors: Mapping[str, str]
    bias: str | None


@dataclass(frozen=True)
class QuantizedLayer:
    """A linear layer of the model that the checkpoint holds as int4.

    Attributes:
        name: the layer's name in the model.
        parts: the layers of the checkpoint that it is made of, side by side; nearly always one.
    """

    name: str
    parts: tuple[StoredLayer, ...]


@dataclass(frozen=True)
class Plan:
    """What goes where, once names and shapes have been found to fit.

    Attributes:
        quantized: the layers that the checkpoint holds as int4.
        dense: parameter or persistent buffer of the model -> tensors of the checkpoint, one below the other in it;
            nearly always one.
        ties: parameter -> the parameter it is to share memory with.
        untied: parameters that the config ties, but the checkpoint gives weights of their own.
        notes: sentence -> layers: where the checkpoint is not quite as its config says, and what is done about it.
    """

    quantized: tuple[QuantizedLayer, ...]
    dense: dict[str, tuple[str, ...]]
    ties: dict[str, str]
    untied: tuple[str, ...]
    notes: dict[str, list[str]] = field(default_factory=dict)


def make_plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    format: FormatConfig,
    *,
    ties: Mapping[str, str],
    ignored: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
) -> Plan:
    """Match a checkpoint's tensors to a model's. Whether a ``qweight`` is there decides, layer by layer.

    Args:
        model: the skeleton, on the meta device.
        checkpoint: the folder.
        format: its format.
        ties: parameter -> parameter it shares memory with, as the config wants it.
        ignored: regular expressions of checkpoint tensors that the model has no use for.
        names: checkpoint tensor -> the model's name for it, where they differ.

    Raises:
        CheckpointMismatchError: tensors are missing, left over or of another shape; all of them are listed.
        FormatError: layers are stored in a form that is not read, or two tensors have one name in the model.
    """
    match = _Match(model, checkpoint, names or {}, [re.compile(pattern) for pattern in ignored])
    quantized = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).__name__ in LINEAR_CLASSES:
            parts = _match_parts(match, name, module, format)
            if parts:
                quantized.append(QuantizedLayer(name, parts))
    dense, kept_ties, untied = _match_ties(match, ties)
    for name, shape in match.wanted.items():
        names_of_parts = _names_of_parts(name.removesuffix(".weight"))
        if match.take(name, (shape,)):
            dense[name] = (match.sources[name],)
        elif all(f"{part}.weight" in match.sources for part in names_of_parts):
            for part in names_of_parts:
                match.take(f"{part}.weight", ((shape[0] // len(names_of_parts), *shape[1:]),))
            dense[name] = tuple(match.sources[f"{part}.weight"] for part in names_of_parts)
        else:
            match.missing.append(name)
    match.check()
    return Plan(tuple(quantized), dense, kept_ties, tuple(untied), match.notes)


def _names_of_parts(name: str) -> tuple[str, ...]:
    """The layers that a linear layer may be stored as: itself, or those that :data:`FUSED` lists."""
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{part}" for part in FUSED[last]) if last in FUSED else (name,)


class _Match:
    """Which tensors of the model still want one of the checkpoint, which of those are left, and what does not fit."""

    def __init__(
        self, model: nn.Module, checkpoint: Checkpoint, names: Mapping[str, str], ignored: list[re.Pattern[str]]
    ) -> None:
        self.checkpoint = checkpoint
        self.wanted: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.sources: dict[str, str] = {}
        for source in checkpoint.files:
            name = names.get(source, source)
            if name in self.sources:
                raise FormatError(
                    f"the checkpoint's tensors {self.sources[name]} and {source} are both {name} in the model",
                    "Remove one of them.",
                )
            self.sources[name] = source
        self.left = {
            source
            for name, source in self.sources.items()
            if name in self.wanted or not any(pattern.search(source) for pattern in ignored)
        }
        self.missing: list[str] = []
        self.mismatched: list[str] = []
        self.unreadable: list[str] = []
        self.notes: dict[str, list[str]] = {}

    def take(self, name: str, allowed: tuple[Shape, ...]) -> bool:
        """Use the checkpoint's tensor for a name; False if there is none."""
        source = self.sources.get(name)
        if source is None:
            return False
        self.left.discard(source)
        shape = self.checkpoint.shapes[source]
        if shape not in allowed:
            listed = " or ".join(str(list(one)) for one in allowed)
            self.mismatched.append(f"{source} {list(shape)}, wanted {listed} for {name}")
        return True

    def mark(self, name: str) -> str | None:
        """The last name of the tensor that makes a layer an int4 one; None if it is not."""
        return next((mark for mark in MARKS if f"{name}.{mark}" in self.sources), None)

    def stored_name(self, name: str) -> str:
        """The checkpoint's name for an int4 layer."""
        mark = self.mark(name)
        return self.sources[f"{name}.{mark}"].removesuffix(f".{mark}")

    def prefers_float(self, name: str, config: FormatConfig) -> bool:
        """Whether an int4 layer is stored as float too, and listed as float; whichever is not used is dropped."""
        if f"{name}.weight" not in self.sources:
            return False
        stored_name = self.stored_name(name)
        if not config.skips(stored_name):
            self.left.discard(self.sources[f"{name}.weight"])
            self.note("stored both as float and as int4: the int4 weight is used", name)
            return False
        for last in config.layer(stored_name).tensor_names:
            self.left.discard(self.sources.get(f"{name}.{last}", ""))
        self.note("stored both as float and as int4, and listed as float: the float weight is used", name)
        return True

    def note(self, sentence: str, layer: str) -> None:
        self.notes.setdefault(sentence, []).append(layer)

    def check(self) -> None:
        if self.unreadable:
            more = f"; ... ({len(self.unreadable)} in all)" if len(self.unreadable) > 10 else ""
            raise FormatError(
                f"layers are stored in a form that is not read: {'; '.join(self.unreadable[:10])}{more}",
                "Use a checkpoint that keeps these layers float or has them in 4 bits.",
            )
        if self.missing or self.left or self.mismatched:
            raise CheckpointMismatchError(tuple(sorted(self.missing)), tuple(sorted(self.left)), tuple(self.mismatched))


def _match_parts(match: _Match, name: str, module: nn.Linear, config: FormatConfig) -> tuple[StoredLayer, ...]:
    """The int4 layers that one linear module is stored as; none where its float weight is to be used."""
    names = (name,) if match.mark(name) else _names_of_parts(name)
    if not all(match.mark(part) for part in names) or any(match.prefers_float(part, config) for part in names):
        return ()
    k, n = module.in_features, module.out_features // len(names)
    if k < 1 or n < 1:
        raise FormatError(f"the config gives the layer {name} {k} inputs and {n} outputs", "Correct config.json.")
    del match.wanted[f"{name}.weight"]
    match.wanted.pop(f"{name}.bias", None)
    return tuple(_match_layer(match, part, k, n, module.bias is not None, config) for part in names)


def _match_layer(match: _Match, name: str, k: int, n: int, has_bias: bool, config: FormatConfig) -> StoredLayer:
    stored_name = match.stored_name(name)
    format = config.layer(stored_name)
    stored = {
        last: match.sources[f"{name}.{last}"] for last in format.tensor_names if f"{name}.{last}" in match.sources
    }
    format, note = format.fit({last: match.checkpoint.shapes[source] for last, source in stored.items()}, k, n)
    if note:
        match.note(note, name)
    if format.refused and not format.dequantizable:
        match.unreadable.append(f"{stored_name}: {format.refused}")
        match.left.difference_update(stored.values())
    else:
        for last, shapes in format.shapes(k, n).items():
            if not match.take(f"{name}.{last}", shapes.allowed) and shapes.required:
                match.missing.append(f"{stored_name}.{last}")
    bias = f"{name}.bias"
    if has_bias:
        if not match.take(bias, ((n,),)):
            match.missing.append(bias)
    elif match.sources.get(bias) in match.left and _is_zero(match.checkpoint, match.sources[bias]):
        match.left.discard(match.sources[bias])  # some packers write a bias of zeros for layers that have none
    return StoredLayer(stored_name, format, k, n, stored, match.sources.get(bias) if has_bias else None)


def _is_zero(checkpoint: Checkpoint, name: str) -> bool:
    return not bool(checkpoint.read(name)[name].any())


def _match_ties(match: _Match, ties: Mapping[str, str]) -> tuple[dict[str, tuple[str, ...]], dict[str, str], list[str]]:
    """The stored tensor of each shared parameter, the parameters that share memory, and those that do not after all."""
    dense: dict[str, tuple[str, ...]] = {}
    kept: dict[str, str] = {}
    untied: list[str] = []
    for target, source in ties.items():
        if target not in match.wanted:  # a quantized head shares nothing
            untied.append(target)
        elif target in match.sources and source in match.sources:
            if match.checkpoint.equal(match.sources[target], match.sources[source]):
                match.take(target, (match.wanted.pop(target),))
                kept[target] = source
            else:
                untied.append(target)
        else:
            shape = match.wanted.pop(target)
            kept[target] = source
            if match.take(target, (shape,)):
                dense[source] = (match.sources[target],)
                match.wanted.pop(source, None)
    return dense, kept, untied
