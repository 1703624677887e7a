# SPDX-License-Identifier: Apache-2.0
"""``quantization_config`` as AutoAWQ, AutoGPTQ, GPTQModel, AutoRound and transformers write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from awqjit.errors import FormatError
from awqjit.formats import compressed_config
from awqjit.formats.config import FormatConfig
from awqjit.formats.keys import CORRECT, flag, integer, mapping, names, optional_integer, text
from awqjit.formats.refusals import REMEDY, refuse
from awqjit.formats.rules import Rule, type_of, type_reason


@dataclass(frozen=True)
class Format:
    """One row of the table of formats that are read.

    Attributes:
        method: ``quant_method`` in the config.
        aliases: what else configs call it.
        version_keys: config keys that name the version, any of which may be missing; they must agree.
        default: the version when none of them is there.
        marks: keys that only this method's config has, for configs of old that name no ``quant_method``.
    """

    method: str
    aliases: tuple[str, ...]
    version_keys: tuple[str, ...]
    default: str
    marks: tuple[str, ...]


FORMATS: tuple[Format, ...] = (
    Format("awq", (), ("version", "checkpoint_format", "format"), "gemm", ("w_bit", "q_group_size")),
    Format("gptq", (), ("checkpoint_format", "format"), "gptq", ("damp_percent", "true_sequential")),
    Format("compressed-tensors", ("compressed_tensors",), ("format",), "pack-quantized", ("config_groups",)),
    Format("auto-round", ("intel/auto-round", "auto_round", "autoround"), ("packing_format",), "", ("packing_format",)),
)
"""The formats that are read."""

AUTO_ROUND: Mapping[str, str] = {
    "auto_gptq": "auto_round:auto_gptq",
    "gptq": "auto_round:auto_gptq",
    "gptqmodel": "auto_round:gptqmodel",
    "auto_round": "auto_round:gptqmodel",
    "exllamav2": "auto_round:gptqmodel",
    "tritonv2": "auto_round:gptqmodel",
    "auto_awq": "auto_round:auto_awq",
    "awq": "auto_round:auto_awq",
}
"""AutoRound's packing format, without the "auto_round:" before it -> the version it is read as. Those that are named
after no other project store zero points as they are; "auto_gptq" stores them minus one, as GPTQ version 1 does."""


def parse(config: Mapping[str, Any]) -> FormatConfig:
    """Read a ``quantization_config`` as transformers and the quantizers write it.

    Hints for GPU kernels (``use_exllama``, ``backend``, ``do_fuse`` and their like) are ignored, as is whether the
    model was quantized in act-order (``desc_act``): each layer's g_idx says it.

    Args:
        config: the dictionary.

    Returns:
        The checked config; names of methods and versions are in lower case.

    Raises:
        FormatError: the checkpoint's form is not read; the message names what it is.
    """
    row = _row(config)
    if row.method == "compressed-tensors":
        return compressed_config.parse(config)
    if row.method == "auto-round":
        return _parse_auto_round(config)
    for key, repack in (("is_marlin_format", "marlin"), ("is_exllama_format", "exllama")):
        if config.get(key):
            raise refuse(f"a checkpoint repacked for {repack} kernels", repack)
    if text(config, "backend") == "llm-awq":
        raise refuse("an AWQ checkpoint of the llm-awq backend", "llm-awq")
    _check_words(config)
    return FormatConfig(
        method=row.method,
        bits=integer(config, "bits", "w_bit"),
        group_size=integer(config, "group_size", "q_group_size"),
        # An AWQ config may also carry a `sym` that its writer inherited from GPTQ: only zero_point speaks for AWQ.
        zero_point=flag(config, "zero_point", True)
        if row.method == "awq"
        else not flag(config, "sym", True, null=True),
        version=_version(config, row),
        modules_to_not_convert=names(config, "modules_to_not_convert"),
        rules=_dynamic(config, row.method),
    )


def unparse(format: FormatConfig) -> dict[str, Any]:
    """The inverse of :func:`parse`."""
    if format.method == "compressed-tensors":
        return compressed_config.unparse(format)
    config: dict[str, Any] = {"quant_method": format.method, "bits": format.bits, "group_size": format.group_size}
    if format.method == "auto-round":
        config |= {"packing_format": format.version, "sym": format.sym, "data_type": "int"}
        extra = [rule for rule in format.rules if rule.kind != "match"]
        config["extra_config"] = {rule.pattern: _settings(rule, format.method) for rule in extra}
    elif format.method == "awq":
        config |= {"version": format.version, "zero_point": format.zero_point}
    else:
        config |= {"checkpoint_format": format.version, "sym": format.sym, "desc_act": False}
    signs = {True: "-:", False: "+:"}
    dynamic = [rule for rule in format.rules if rule.kind == "match"]
    config["dynamic"] = {signs[rule.keeps_float] + rule.pattern: _settings(rule, format.method) for rule in dynamic}
    return config | {"modules_to_not_convert": list(format.modules_to_not_convert) or None}


def _settings(rule: Rule, method: str) -> dict[str, Any]:
    if rule.keeps_float:
        return {"bits": 16}
    zero_point = rule.zero_point
    if zero_point is not None and method != "awq":
        zero_point = not zero_point
    settings = {
        "bits": rule.bits,
        "group_size": rule.group_size,
        "zero_point" if method == "awq" else "sym": zero_point,
        "data_type": None if rule.reason is None else type_of(rule.reason),
    }
    return {key: value for key, value in settings.items() if value is not None}


def _row(config: Mapping[str, Any]) -> Format:
    method = text(config, "quant_method")
    if method is None:
        marked = [row for row in FORMATS if any(key in config for key in row.marks)]
        if len(marked) != 1:
            listed = ", ".join(map(str, config)) or "none"
            raise FormatError(f"quantization_config names no quant_method (its keys: {listed})", REMEDY)
        return marked[0]
    for row in FORMATS:
        if method == row.method or method in row.aliases:
            return row
    raise refuse(f"a checkpoint of quant_method {method!r}", method)


def _version(config: Mapping[str, Any], row: Format) -> str:
    named = {key: text(config, key) for key in row.version_keys if config.get(key) is not None}
    versions = [version for version in named.values() if version is not None]
    if len(set(versions)) > 1:
        listed = ", ".join(f"{key}={value}" for key, value in named.items())
        raise FormatError(f"quantization_config contradicts itself: {listed}", CORRECT)
    return versions[0] if versions else row.default


def _check_words(config: Mapping[str, Any]) -> None:
    """GPTQModel can also pack into words of another size."""
    words = text(config, "pack_dtype")
    if words is not None and words.rpartition(".")[2] != "int32":
        raise refuse(f"a checkpoint packed into words of {words} (only int32 is)")


def _dynamic(config: Mapping[str, Any], method: str) -> tuple[Rule, ...]:
    """GPTQModel's exceptions: regular expressions of module names; with "-:" before them, those left as float."""
    rules = []
    for key, settings in mapping(config, "dynamic").items():
        pattern = key[2:] if key.startswith(("-:", "+:")) else key
        if key.startswith("-:"):
            rules.append(Rule("match", pattern, keeps_float=True))
            continue
        if not isinstance(settings, Mapping):
            raise FormatError(f"quantization_config says dynamic[{key!r}]={settings!r}, wanted an object", CORRECT)
        rules.append(_rule("match", pattern, settings, "zero_point" if method == "awq" else "sym"))
    return tuple(rules)


