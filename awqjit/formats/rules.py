# SPDX-License-Identifier: Apache-2.0
"""Exceptions that a config makes for some of a model's layers, told by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from awqjit.errors import FormatError


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _parts(pattern: str, name: str) -> bool:
    return f".{pattern.removesuffix('.weight').strip('.')}." in f".{name}."


KINDS: Mapping[str, Callable[[str, str], bool]] = {
    "all": lambda pattern, name: True,
    "none": lambda pattern, name: False,
    "name": lambda pattern, name: pattern == name,
    "parts": _parts,
    "match": lambda pattern, name: _compiled(pattern).match(name) is not None,
    "search": lambda pattern, name: _compiled(pattern).search(name) is not None,
}
"""How a rule's pattern is compared with a layer's name: any name, no name, equal to it, whole parts of it between dots,
a regular expression that matches from its start, one that matches anywhere."""


_TYPE = "its weights are of type "


def type_reason(data_type: str) -> str:
    """Why layers with weights of another type than int are not read."""
    return _TYPE + data_type


def type_of(reason: str | None) -> str:
    """A type of weights that is not read for this reason; "int" for None. The inverse of :func:`type_reason`."""
    return "int" if reason is None else reason.removeprefix(_TYPE)


@dataclass(frozen=True)
class Rule:
    """One exception. The first rule that matches a layer's name holds for it.

    Attributes:
        kind: one of :data:`KINDS`.
        pattern: what is compared with the name.
        keeps_float: the layers are not quantized; nothing else is then said about them.
        bits: of the layers it matches; None for the model's own, as below.
        group_size: rows that share a scale.
        zero_point: zero points other than 8 occur.
        reason: why such layers are not read; None if they are.

    Raises:
        FormatError: the pattern is not a regular expression, where it has to be one.
    """

    kind: str
    pattern: str
    keeps_float: bool = False
    bits: int | None = None
    group_size: int | None = None
    zero_point: bool | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.kind in ("match", "search"):
            try:
                _compiled(self.pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise FormatError(
                    f"quantization_config names layers by {self.pattern!r}, which is no regular expression ({error})",
                    "Correct the config.",
                ) from None
        if self.group_size is not None and self.group_size != -1 and self.group_size < 1:
            raise FormatError(
                f"group_size {self.group_size} of {self.pattern!r} is neither -1 nor at least 1", "Correct the config."
            )

    def matches(self, name: str) -> bool:
        """Whether the rule speaks of the layer of this full name."""
        return KINDS[self.kind](self.pattern, name)
