# SPDX-License-Identifier: Apache-2.0
"""``awqjit.fuse``: the gate and up projections of gated MLPs as one layer, so that one call does the work of two.

A column of an int4 layer does not depend on its neighbours: the outputs are the same bit for bit. ``state_dict`` goes
on naming ``gate_proj`` and ``up_proj``, each as its checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from awqjit import pages
from awqjit.errors import ArgumentError
from awqjit.formats import LayerFormat
from awqjit.layout import BLOCK, LAYOUT_CPU, PackedWeight
from awqjit.modules import Int4Linear
from awqjit.weight import SYMMETRIC_ZERO

GATED_MLPS: tuple[str, ...] = (
    "CohereMLP",
    "Cohere2MLP",
    "Exaone4MLP",
    "GemmaMLP",
    "Gemma2MLP",
    "Gemma3MLP",
    "GraniteMLP",
    "HeliumMLP",
    "HunYuanDenseV1MLP",
    "LlamaMLP",
    "MinistralMLP",
    "Ministral3MLP",
    "MistralMLP",
    "OlmoMLP",
    "Olmo2MLP",
    "Olmo3MLP",
    "Qwen2MLP",
    "Qwen3MLP",
    "SmolLM3MLP",
    "StableLmMLP",
)
"""Classes of transformers that compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` and nothing else. Phi3's and
GLM's have one layer for gate and up from the start."""

_PARTS = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Fusion:
    """What :func:`fuse` did.

    Attributes:
        fused: names of the MLPs whose gate and up are one layer now.
        refused: names of those that stay as they are, each with the reason.
    """

    fused: tuple[str, ...]
    refused: dict[str, str]


def fuse(model: nn.Module) -> Fusion:
    """Replace the gated MLPs of a model by ones that call one int4 layer for gate and up.

    Memory stays the same, but for one layer's copy while it is made. Adapters (LoRA) on gate_proj or up_proj have to
    be given to a model that is not fused.

    Args:
        model: loaded by :func:`awqjit.from_pretrained`; changed in place. MLPs of the classes in :data:`GATED_MLPS`
            count, by their exact class.
    """
    fused, refused = [], {}
    for name, module in list(model.named_modules()):
        kind = type(module)
        if kind.__name__ not in GATED_MLPS or not kind.__module__.startswith("transformers."):
            continue
        reason = _refusal(module)
        if reason:
            refused[name] = reason
            continue
        parent, _, last = name.rpartition(".")
        replacement = FusedMLP(module.gate_proj, module.up_proj, module.down_proj, module.act_fn)
        setattr(model.get_submodule(parent), last, replacement.train(module.training))
        fused.append(name)
    return Fusion(tuple(fused), refused)


def _refusal(mlp: nn.Module) -> str:
    layers = [getattr(mlp, part) for part in _PARTS]
    for part, layer in zip(_PARTS, layers, strict=True):
        if type(layer) is not Int4Linear:
            return f"{part} is a {type(layer).__name__}"
        if layer.layout != LAYOUT_CPU:
            return f"{part} is packed for another device"
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            return f"{part} has hooks, which would not be called"
        if layer.out_features % BLOCK:
            return f"{part} has {layer.out_features} columns, not a multiple of {BLOCK}"
    return _difference(*layers)


def _difference(one: Int4Linear, two: Int4Linear) -> str:
    """What keeps two layers from being columns of one, or ""."""
    for name in ("in_features", "group_size", "act_bits", "layout"):
        if getattr(one, name) != getattr(two, name):
            return f"their {name} differ: {getattr(one, name)} and {getattr(two, name)}"
    for what, a, b in (
        ("scales are of", one.packed_scales, two.packed_scales),
        ("weights are on", one.packed_weight, two.packed_weight),
        ("biases are of", one.bias, two.bias),
    ):
        if (a is None) is not (b is None):
            return "one has a bias, the other none"
        if a is not None and b is not None and (a.dtype, a.device) != (b.dtype, b.device):
            return f"their {what} different kinds: {a.dtype} on {a.device}, {b.dtype} on {b.device}"
    if any(layer.bias is not None and layer.bias.requires_grad for layer in (one, two)):
        return "their biases are being trained"
    same_order = (one.packed_perm is None) is (two.packed_perm is None)
    if same_order and one.packed_perm is not None and two.packed_perm is not None:
        same_order = torch.equal(one.packed_perm, two.packed_perm)
    return "" if same_order else "their rows are in different act-orders"


class _Joined(Int4Linear):
    """Layers side by side. It saves and loads nothing: its :class:`_Part`s do."""

    def __init__(self, layers: Sequence[Int4Linear]) -> None:
        symmetric = all(layer.packed_zeros is None for layer in layers)
        first = layers[0]
        packed = PackedWeight(
            _cat([layer.packed_weight for layer in layers]),
            _cat([layer.packed_scales for layer in layers]),
            None if symmetric else _cat([_zeros(layer) for layer in layers]),
            first.packed_perm,
            first.in_features,
            sum(layer.out_features for layer in layers),
            first.group_size,
            first.layout,
        )
        bias = None if first.bias is None else torch.cat([layer.get_parameter("bias") for layer in layers])
        super().__init__(packed, bias, compute=first.compute, format=first.format)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *arguments: Any) -> None:
        pass


def _cat(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return torch.cat(tensors, out=pages.empty(shape, first.dtype, first.device))


def _zeros(layer: Int4Linear) -> Tensor:
    if layer.packed_zeros is not None:
        return layer.packed_zeros
    return torch.full_like(layer.packed_scales, SYMMETRIC_ZERO, dtype=torch.uint8)


class _Part(nn.Module):
    """Some columns of a joined layer under the name and in the form of the layer they come from."""

    joined: _Joined

    def __init__(self, joined: _Joined, first: int, layer: Int4Linear) -> None:
        super().__init__()
        object.__setattr__(self, "joined", joined)  # not as a submodule: it is one of the MLP's
        self.first, self.out_features = first, layer.out_features
        self.in_features = layer.in_features
        self.format: LayerFormat = layer.format

    def layer(self) -> Int4Linear:
        """An ordinary layer that shares memory with these columns."""
        joined = self.joined
        packed = joined.packed().columns(self.first // BLOCK, (self.first + self.out_features) // BLOCK)
        columns = None
        if joined.bias is not None:
            columns = joined.get_parameter("bias").detach()[self.first : self.first + self.out_features]
        return Int4Linear(packed, columns, compute=joined.compute, format=self.format)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to these columns of y alone."""
        y: Tensor = self.layer()(x)
        return y

    def extra_repr(self) -> str:
        last = self.first + self.out_features - 1
        return f"columns {self.first} to {last} of the joined layer, format={self.format.method}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.layer()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        layer, joined = self.layer(), self.joined
        before = layer.packed_weight
        layer._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if layer.packed_weight is before:
            return  # something is missing or wrong, and has been said
        own = self.layer()
        reason = _difference(own, layer)
        if joined.layout != LAYOUT_CPU:
            reason = f"it is on {joined.packed_weight.device}: load it on the CPU"
        if reason:
            error_msgs.append(f"{prefix.removesuffix('.')}: does not fit the layer it is joined with: {reason}")
            return
        own.packed_weight.copy_(layer.packed_weight)
        own.packed_scales.copy_(layer.packed_scales)
        if layer.packed_zeros is not None and joined.packed_zeros is None:
            joined.packed_zeros = torch.full_like(joined.packed_scales, SYMMETRIC_ZERO, dtype=torch.uint8)
        zeros = self.layer().packed_zeros
        if zeros is not None:
            zeros.copy_(_zeros(layer))


class FusedMLP(nn.Module):
    """``down_proj(act_fn(gate) * up)``, gate and up being columns of one int4 layer. Made by :func:`fuse`.

    Attributes:
        gate_up_proj: the joined layer.
        gate_proj, up_proj: its columns by their old names, for saving, loading and looking at.
        down_proj, act_fn: as they were.
    """

    def __init__(self, gate: Int4Linear, up: Int4Linear, down: nn.Module, act_fn: nn.Module) -> None:
        super().__init__()
        joined = _Joined((gate, up))
        self.gate_up_proj = joined
        self.gate_proj = _Part(joined, 0, gate)
        self.up_proj = _Part(joined, gate.out_features, up)
        self.down_proj, self.act_fn = down, act_fn
        self._split = (gate.out_features, up.out_features)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PARTS and not isinstance(value, _Part):
            # It would never be called.
            raise ArgumentError(name, f"a {type(value).__name__} for a fused layer", "a model that is not fused yet")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to y of the same shape and dtype."""
        gate, up = self.gate_up_proj(x).split(self._split, dim=-1)
        y: Tensor = self.down_proj(self.act_fn(gate) * up)
        return y
