# SPDX-License-Identifier: Apache-2.0
"""What quantizing a model will do: its group size, the layers that become int4, and those that stay float and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from awqjit.errors import ArgumentError
from awqjit.formats import Rule

GROUP_SIZES = (32, 64, 128, -1)
"""Group sizes that readers of AWQ and GPTQ folders agree on."""

SMALLEST_GROUP = 16

AUTOMATIC_SIZES = (128, 64, 32, SMALLEST_GROUP)
"""Group sizes that the automatic choice tries, in this order."""


@dataclass(frozen=True)
class Plan:
    """What quantizing a model will do.

    Attributes:
        group_size: weights along K that share a scale; -1 for all.
        automatic: the group size was chosen here.
        quantized: linear layers that become int4.
        kept: linear layer -> why it stays float; the head is among them.
        head: the head's name; None if the model has none.
    """

    group_size: int
    automatic: bool
    quantized: tuple[str, ...]
    kept: dict[str, str]
    head: str | None

    @property
    def layers(self) -> int:
        """How many linear layers there are, the head left out."""
        return len(self.quantized) + len(self.kept.keys() - {self.head})


def make_plan(model: Any, group_size: int | None, format: str, skip: Sequence[str]) -> Plan:
    """Sort a model's linear layers.

    Args:
        model: a transformers model; no weight is looked at.
        group_size: None for the largest of :data:`AUTOMATIC_SIZES` that divides the in_features of every layer that
            any of them divides.
        format: "awq" or "gptq".
        skip: see :func:`awqjit.integrations.quantize_folder.quantize_folder`.

    Raises:
        ArgumentError: an entry of ``skip`` names no layer, or no layer can be quantized.
    """
    head = model.get_output_embeddings()
    head_name: str | None = None
    candidates: dict[str, nn.Linear] = {}
    reasons: dict[str, str | None] = {}  # in the model's order; None for a candidate
    rules = {entry: Rule("parts", entry) for entry in skip}
    unused = set(rules)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        skipped = {entry for entry, rule in rules.items() if rule.matches(name)}
        unused -= skipped
        if module is head:
            head_name, reasons[name] = name, "the head is never quantized"
        elif skipped:
            reasons[name] = f"skipped: {', '.join(sorted(skipped))}"
        elif module.in_features % 8 and format == "gptq":
            reasons[name] = f"in_features {module.in_features} is not a multiple of 8"
        elif module.out_features % 8:
            reasons[name] = f"out_features {module.out_features} is not a multiple of 8"
        else:
            candidates[name], reasons[name] = module, None
    if unused:
        raise ArgumentError("skip", ", ".join(sorted(unused)), "names of linear layers, or parts of them between dots")
    size = _automatic_size(candidates) if group_size is None else group_size
    for name, module in candidates.items():
        reasons[name] = _misfit(module.in_features, size, automatic=group_size is None)
    kept = {name: reason for name, reason in reasons.items() if reason is not None}
    quantized = tuple(name for name, reason in reasons.items() if reason is None)
    if not quantized:
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:5])
        got = "the automatic one" if group_size is None else group_size
        raise ArgumentError("group_size", got, f"one that suits a layer at least ({shown})")
    return Plan(size, group_size is None, quantized, kept, head_name)


def _automatic_size(layers: dict[str, nn.Linear]) -> int:
    """The largest size that divides every layer's in_features, layers that no size divides aside."""
    features = [layer.in_features for layer in layers.values() if layer.in_features % SMALLEST_GROUP == 0]
    return next(size for size in AUTOMATIC_SIZES if all(count % size == 0 for count in features))


def _misfit(in_features: int, group_size: int, automatic: bool) -> str | None:
    """Why a layer cannot have a group size; None if it can."""
    if group_size == -1 or in_features % group_size == 0:
        return None
    if automatic:
        return f"in_features {in_features} is not a multiple of {SMALLEST_GROUP}"
    fits = ", ".join(str(size) for size in reversed(AUTOMATIC_SIZES) if in_features % size == 0)
    hint = f"; --group-size {fits} would do" if fits else ""
    return f"in_features {in_features} is not a multiple of group size {group_size}{hint}"
