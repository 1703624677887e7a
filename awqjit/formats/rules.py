# SPDX-License-Identifier: Apache-2.0
"""Exceptions that a config makes for some of a model's layers, told by their names."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from awqjit.errors import FormatError


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    compiled = re.compile(pattern)
    _check_time(pattern)
    return compiled


_MANY = 10  # repetitions from which on they count as open
_LOOPS = 4


def _loops(parsed: Any) -> int:
    """Repetitions of a parsed regular expression that may run more than a few times, one after the other.

    Raises:
        ValueError: one holds another, or alternatives: trying all ways to divide a name among them can take for ever.
    """
    found = 0
    for operation, argument in parsed:
        kind = str(operation)
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, body = argument
            inner = _loops(body)
            if int(most) < _MANY:
                found += inner * int(most)
            elif inner or _branches(body):
                raise ValueError("it repeats what is itself repeated or a choice, which can take for ever to match")
            else:
                found += 1
        else:
            found += sum(_loops(part) for part in _subpatterns(argument))
    return found


def _branches(parsed: Any) -> bool:
    return any(
        str(operation) == "BRANCH" or any(_branches(part) for part in _subpatterns(argument))
        for operation, argument in parsed
    )


def _subpatterns(argument: Any) -> list[Any]:
    """The parsed expressions that an operation's argument holds."""
    if hasattr(argument, "getwidth"):
        return [argument]
    if isinstance(argument, (tuple, list)):
        return [part for entry in argument for part in _subpatterns(entry)]
    return []


def _check_time(pattern: str) -> None:
    """Refuse a regular expression whose time to match a layer's name has no sensible bound.

    A config is somebody else's, and Python's matcher tries every way to divide a name among repetitions.

    Raises:
        ValueError: it is such.
    """
    parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    if _loops(parser.parse(pattern)) > _LOOPS:
        raise ValueError(f"it has more than {_LOOPS} open repetitions, which can take for ever to match")


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
            except ValueError as error:
                raise FormatError(
                    f"quantization_config names layers by {self.pattern!r}, which is not used: {error}",
                    "Correct the config.",
                ) from None
        if self.group_size is not None and self.group_size != -1 and self.group_size < 1:
            raise FormatError(
                f"group_size {self.group_size} of {self.pattern!r} is neither -1 nor at least 1", "Correct the config."
            )

    def matches(self, name: str) -> bool:
        """Whether the rule speaks of the layer of this full name."""
        return KINDS[self.kind](self.pattern, name)
