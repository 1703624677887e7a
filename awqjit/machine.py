# SPDX-License-Identifier: Apache-2.0
"""What this computer can run: its CPU's usable features and the compiler found, as plain data."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from awqjit import config, cpuid, hwcap
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
"""What ``AWQJIT_MAX_ISA`` can name on x86-64, narrowest first, each level with the features it adds to those before."""

ARM_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("portable", frozenset()),
    ("neon", frozenset({"asimd"})),
    ("neon_dot", frozenset({"asimddp"})),
    ("neon_i8mm", frozenset({"i8mm"})),
    ("neon_bf16", frozenset({"bf16"})),
)
"""The same for aarch64."""


def levels_of(architecture: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """The levels of a ``platform.machine()``."""
    return ARM_LEVELS if architecture in hwcap.MACHINES else ISA_LEVELS


@dataclass(frozen=True)
class Level:
    """One of :func:`levels_of` on a machine: whether all features it adds can be used, and if not, why."""

    name: str
    on: bool
    reason: str


@dataclass(frozen=True)
class Xpu:
    """One Intel GPU, as selection sees it.

    Attributes:
        name: its marketing name.
        lanes: columns that an instruction of its matrix unit (DPAS) gives, also its kernels' sub-group size: 16 or 8.
        dpas: it has that unit.
        no_sycl: why no SYCL kernel can be compiled for it here; None when one can.
    """

    name: str
    lanes: int
    dpas: bool
    no_sycl: str | None = None


@dataclass(frozen=True)
class Machine:
    """One computer, as selection sees it.

    Attributes:
        architecture: ``platform.machine()``, for example "x86_64".
        system: ``platform.system()``, for example "Linux".
        cpu: the CPU's marketing name.
        features: usable features among those of :func:`levels_of`, in the spelling of ``/proc/cpuinfo``.
        max_isa: the level ``AWQJIT_MAX_ISA`` caps the features at, or None.
        no_compiler: why no kernel can be compiled here; None when one can (or may come from a cache).
        source: where the features were read, and why not in a better place.
        absent: why a feature that is not in ``features`` cannot be used, as far as known.
        no_numba: why numba cannot be used here, as far as can be told without importing it; None when it can.
        xpu: the Intel GPU that is asked about, or None.
        no_xpu: why there is none.
        no_cuda: why torch has no CUDA device; None when it has one.
        no_triton: why Triton cannot be used here, as far as can be told without importing it; None when it can.
    """

    architecture: str
    system: str
    cpu: str
    features: frozenset[str]
    max_isa: str | None = None
    no_compiler: str | None = None
    source: str = ""
    absent: Mapping[str, str] = field(default_factory=dict, compare=False)
    no_numba: str | None = None
    xpu: Xpu | None = None
    no_xpu: str = "no Intel GPU was looked for"
    no_cuda: str | None = "no CUDA device was looked for"
    no_triton: str | None = None

    def missing(self, features: frozenset[str]) -> str | None:
        """Why code that needs ``features`` cannot run here, or None when it can."""
        reasons = self._reasons(features)
        if not reasons:
            return None
        lacking = reasons.pop(cpuid.NOT_THERE, None)
        parts = [f"this CPU has no {', '.join(lacking)}"] if lacking else []
        return "; ".join([*parts, *(f"{', '.join(absent)}: {why}" for why, absent in reasons.items())])

    def _reasons(self, features: frozenset[str]) -> dict[str, list[str]]:
        """Why some of ``features`` cannot be used -> those it is true of."""
        reasons: dict[str, list[str]] = {}
        for name in sorted(features - self.features):
            reasons.setdefault(self.absent.get(name, cpuid.NOT_THERE), []).append(name)
        return reasons

    def levels(self) -> tuple[Level, ...]:
        """Every level of :func:`levels_of` with its state here, narrowest first."""
        levels = []
        for name, features in levels_of(self.architecture):
            reason = "; ".join(f"{', '.join(absent)}: {why}" for why, absent in self._reasons(features).items())
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
        elif key.strip() in ("flags", "Features"):  # ARM writes the latter
            flags = frozenset(value.split())
            break
    return name, flags


@lru_cache(maxsize=1)
def _features() -> tuple[dict[str, str], str]:
    """Each known feature -> why it cannot be used, "" for one that can; and where that was read."""
    known = frozenset().union(*(features for _, features in levels_of(platform.machine())))
    try:
        if platform.machine() in hwcap.MACHINES:
            reasons, source = hwcap.explain_features()
        else:
            reasons, source = cpuid.explain_features(*cpuid.read_registers()), "CPUID and XCR0"
        return {name: reasons[name] for name in known} | _refused_tiles(reasons), source
    except cpuid.UnreadableError as error:
        _, flags = _cpuinfo()
        source = f"/proc/cpuinfo ({error})"
        reasons = {name: "" if name in flags else f"/proc/cpuinfo does not list it ({error})" for name in known}
        return reasons | _refused_tiles(reasons), source


_AMX = ("amx_tile", "amx_int8", "amx_bf16")


def _refused_tiles(reasons: Mapping[str, str]) -> dict[str, str]:
    """Why the features that need tile registers cannot be used after all: this process may not use these."""
    if reasons.get("amx_tile", cpuid.NOT_THERE):
        return {}
    refusal = cpuid.request_tiles()
    return {name: reasons[name] or refusal for name in _AMX}


def _after_fork_in_child() -> None:
    # What was chosen before the fork stays chosen: the child asks for the registers itself.
    if _features.cache_info().currsize and not _features()[0].get("amx_tile", cpuid.NOT_THERE):
        cpuid.request_tiles()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _no_numba() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    version, pythons = _numba_pythons()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"numba {version} does not support Python {here}" if pythons and here not in pythons else None


def _no_triton() -> str | None:
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None


@lru_cache(maxsize=1)
def _numba_pythons() -> tuple[str, frozenset[str]]:
    """numba's version and the Pythons it was made for, "3.12" and the like: it refuses to be imported in others."""
    try:
        found = importlib.metadata.metadata("numba")
    except importlib.metadata.PackageNotFoundError:
        return "", frozenset()  # put there by hand
    prefix = "Programming Language :: Python :: "
    stated = (text.removeprefix(prefix) for text in found.get_all("Classifier") or () if text.startswith(prefix))
    return found["Version"], frozenset(text for text in stated if text.startswith("3."))


def detect(no_compiler: str | None = None) -> Machine:
    """This computer now, with ``AWQJIT_MAX_ISA`` applied.

    Raises:
        ConfigError: ``AWQJIT_MAX_ISA`` names no level.
    """
    reasons, source = _features()
    cap = config.MAX_ISA.read()
    if cap is not None:
        table = levels_of(platform.machine())
        levels = [level for level, _ in table]
        if cap not in levels:
            raise ConfigError(config.MAX_ISA.name, cap, f"one of {', '.join(levels)}")
        allowed = frozenset().union(*(features for _, features in table[: levels.index(cap) + 1]))
        hidden = f"hidden by AWQJIT_MAX_ISA={cap}"
        reasons = {name: reason or ("" if name in allowed else hidden) for name, reason in reasons.items()}
    usable = frozenset(name for name, reason in reasons.items() if not reason)
    absent = {name: reason for name, reason in reasons.items() if reason}
    name, _ = _cpuinfo()
    return Machine(
        platform.machine(),
        platform.system(),
        name,
        usable,
        cap,
        no_compiler,
        source,
        absent,
        _no_numba(),
        no_triton=_no_triton(),
    )
