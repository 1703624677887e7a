# SPDX-License-Identifier: Apache-2.0
"""What this computer can run: its CPU's usable features and the compiler found, as plain data."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from awqjit import config
from awqjit.errors import ConfigError

ISA_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("portable", frozenset()),
    ("avx2", frozenset({"avx", "avx2", "fma", "f16c"})),
    ("avx_vnni", frozenset({"avx_vnni"})),
    ("avx512", frozenset({"avx512f", "avx512vl", "avx512dq", "avx512bw"})),
    ("avx512_vnni", frozenset({"avx512_vnni"})),
    ("avx512_bf16", frozenset({"avx512_bf16"})),
    ("amx", frozenset({"amx_tile", "amx_int8", "amx_bf16"})),
)
"""Levels that ``AWQJIT_MAX_ISA`` can name, narrowest first, each with the features it adds to those before it."""

_KNOWN = frozenset().union(*(features for _, features in ISA_LEVELS))


@dataclass(frozen=True)
class Machine:
    """One computer, as selection sees it.

    Attributes:
        architecture: ``platform.machine()``, for example "x86_64".
        system: ``platform.system()``, for example "Linux".
        cpu: the CPU's marketing name.
        features: usable features among those of :data:`ISA_LEVELS`, in the spelling of ``/proc/cpuinfo``.
        max_isa: the level ``AWQJIT_MAX_ISA`` caps the features at, or None.
        no_compiler: why no kernel can be compiled here; None when one can (or may come from a cache).
    """

    architecture: str
    system: str
    cpu: str
    features: frozenset[str]
    max_isa: str | None = None
    no_compiler: str | None = None

    def missing(self, features: frozenset[str]) -> str | None:
        """Why code that needs ``features`` cannot run here, or None when it can."""
        absent = sorted(features - self.features)
        if not absent:
            return None
        cap = f" (AWQJIT_MAX_ISA={self.max_isa})" if self.max_isa else ""
        return f"this CPU has no {', '.join(absent)}{cap}"


@lru_cache(maxsize=1)
def _cpuinfo() -> tuple[str, frozenset[str]]:
    """CPU name and features from the kernel, whose list leaves out what the operating system has not switched on."""
    name, flags = platform.processor() or "unknown CPU", frozenset[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return name, flags  # not Linux: only rows that need no feature
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = frozenset(value.split())
            break
    return name, flags


def detect(no_compiler: str | None = None) -> Machine:
    """This computer now, with ``AWQJIT_MAX_ISA`` applied.

    Raises:
        ConfigError: ``AWQJIT_MAX_ISA`` names no level.
    """
    name, flags = _cpuinfo()
    usable = flags & _KNOWN
    cap = config.MAX_ISA.read()
    if cap is not None:
        levels = [level for level, _ in ISA_LEVELS]
        if cap not in levels:
            raise ConfigError(config.MAX_ISA.name, cap, f"one of {', '.join(levels)}")
        allowed = frozenset().union(*(features for _, features in ISA_LEVELS[: levels.index(cap) + 1]))
        usable &= allowed
    return Machine(platform.machine(), platform.system(), name, usable, cap, no_compiler)
