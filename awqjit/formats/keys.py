# SPDX-License-Identifier: Apache-2.0
"""Values of a ``quantization_config``, each with its type checked and under any of the names producers give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from awqjit.errors import FormatError

CORRECT = "Correct the config."


def integer(config: Mapping[str, Any], *keys: str) -> int:
    """The integer that one or more of ``keys`` hold.

    Raises:
        FormatError: none of them is there, they differ, or one is not an integer.
    """
    found = optional_integer(config, *keys)
    if found is None:
        raise FormatError(f"quantization_config has no {keys[0]}", "Add it to the config.")
    return found


def optional_integer(config: Mapping[str, Any], *keys: str) -> int | None:
    """Like :func:`integer`, but None if none of ``keys`` is there."""
    found = {key: config[key] for key in keys if config.get(key) is not None}
    values = list(found.values())
    if any(type(value) is not int or value != values[0] for value in values):
        listed = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise FormatError(f"quantization_config says {listed}, wanted one integer", CORRECT)
    return values[0] if values else None


def flag(config: Mapping[str, Any], key: str, default: bool, *, null: bool = False) -> bool:
    """The value of a key that is true or false; with ``null``, null is as good as no key."""
    value = config.get(key, default)
    if null and value is None:
        return default
    if not isinstance(value, bool):
        raise FormatError(f"quantization_config says {key}={value!r}, wanted true or false", CORRECT)
    return value


def text(config: Mapping[str, Any], key: str) -> str | None:
    """A name, in lower case; None if the key is not there. Enums count as their values."""
    value = config.get(key)
    return None if value is None else str(getattr(value, "value", value)).strip().lower()


def names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of strings; empty if the key is not there."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise FormatError(f"quantization_config says {key}={value!r}, wanted a list of names", CORRECT)
    return tuple(value)


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty if the key is not there, or false (as some configs say "none")."""
    value = config.get(key)
    if value is None or value is False:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise FormatError(f"quantization_config says {key}={value!r}, wanted an object", CORRECT)
    return value
