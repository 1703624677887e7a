# SPDX-License-Identifier: Apache-2.0
"""``quantization_config`` as compressed-tensors (llm-compressor) writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awqjit.errors import FormatError
from awqjit.formats.config import FormatConfig
from awqjit.formats.keys import CORRECT, flag, mapping, names, optional_integer, text
from awqjit.formats.refusals import refuse
from awqjit.formats.rules import Rule, type_of, type_reason

METHOD, VERSION = "compressed-tensors", "pack-quantized"

_KINDS = ("name", "match", "all")
"""How specific a target is: a module's name comes before an expression, that before a class of modules."""


def parse(config: Mapping[str, Any]) -> FormatConfig:
    """Read a config with ``config_groups``, which say how layers are quantized, and an ``ignore`` list of those that
    are not. Groups that are not int4 are read as exceptions: :attr:`LayerFormat.refused` says what they are.

    Raises:
        FormatError: the form is not read, or no group is int4.
    """
    for key in ("transform_config", "kv_cache_scheme"):
        if mapping(config, key):
            raise refuse(f"a compressed-tensors checkpoint with a {key}")
    sparsity = text(mapping(config, "sparsity_config"), "format")
    if sparsity not in (None, "dense"):
        raise refuse(f"a compressed-tensors checkpoint of sparsity format {sparsity!r}", sparsity)
    status = text(config, "quantization_status")
    if status not in (None, "compressed"):
        raise FormatError(
            f"the compressed-tensors checkpoint has quantization_status {status!r}: its weights are not packed",
            "Save it compressed.",
        )
    version = text(config, "format")
    if version not in (None, VERSION, "mixed-precision"):
        raise refuse(f"a compressed-tensors checkpoint of format {version!r}", version)
    rules = [_ignored(entry) for entry in names(config, "ignore")]
    grouped: list[Rule] = []
    for name, group in mapping(config, "config_groups").items():
        if not isinstance(group, Mapping):
            raise FormatError(f"quantization_config says {name}={group!r}, wanted an object", CORRECT)
        grouped += _group(name, group)
    read = [rule for rule in grouped if rule.reason is None and rule.bits == 4]
    if not read:
        reasons = "; ".join(dict.fromkeys(rule.reason or f"{rule.bits} bits" for rule in grouped)) or "no config_groups"
        raise refuse(f"a compressed-tensors checkpoint without an int4 group ({reasons})", VERSION)
    default = min(read, key=lambda rule: -_KINDS.index(rule.kind))
    rules += sorted(grouped, key=lambda rule: _KINDS.index(rule.kind))
    if not any(rule.kind == "all" for rule in rules):
        rules.append(Rule("all", "", keeps_float=True))
    assert default.group_size is not None and default.zero_point is not None
    return FormatConfig(METHOD, 4, default.group_size, default.zero_point, VERSION, rules=tuple(rules))


def _ignored(entry: str) -> Rule:
    if entry.startswith("re:"):
        return Rule("match", entry[3:], keeps_float=True)
    return Rule("name", entry, keeps_float=True)


def _group(name: str, group: Mapping[str, Any]) -> list[Rule]:
    """A group's rule for each of its targets."""
    weights = mapping(group, "weights")
    bits, group_size = optional_integer(weights, "num_bits"), optional_integer(weights, "group_size")
    zero_point = not flag(weights, "symmetric", True)
    reason = _refusal(group, weights)
    if reason is None and bits is None:
        raise FormatError(f"quantization_config has no num_bits in {name}", "Add it to the config.")
    if text(weights, "strategy") == "channel" or group_size is None:
        group_size = -1
    rules = []
    for target in names(group, "targets"):
        kind, pattern = ("match", target[3:]) if target.startswith("re:") else ("name", target)
        if target == "Linear":
            kind, pattern = "all", ""
        rules.append(Rule(kind, pattern, bits=bits, group_size=group_size, zero_point=zero_point, reason=reason))
    return rules


def _refusal(group: Mapping[str, Any], weights: Mapping[str, Any]) -> str | None:
    """Why layers of a group are not read; bits aside."""
    if not weights:
        return "its weights are not quantized"
    if text(weights, "type") not in (None, "int"):
        return type_reason(str(text(weights, "type")))
    version = text(group, "format")
    if version not in (None, VERSION):
        return f"it is of format {version}"
    activations = mapping(group, "input_activations") or mapping(group, "output_activations")
    if activations:
        return f"its activations are quantized to {activations.get('num_bits')} bits"
    strategy = text(weights, "strategy")
    if strategy not in (None, "group", "channel"):
        return f"its scales are of strategy {strategy}"
    if strategy is None and weights.get("group_size") is None:
        return "it has one scale for the whole layer"
    return None


def unparse(format: FormatConfig) -> dict[str, Any]:
    """The inverse of :func:`parse`, but that another reason why a group is not read becomes a type of weights."""
    ignore: list[str] = []
    groups: dict[str, dict[str, Any]] = {}
    for rule in format.rules or (Rule("all", "", bits=4, group_size=format.group_size, zero_point=format.zero_point),):
        target = {"all": "Linear", "match": f"re:{rule.pattern}"}.get(rule.kind, rule.pattern)
        if rule.keeps_float:
            ignore += [] if rule.kind == "all" else [target]
            continue
        channel = rule.group_size == -1
        groups[f"group_{len(groups)}"] = {
            "targets": [target],
            "weights": {
                "num_bits": rule.bits,
                "type": type_of(rule.reason),
                "symmetric": not rule.zero_point,
                "strategy": "channel" if channel else "group",
                "group_size": None if channel else rule.group_size,
            },
        }
    return {
        "quant_method": METHOD,
        "format": VERSION,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }
