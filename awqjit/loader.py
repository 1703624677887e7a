# SPDX-License-Identifier: Apache-2.0
"""Filling a model skeleton from an int4 checkpoint, layer by layer as its shards stream in.

The model's parameters are on the meta device. :func:`make_plan` compares names and shapes first, from the shards'
headers alone; no layer is read before all of them fit, and no parameter is ever left with made-up values. :func:`load`
then reads one layer at a time, packs it and drops what it read: memory peaks at the packed model plus one layer.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from awqjit import progress
from awqjit.checkpoint import Checkpoint
from awqjit.errors import ArgumentError, AwqJitWarning, CheckpointMismatchError, FormatError
from awqjit.formats import FormatConfig
from awqjit.modules import Int4Linear, from_checkpoint
from awqjit.spec import act_bits_of
from awqjit.weight import ceil_div, resolve_group_size

_PARTS = ("qweight", "scales", "qzeros", "g_idx")


@dataclass(frozen=True)
class Plan:
    """What goes where, once names and shapes have been found to fit.

    Attributes:
        quantized: names of the linear layers that the checkpoint holds as int4.
        dense: parameter or persistent buffer of the model -> tensor of the checkpoint.
        ties: parameter -> the parameter it is to share memory with.
        untied: parameters that the config ties, but the checkpoint gives weights of their own.
    """

    quantized: tuple[str, ...]
    dense: dict[str, str]
    ties: dict[str, str]
    untied: tuple[str, ...]


def make_plan(
    model: nn.Module,
    checkpoint: Checkpoint,
    format: FormatConfig,
    *,
    ties: Mapping[str, str],
    ignored: Iterable[str] = (),
) -> Plan:
    """Match a checkpoint's tensors to a model's. Whether a ``qweight`` is there decides, layer by layer.

    Args:
        model: the skeleton, on the meta device.
        checkpoint: the folder.
        format: its format.
        ties: parameter -> parameter it shares memory with, as the config wants it.
        ignored: regular expressions of checkpoint tensors that the model has no use for.

    Raises:
        CheckpointMismatchError: tensors are missing, left over or of another shape; all of them are listed.
    """
    patterns = [re.compile(pattern) for pattern in ignored]
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    left = {name for name in checkpoint.files if name in wanted or not any(p.search(name) for p in patterns)}
    mismatched: list[str] = []
    missing: list[str] = []

    def match(name: str, shape: tuple[int, ...], source: str) -> None:
        left.discard(source)
        if checkpoint.shapes[source] != shape:
            mismatched.append(f"{source} {list(checkpoint.shapes[source])}, wanted {list(shape)} for {name}")

    quantized = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or f"{name}.qweight" not in checkpoint:
            continue
        quantized.append(name)
        del wanted[f"{name}.weight"]
        for part, shape in _part_shapes(module, format).items():
            if f"{name}.{part}" in checkpoint:
                match(name, shape, f"{name}.{part}")
            elif part == "scales" or (part == "qzeros" and format.zero_point):
                missing.append(f"{name}.{part}")
        bias = f"{name}.bias"
        bias_shape = wanted.pop(bias, None)
        if bias_shape is not None:
            if bias in checkpoint:
                match(bias, bias_shape, bias)
            else:
                missing.append(bias)
        elif bias in left and not checkpoint.read(bias)[bias].any():
            left.discard(bias)  # some packers write a bias of zeros for layers that have none

    dense: dict[str, str] = {}
    kept_ties: dict[str, str] = {}
    untied: list[str] = []
    for target, source in ties.items():
        if target not in wanted:  # a quantized head shares nothing
            untied.append(target)
        elif target in checkpoint and source in checkpoint:
            tensors = checkpoint.read(target, source)
            if torch.equal(tensors[target], tensors[source]):
                match(target, wanted.pop(target), target)
                kept_ties[target] = source
            else:
                untied.append(target)
        elif target in checkpoint:
            match(target, wanted.pop(target), target)
            dense[source] = target
            wanted.pop(source, None)
            kept_ties[target] = source
        else:
            del wanted[target]
            kept_ties[target] = source
    for name, shape in wanted.items():
        if name in checkpoint:
            dense[name] = name
            match(name, shape, name)
        else:
            missing.append(name)
    if missing or left or mismatched:
        raise CheckpointMismatchError(tuple(sorted(missing)), tuple(sorted(left)), tuple(mismatched))
    return Plan(tuple(quantized), dense, kept_ties, tuple(untied))


def _part_shapes(module: nn.Linear, format: FormatConfig) -> dict[str, tuple[int, ...]]:
    """Shapes that a layer's int4 tensors have in the checkpoint."""
    k, n = module.in_features, module.out_features
    groups = ceil_div(k, resolve_group_size(format.group_size, k))
    qweight = (k, ceil_div(n, 8)) if format.method == "awq" else (ceil_div(k, 8), n)
    return {"qweight": qweight, "scales": (groups, n), "qzeros": (groups, ceil_div(n, 8)), "g_idx": (k,)}


