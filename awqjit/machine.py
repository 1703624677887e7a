# SPDX-License-Identifier: Apache-2.0
"""What this computer can run: its CPU's usable features and the compiler found, as plain data."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from awqjit import config, cpuid
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
class Level:
    """One of :data:`ISA_LEVELS` on a machine: whether all features it adds can be used, and if not, why."""

    name: str
    on: bool
    reason: str


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
        source: where the features were read, and why not in a better place.
        absent: why a feature that is not in ``features`` cannot be used, as far as known.
    """

    architecture: str
    system: str
    cpu: str
    features: frozenset[str]
    max_isa: str | None = None
    no_compiler: str | None = None
    source: str = ""
    absent: Mapping[str, str] = field(default_factory=dict, compare=False)

    def missing(self, features: frozenset[str]) -> str | None:
        """Why code that needs ``features`` cannot run here, or None when it can."""
        absent = sorted(features - self.features)
        if not absent:
            return None
        cap = f" (AWQJIT_MAX_ISA={self.max_isa})" if self.max_isa else ""
        reasons = dict.fromkeys(self.absent.get(name, cpuid.NOT_THERE) for name in absent)
        reasons.pop(cpuid.NOT_THERE, None)  # needs no explanation; that something else forbids a feature does
        why = f": {'; '.join(reasons)}" if reasons and not cap else ""
        return f"this CPU has no {', '.join(absent)}{cap}{why}"

    def levels(self) -> tuple[Level, ...]:
        """Every level of :data:`ISA_LEVELS` with its state here, narrowest first."""
        levels = []
        for name, features in ISA_LEVELS:
            reasons: dict[str, list[str]] = {}
            for feature in sorted(features - self.features):
                reasons.setdefault(self.absent.get(feature, cpuid.NOT_THERE), []).append(feature)
            reason = "; ".join(f"{', '.join(absent)}: {why}" for why, absent in reasons.items())
            levels.append(Level(name, not reason, reason))
        return tuple(levels)


@lru_cache(maxsize=1)
def _cpuinfo() -> tuple[str, frozenset[str]]:
    """CPU name and features from the Linux kernel, whose list leaves out what it has not switched on."""
    # Not platform.processor(), which starts a program.
    name, flags = platform.machine() or "unknown CPU", frozenset[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return name, flags  # not Linux
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = frozenset(value.split())
            break
    return name, flags


@lru_cache(maxsize=1)
def _features() -> tuple[dict[str, str], str]:
    """Each known feature -> why it cannot be used, "" for one that can; and where that was read."""
    try:
        reasons = cpuid.explain_features(*cpuid.read_registers())
        return {name: reasons[name] for name in _KNOWN}, "CPUID and XCR0"
    except cpuid.UnreadableError as error:
        _, flags = _cpuinfo()
        source = f"/proc/cpuinfo ({error})"
        return {name: "" if name in flags else f"/proc/cpuinfo does not list it ({error})" for name in _KNOWN}, source


def detect(no_compiler: str | None = None) -> Machine:
    """This computer now, with ``AWQJIT_MAX_ISA`` applied.

    Raises:
        ConfigError: ``AWQJIT_MAX_ISA`` names no level.
    """
    reasons, source = _features()
    cap = config.MAX_ISA.read()
    if cap is not None:
        levels = [level for level, _ in ISA_LEVELS]
        if cap not in levels:
            raise ConfigError(config.MAX_ISA.name, cap, f"one of {', '.join(levels)}")
        allowed = frozenset().union(*(features for _, features in ISA_LEVELS[: levels.index(cap) + 1]))
        hidden = f"hidden by AWQJIT_MAX_ISA={cap}"
        reasons = {name: reason or ("" if name in allowed else hidden) for name, reason in reasons.items()}
    usable = frozenset(name for name, reason in reasons.items() if not reason)
    absent = {name: reason for name, reason in reasons.items() if reason}
    name, _ = _cpuinfo()
    return Machine(platform.machine(), platform.system(), name, usable, cap, no_compiler, source, absent)
