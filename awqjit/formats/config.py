# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's ``quantization_config`` says about a whole model, checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from awqjit.errors import FormatError
from awqjit.formats.layer import LayerFormat
from awqjit.formats.refusals import REMEDY
from awqjit.formats.rules import Rule


@dataclass(frozen=True)
class FormatConfig(LayerFormat):
    """What a checkpoint's ``quantization_config`` says, checked.

    The settings that it has from :class:`LayerFormat` are those of every layer that no rule speaks of.

    Attributes:
        modules_to_not_convert: names of modules that were left as float; see :meth:`skips`.
        rules: exceptions for some layers; the first that matches a layer's name holds.
    """

    modules_to_not_convert: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != 4:
            raise FormatError(f"{self.method} with {self.bits} bits is not read, only 4 bits", REMEDY)

    def layer(self, name: str) -> LayerFormat:
        """How the layer of that full name is stored: these settings, changed by the config's rule for it.

        A layer that the config lists as float has the model's settings: if it is quantized all the same, they are the
        best guess.
        """
        rule = self._rule(name)
        if rule is None or rule.keeps_float:
            return self.one()
        changes = {key: getattr(rule, key) for key in ("bits", "group_size", "zero_point", "reason")}
        return dataclasses.replace(self.one(), **{key: value for key, value in changes.items() if value is not None})

    def skips(self, name: str) -> bool:
        """Whether the config lists a module, or one that contains it, as left unquantized.

        An entry of modules_to_not_convert matches whole parts of the dotted name, wherever they stand:
        ``model.layers.0`` (a prefix; a trailing dot or ``.weight`` is allowed), ``self_attn`` (in the middle) or
        ``down_proj`` (a suffix). ``mlp.gate`` does not match ``mlp.gate_proj``, nor ``layers.1`` ``layers.11``. Which
        tensors a checkpoint holds decides over this.

        Args:
            name: the module's full name, such as ``model.layers.0.mlp.down_proj``.
        """
        if any(Rule("parts", entry).matches(name) for entry in self.modules_to_not_convert):
            return True
        rule = self._rule(name)
        return rule is not None and rule.keeps_float

    def _rule(self, name: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization_config`` that :func:`awqjit.formats.parse` reads back as this."""
        from awqjit.formats.producers import unparse  # which makes this class

        return unparse(self)