def _rule(kind: str, pattern: str, settings: Mapping[str, Any], zero_key: str) -> Rule:
    bits = optional_integer(settings, "bits")
    if bits is not None and bits >= 16:
        return Rule(kind, pattern, keeps_float=True)
    zero_point = None if settings.get(zero_key) is None else flag(settings, zero_key, False)
    if zero_point is not None and zero_key == "sym":
        zero_point = not zero_point
    data_type = text(settings, "data_type")
    return Rule(
        kind,
        pattern,
        bits=bits,
        group_size=optional_integer(settings, "group_size"),
        zero_point=zero_point,
        reason=None if data_type in (None, "int") else type_reason(str(data_type)),
    )


def _parse_auto_round(config: Mapping[str, Any]) -> FormatConfig:
    named = text(config, "packing_format") or text(config, "backend") or "auto"
    version = AUTO_ROUND.get("auto_gptq" if named == "auto" else named.removeprefix("auto_round:"))
    if version is None and named.startswith("gptq:"):  # the first releases named the AutoGPTQ kernel they packed for
        version = AUTO_ROUND["gptq"]
    if version is None:
        raise refuse(f"an AutoRound checkpoint of packing_format {named!r}", named)
    data_type = text(config, "data_type")
    if data_type not in (None, "int"):
        raise refuse(f"an AutoRound checkpoint with weights of type {data_type}", "fp8")
    act_bits = optional_integer(config, "act_bits")
    if act_bits is not None and act_bits < 16:
        raise refuse(f"an AutoRound checkpoint with activations of {act_bits} bits")
    for key in ("super_bits", "super_group_size", "rotation_config"):
        if config.get(key):
            raise refuse(f"an AutoRound checkpoint with {key}")
    return FormatConfig(
        method="auto-round",
        bits=integer(config, "bits"),
        group_size=integer(config, "group_size"),
        zero_point=not flag(config, "sym", True, null=True),
        version=version,
        modules_to_not_convert=names(config, "modules_to_not_convert"),
        rules=(*_extra(config, "name"), *_dynamic(config, "auto-round"), *_extra(config, "search")),
    )


def _extra(config: Mapping[str, Any], kind: str) -> list[Rule]:
    """AutoRound's exceptions: full names of layers, and regular expressions, for layers that are not named in full."""
    found = []
    for name, settings in mapping(config, "extra_config").items():
        if not isinstance(settings, Mapping):
            raise FormatError(
                f"quantization_config says extra_config[{name!r}]={settings!r}, wanted an object", CORRECT
            )
        if kind == ("search" if set(name) & set("*+?^$|()[]{}\\") else "name"):
            found.append(_rule(kind, name, settings, "sym"))
    return found
