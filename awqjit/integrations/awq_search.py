# SPDX-License-Identifier: Apache-2.0
"""Activation-aware weight quantization (AWQ, Lin et al. 2023): which input channels of a layer deserve precision.

A channel that carries large inputs makes its weights' rounding errors large. Such a channel's weights are multiplied by
a scale above 1 before they are rounded, which makes their steps finer relative to them, and its inputs are divided by
the same scale, which leaves the layer's output as it was. The division costs nothing: it is folded into the operation
before the layer, the weight of a norm or the rows of another linear layer. Scales are powers of the channels' mean
input magnitude; the power is searched for, by the error of the layer's outputs for a sample of real inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from awqjit.errors import FormatError
from awqjit.quantize import round_trip

POWERS: tuple[float, ...] = tuple(i / 20 for i in range(21))
"""Powers of the channels' mean input magnitude that the search tries; 0 leaves the layer as it is."""

_SMALLEST = 1e-4  # of the largest mean magnitude: a channel that happens to have no inputs is not scaled to nothing
_TINY = 1e-30
_NOT_THE_FAMILY = "The model is not built as others of its type: quantize it without calibration (--method clip)."


@dataclass(frozen=True)
class Fold:
    """An operation whose output goes to some linear layers and nowhere else, by names within a block.

    Attributes:
        previous: the operation that takes the division.
        layers: the linear layers it feeds.
        offset: what the operation adds to its weight before multiplying by it (1 for Gemma's norms).
    """

    previous: str
    layers: tuple[str, ...]
    offset: float = 0.0


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_VALUES = Fold("self_attn.v_proj", ("self_attn.o_proj",))
_GATED = (Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")), Fold("mlp.up_proj", ("mlp.down_proj",)))
_LLAMA = (Fold("input_layernorm", _QKV), _VALUES, *_GATED)
_GEMMA = (
    Fold("input_layernorm", _QKV, 1.0),
    _VALUES,
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), 1.0),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
)
_GEMMA2 = (
    Fold("input_layernorm", _QKV, 1.0),
    _VALUES,
    Fold("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj"), 1.0),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
)
# fc1 reads the norm beside q, k and v; between fc1 and fc2 lies a GELU, which no scale passes.
_PHI = (Fold("input_layernorm", (*_QKV, "mlp.fc1")), Fold("self_attn.v_proj", ("self_attn.dense",)))
_PHI3 = (
    Fold("input_layernorm", ("self_attn.qkv_proj",)),
    Fold("post_attention_layernorm", ("mlp.gate_up_proj",)),
)

FAMILIES: dict[str, tuple[Fold, ...]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi": _PHI,
    "phi3": _PHI3,
}
"""``model_type`` of a config -> what its blocks can fold, in the order of the computation."""


class Energy:
    """Sums of squares of a layer's outputs for a sample of inputs fp32 [tokens, K]."""

    def __init__(self, sample: Tensor) -> None:
        # Whichever is smaller: the sample, or the K by K products of its columns.
        self._gram = len(sample) > sample.shape[1]
        self._matrix = sample.T @ sample if self._gram else sample.T

    def __call__(self, weight: Tensor) -> float:
        """Sum of squares of ``sample @ weight.T``, for fp32 [N, K]."""
        product = weight @ self._matrix
        return float((product * weight if self._gram else product.square_()).sum(dtype=torch.float64))


@dataclass
class Inputs:
    """What one linear layer, or several, are given while the calibration text runs through their block.

    Attributes:
        magnitude: fp32 [K], the mean of each channel's absolute value over all tokens.
        sample: fp32 [tokens, K], a part of the tokens.
    """

    magnitude: Tensor
    sample: Tensor


def scale_block(
    block: nn.Module,
    folds: Sequence[Fold],
    chosen: Set[str],
    inputs: Mapping[str, Inputs],
    stored: Callable[[str, Tensor], Tensor],
    *,
    group_size: int,
    symmetric: bool,
) -> None:
    """Search the scales of a block's layers and fold them in. What the block computes stays the same.

    A fold is left out if one of its layers is not to be quantized: what stays float keeps its weights.

    Args:
        block: the block, in fp32; changed in place.
        folds: what its family can fold.
        chosen: names of the layers that will be quantized.
        inputs: what each linear layer is given; changed as the folds change it.
        stored: a parameter's name and value -> the value as it will be stored.
        group_size: see :func:`awqjit.quantize.quantize_weight`.
        symmetric: likewise.

    Raises:
        FormatError: the block is not built as its family's are.
    """
    for item in folds:
        previous = block.get_submodule(item.previous)
        linear = isinstance(previous, nn.Linear)
        if not chosen >= set(item.layers) or (linear and item.previous not in chosen):
            continue
        given = inputs[item.layers[0]]
        if any(inputs[name] is not given for name in item.layers):
            raise FormatError(f"{', '.join(item.layers)} are not given the same inputs", _NOT_THE_FAMILY)
        repeat = _repeat(block, item) if linear else (1, 1)
        if repeat is None:
            continue
        weights = [block.get_parameter(f"{name}.weight").data for name in item.layers]
        scales = search_scales(weights, given, group_size=group_size, symmetric=symmetric, repeat=repeat)
        scales = fold(block, item, scales, stored, repeat)
        given.sample /= scales
        given.magnitude /= scales


def _repeat(block: nn.Module, item: Fold) -> tuple[int, int] | None:
    """How often and how far apart an output of a linear layer appears in the inputs of the next; None if unknown."""
    rows = len(block.get_parameter(f"{item.previous}.weight"))
    columns = block.get_parameter(f"{item.layers[0]}.weight").shape[1]
    if rows == columns:
        return 1, 1
    size = getattr(block.get_submodule(item.previous.rpartition(".")[0]), "head_dim", 0)
    if not size or columns % rows or rows % size:
        return None
    return columns // rows, size


def search_scales(
    weights: Sequence[Tensor], inputs: Inputs, *, group_size: int, symmetric: bool, repeat: tuple[int, int] = (1, 1)
) -> Tensor:
    """The scales of the input channels that layers share: the powers of :data:`POWERS` with the least error.

    The error is that of the layers' outputs for the sample, each relative to its outputs' own size.

    Args:
        weights: fp32 [N, K] of each layer.
        inputs: what all of them are given.
        group_size: see :func:`awqjit.quantize.quantize_weight`.
        symmetric: likewise.
        repeat: see :func:`shared_channels`.

    Returns:
        fp32 [K], positive; all ones if no other scales lower the error.
    """
    energy = Energy(inputs.sample)
    sizes = [max(energy(weight), _TINY) for weight in weights]
    magnitude = shared_channels(inputs.magnitude, repeat)
    magnitude = magnitude.clamp(min=max(_SMALLEST * float(magnitude.max()), _TINY))
    best, least = torch.ones_like(magnitude), float("inf")
    for power in POWERS:
        scales = magnitude.pow(power)
        scales /= (scales.max() * scales.min()).sqrt()
        error = 0.0
        for weight, size in zip(weights, sizes, strict=True):
            rounded = round_trip(weight * scales, group_size=group_size, symmetric=symmetric) / scales
            error += energy(rounded.sub_(weight)) / size
        if error < least:
            best, least = scales, error
    return best


def shared_channels(values: Tensor, repeat: tuple[int, int]) -> Tensor:
    """Replace the values of channels that have one source by their mean.

    Args:
        values: fp32 [K].
        repeat: (copies, size): an output of the operation before appears ``copies`` times, in neighbouring blocks of
            ``size`` channels (the query heads that share a head of values); (1, 1) for once.

    Returns:
        fp32 [K].
    """
    by_head = values.reshape(-1, *repeat)
    return by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)


@torch.no_grad()
def fold(
    block: nn.Module,
    item: Fold,
    scales: Tensor,
    stored: Callable[[str, Tensor], Tensor],
    repeat: tuple[int, int] = (1, 1),
) -> Tensor:
    """Divide the outputs of an operation by scales and multiply the weights of the layers after it, in place.

    A norm's weight is rounded to the dtype it is stored in first; the layers are multiplied by what that divides by.

    Args:
        block: the block, in fp32.
        item: the operation and the layers.
        scales: fp32 [K], positive.
        stored: a parameter's name and value -> the value as it will be stored.
        repeat: see :func:`shared_channels`.

    Returns:
        The scales that were used, fp32 [K].
    """
    previous: Any = block.get_submodule(item.previous)
    if isinstance(previous, nn.Linear):
        rows = scales.reshape(-1, *repeat)[:, 0].reshape(-1)
        previous.weight /= rows[:, None]
    else:
        before = previous.weight + item.offset
        narrow = stored(f"{item.previous}.weight", before / scales - item.offset).float()
        used = before / (narrow + item.offset)
        # A weight of zero, or one that its dtype cannot hold once divided, stays.
        sound = torch.isfinite(used) & (used > 0)
        scales = rows = torch.where(sound, used, 1.0)
        previous.weight.copy_(torch.where(sound, narrow, previous.weight))
    if getattr(previous, "bias", None) is not None:
        previous.bias /= rows
    for name in item.layers:
        layer: Any = block.get_submodule(name)
        layer.weight *= scales
    return scales
