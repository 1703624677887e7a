# SPDX-License-Identifier: Apache-2.0
"""This machine as if its CPU had AMX: detection finds it, Linux is asked for it, the emulator executes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from amx_emulator.emulator import Emulator

from awqjit import cpuid, machine, ops

_AMX = ("amx_tile", "amx_int8", "amx_bf16")


def with_amx(leaves: cpuid.Leaves, xcr0: int) -> tuple[dict[tuple[int, int], tuple[int, int, int, int]], int]:
    """What CPUID and XCR0 would answer if this CPU had AMX, and Linux had switched it on."""
    changed = dict(leaves)
    for feature in (cpuid.FEATURES[name] for name in _AMX):
        words = list(changed[feature.leaf, feature.subleaf])
        words[feature.register] |= 1 << feature.bit
        changed[feature.leaf, feature.subleaf] = (words[0], words[1], words[2], words[3])
    return changed, xcr0 | cpuid.TILES.bits


@contextmanager
def emulated_amx(emulator: Emulator) -> Iterator[Emulator]:
    """A machine with AMX for a block; permission to use it has to be asked for anew in each block."""
    read = cpuid.read_registers
    with (
        mock.patch.object(cpuid, "read_registers", lambda: with_amx(*read())),
        mock.patch.object(cpuid, "_arch_prctl", emulator.arch_prctl),
        emulator.installed(),
    ):
        machine._features.cache_clear()
        ops.forget()
        try:
            yield emulator
        finally:
            machine._features.cache_clear()
            ops.forget()
