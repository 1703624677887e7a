# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats: which one a model's ``quantization_config`` names, and readers for each.

:func:`parse` reads the config; :mod:`awqjit.formats.awq` and :mod:`awqjit.formats.gptq` convert one layer's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from awqjit.errors import FormatError

_REMEDY = (
    "Use an AWQ (version gemm) or GPTQ (4 bits, desc_act=false) checkpoint of the model, or quantize its float one."
)


@dataclass(frozen=True)
class Format:
    """One row of the table of formats.

    Attributes:
        method: ``quant_method`` in the config.
        version_keys: config keys that name the version, any of which may be missing; they must agree.
        default: the version when none of them is there.
        versions: versions that are read.
        marks: keys that only this method's config has, for configs of old that name no ``quant_method``.
    """

    method: str
    version_keys: tuple[str, ...]
    default: str
    versions: tuple[str, ...]
    marks: tuple[str, ...]


FORMATS: tuple[Format, ...] = (
    Format("awq", ("version", "checkpoint_format", "format"), "gemm", ("gemm",), ("w_bit", "q_group_size")),
    Format("gptq", ("checkpoint_format", "format"), "gptq", ("gptq", "gptq_v2"), ("damp_percent", "true_sequential")),
)
"""The formats that are read."""


@dataclass(frozen=True)
class FormatConfig:
    """What a checkpoint's ``quantization_config`` says, checked.

    Attributes:
        method: "awq" or "gptq".
        bits: 4.
        group_size: rows that share a scale; -1 for all of a layer's.
        zero_point: zero points other than 8 occur (not ``sym``).
        version: "gemm" (AWQ), "gptq" or "gptq_v2".
        modules_to_not_convert: names of modules that were left as float; see :meth:`skips`.
    """

    method: str
    bits: int
    group_size: int
    zero_point: bool
    version: str
    modules_to_not_convert: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.version not in _row(self.method).versions:
            raise FormatError(f"{self.method} checkpoints of version {self.version!r} are not read", _REMEDY)
        if self.bits != 4:
            raise FormatError(f"{self.method} with {self.bits} bits is not read, only 4 bits", _REMEDY)
        if self.group_size != -1 and self.group_size < 1:
            raise FormatError(f"group_size {self.group_size} is neither -1 nor at least 1", "Correct the config.")

    @property
    def sym(self) -> bool:
        """Labelled symmetric: every zero point is 8."""
        return not self.zero_point

    @property
    def checkpoint_format(self) -> str:
        """The name that GPTQ configs give :attr:`version`."""
        return self.version

    @property
    def v2(self) -> bool:
        """GPTQ zero points are labelled as stored as they are, not minus one."""
        return self.version == "gptq_v2"

    def skips(self, name: str) -> bool:
        """Whether the config lists a module, or one that contains it, as left unquantized.

        An entry matches whole parts of the dotted name, wherever they stand: ``model.layers.0`` (a prefix; a trailing
        dot or ``.weight`` is allowed), ``self_attn`` (in the middle) or ``down_proj`` (a suffix). ``mlp.gate`` does not
        match ``mlp.gate_proj``, nor ``layers.1`` ``layers.11``. Which tensors a checkpoint holds decides over this.

        Args:
            name: the module's full name, such as ``model.layers.0.mlp.down_proj``.
        """
        dotted = f".{name}."
        return any(f".{entry.removesuffix('.weight').strip('.')}." in dotted for entry in self.modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization_config`` that :func:`parse` reads back as this."""
        config: dict[str, Any] = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            config |= {"version": self.version, "zero_point": self.zero_point}
        else:
            config |= {"checkpoint_format": self.version, "sym": self.sym, "desc_act": False}
        return config | {"modules_to_not_convert": list(self.modules_to_not_convert) or None}


def parse(config: Mapping[str, Any]) -> FormatConfig:
    """Read a ``quantization_config`` as transformers, AutoAWQ, AutoGPTQ and GPTQModel write it.

    Hints for GPU kernels (``use_exllama``, ``backend``, ``do_fuse`` and their like) are ignored.

    Args:
        config: the dictionary.

    Returns:
        The checked config; versions are in lower case.

    Raises:
        FormatError: the checkpoint's form is not read; the message names what it is.
    """
    row = _row(_method(config))
    if config.get("desc_act"):
        raise FormatError("act-order checkpoints (desc_act=true) are not read", _REMEDY)
    for flag, repack in (("is_marlin_format", "marlin"), ("is_exllama_format", "exllama")):
        if config.get(flag):
            raise FormatError(f"checkpoints repacked for {repack} kernels are not read", _REMEDY)
    if str(config.get("backend", "")).lower() == "llm-awq":
        raise FormatError("AWQ checkpoints of the llm-awq backend are not read", _REMEDY)
    overrides = [rule for rule in config.get("dynamic") or {} if not rule.startswith("-:")]
    if overrides:
        raise FormatError(f"per-module settings (dynamic: {', '.join(overrides)}) are not read", _REMEDY)
    return FormatConfig(
        method=row.method,
        bits=_integer(config, "bits", "w_bit"),
        group_size=_integer(config, "group_size", "q_group_size"),
        # An AWQ config may also carry a `sym` that its writer inherited from GPTQ: only zero_point speaks for AWQ.
        zero_point=_flag(config, "zero_point", True) if row.method == "awq" else not _flag(config, "sym", True),
        version=_version(config, row),
        modules_to_not_convert=tuple(config.get("modules_to_not_convert") or ()),
    )


def _row(method: str) -> Format:
    for row in FORMATS:
        if row.method == method:
            return row
    raise FormatError(f"checkpoints of quant_method {method!r} are not read", _REMEDY)


def _method(config: Mapping[str, Any]) -> str:
    named = config.get("quant_method")
    if named is not None:
        return str(getattr(named, "value", named)).lower()  # transformers keeps an enum
    marked = [row.method for row in FORMATS if any(key in config for key in row.marks)]
    if len(marked) != 1:
        raise FormatError(
            f"quantization_config names no quant_method (its keys: {', '.join(config) or 'none'})", _REMEDY
        )
    return marked[0]


def _version(config: Mapping[str, Any], row: Format) -> str:
    named = {key: config[key] for key in row.version_keys if config.get(key) is not None}
    versions = {str(getattr(value, "value", value)).lower() for value in named.values()}
    if len(versions) > 1:
        listed = ", ".join(f"{key}={value}" for key, value in named.items())
        raise FormatError(f"quantization_config contradicts itself: {listed}", "Correct the config.")
    return versions.pop() if versions else row.default


def _integer(config: Mapping[str, Any], *keys: str) -> int:
    found = {key: config[key] for key in keys if config.get(key) is not None}
    values = list(found.values())
    if not values:
        raise FormatError(f"quantization_config has no {keys[0]}", "Add it to the config.")
    if any(type(value) is not int or value != values[0] for value in values):
        listed = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise FormatError(f"quantization_config says {listed}, wanted one integer", "Correct the config.")
    return values[0]


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise FormatError(f"quantization_config says {key}={value!r}, wanted true or false", "Correct the config.")
    return value