def load(
    model: nn.Module,
    checkpoint: Checkpoint,
    format: FormatConfig,
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
        format: its format.
        plan: from :func:`make_plan`.
        dtype: of all floating parameters outside of int4 layers, whose scales and biases stay as they are on disk.
        compute: "w4a16" or "w4a8".
        keep_fp32: parts of parameter names that stay fp32 whatever ``dtype`` is.
        show_progress: a bar over the layers on stderr.

    Returns:
        Names of int4 layers that no kernel takes; they were dequantized to ``nn.Linear``, with one warning for all.

    Raises:
        ArgumentError: ``compute`` is unknown.
        FormatError: a layer is in a form that is not read.
    """
    act_bits_of(compute)
    refused: dict[str, str] = {}
    with progress.bar("loading layers", len(plan.quantized) + len(plan.dense), show_progress) as advance:
        # Embeddings are the largest tensors of small models: they come first, while little else is in memory.
        for name, source in plan.dense.items():
            fp32 = any(part in name.split(".") for part in keep_fp32)
            _set(model, name, checkpoint.read(source, dtype=torch.float32 if fp32 else dtype)[source])
            advance()
        for name in plan.quantized:
            _load_quantized(model, name, checkpoint, format, compute, dtype, refused)
            advance()
    for target, shared in plan.ties.items():
        parent, last = _parent(model, target)
        setattr(parent, last, model.get_parameter(shared))
    if refused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:5])
        warnings.warn(
            f"{len(refused)} int4 layers run as dequantized {dtype} layers, because they cannot be packed ({reasons}"
            f"{'; ...' if len(refused) > 5 else ''})",
            AwqJitWarning,
            stacklevel=2,
        )
    return tuple(refused)


def _load_quantized(
    model: nn.Module,
    name: str,
    checkpoint: Checkpoint,
    format: FormatConfig,
    compute: str,
    dtype: torch.dtype,
    refused: dict[str, str],
) -> None:
    linear = model.get_submodule(name)
    names = [f"{name}.{part}" for part in _PARTS if f"{name}.{part}" in checkpoint]
    read = checkpoint.read(*names)
    try:
        tensors = {full.rpartition(".")[2]: read.pop(full) for full in names}
        weight = from_checkpoint(tensors, format, format.group_size)
        del tensors
    except (ArgumentError, FormatError) as error:
        raise FormatError(f"the layer {name} cannot be read: {error}", "") from error
    bias = None if linear.bias is None else checkpoint.read(f"{name}.bias")[f"{name}.bias"]
    parent, last = _parent(model, name)
    try:
        layer: nn.Module = Int4Linear.from_quantized(weight, bias, compute=compute, format=format)
    except ArgumentError as error:
        refused[name] = str(error)
        layer = nn.Linear(weight.in_features, weight.out_features, bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight.dequantize(dtype).T.contiguous(), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    layer.train(linear.training)
    setattr(parent, last, layer)


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, last = _parent(model, name)
    if last in parent._parameters:
        parent._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    else:
        parent._buffers[last] = tensor
