# SPDX-License-Identifier: Apache-2.0
"""The ``AWQJIT_*`` environment variables: one typed table, read on use, never at import."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awqjit.errors import ConfigError


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of at least 1")
    return int(text)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("a path without ~: there is no home directory to put in its place") from None


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(_path(part) for part in text.split(os.pathsep) if part)


@dataclass(frozen=True)
class Variable:
    """One environment variable: how its text is parsed, its value when unset, and what it is for."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str

    def read(self, environ: Mapping[str, str] | None = None) -> Any:
        """The parsed value, or the default when the variable is unset or empty.

        Raises:
            ConfigError: the text cannot be parsed.
        """
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(self.name, text, str(error)) from None


KERNEL = Variable("AWQJIT_KERNEL", str, None, "force one row of the selection table; fails if the row refuses")
MAX_ISA = Variable("AWQJIT_MAX_ISA", str, None, "hide CPU features above this level (see awqjit info)")
JIT = Variable("AWQJIT_JIT", _flag, True, "0 forbids compiling: only cached kernels run")
CXX = Variable("AWQJIT_CXX", str, None, "the C++ compiler to use (a name, a path, or a command with arguments)")
JOBS = Variable("AWQJIT_JOBS", _count, None, "compilers run at once (default: as many as cores and memory allow)")
CACHE_DIR = Variable("AWQJIT_CACHE_DIR", _path, None, "the writable kernel cache")
CACHE_PATH = Variable("AWQJIT_CACHE_PATH", _paths, (), "read-only kernel caches, searched first (like PATH)")
DISPATCHER = Variable("AWQJIT_DISPATCHER", _flag, True, "0 leaves the operator in Python (see awqjit info)")
COMPILE_TIMEOUT = Variable("AWQJIT_COMPILE_TIMEOUT", _count, 120, "seconds one compiler run may take")

VARIABLES: tuple[Variable, ...] = (KERNEL, MAX_ISA, JIT, CXX, JOBS, CACHE_DIR, CACHE_PATH, DISPATCHER, COMPILE_TIMEOUT)


@contextmanager
def override(**values: str | None) -> Iterator[None]:
    """Set variables for a block, by their names in lower case without the prefix: ``override(kernel="portable")``.

    None unsets a variable. The environment belongs to the whole process: use it in tests and scripts, not in
    one thread among many. Kernels already chosen for a problem are kept; see :func:`awqjit.jit.forget`.
    """
    names = {variable.name for variable in VARIABLES}
    before: dict[str, str | None] = {}
    try:
        for short, value in values.items():
            name = f"AWQJIT_{short.upper()}"
            if name not in names:
                raise ConfigError(name, str(value), f"one of {', '.join(sorted(names))}")
            before[name] = os.environ.get(name)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old
