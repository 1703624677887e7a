# SPDX-License-Identifier: Apache-2.0
"""Which aarch64 instructions may be used: the operating system says, as no instruction tells a program.

Linux hands every program two words of bits, in which it leaves out what it has not switched on and, on CPUs with cores
of several kinds, what not all of them have. Bits and names are from its ``arch/arm64/include/uapi/asm/hwcap.h`` and its
``/proc/cpuinfo``. macOS answers by name (sysctl, under ``hw.optional``).
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass

from awqjit.cpuid import NOT_THERE, UnreadableError

MACHINES = ("aarch64", "arm64")
"""What ``platform.machine()`` says on Linux and on macOS."""

HWCAP, HWCAP2 = 16, 26
"""The two words' keys in the auxiliary vector."""


@dataclass(frozen=True)
class Feature:
    """One bit of a word that Linux hands over, and macOS's name for the same."""

    word: int
    bit: int
    sysctl: str


FEATURES: dict[str, Feature] = {
    "asimd": Feature(HWCAP, 1, "hw.optional.neon"),
    "asimddp": Feature(HWCAP, 20, "hw.optional.arm.FEAT_DotProd"),
    "i8mm": Feature(HWCAP2, 13, "hw.optional.arm.FEAT_I8MM"),
    "bf16": Feature(HWCAP2, 14, "hw.optional.arm.FEAT_BF16"),
}
"""In the spelling of Linux's ``/proc/cpuinfo``."""


def explain_words(word_of: Callable[[int], int]) -> dict[str, str]:
    """Why each feature of :data:`FEATURES` cannot be used on Linux; "" for one that can.

    Args:
        word_of: :data:`HWCAP` or :data:`HWCAP2` -> the word of bits.
    """
    return {name: "" if word_of(one.word) >> one.bit & 1 else NOT_THERE for name, one in FEATURES.items()}


def explain_sysctl(value_of: Callable[[str], int]) -> dict[str, str]:
    """Why each feature of :data:`FEATURES` cannot be used on macOS; "" for one that can.

    Args:
        value_of: a sysctl's name -> its number; 0 for a name that this version of macOS does not know.
    """
    return {name: "" if value_of(one.sysctl) else NOT_THERE for name, one in FEATURES.items()}


def explain_features() -> tuple[dict[str, str], str]:
    """The same for this machine, and where it was read.

    Raises:
        UnreadableError: neither Linux nor macOS, or a C library that has no such function.
    """
    system = platform.system()
    try:
        if system == "Linux":
            return explain_words(_getauxval()), "HWCAP and HWCAP2"
        if system == "Darwin":
            return explain_sysctl(_sysctl), "sysctl hw.optional"
    except (OSError, AttributeError) as error:
        raise UnreadableError(f"the C library does not say what the CPU has: {error}") from None
    raise UnreadableError(f"the features of ARM CPUs are not read on {system}")


def _getauxval() -> Callable[[int], int]:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes = (ctypes.c_ulong,)
    getauxval.restype = ctypes.c_ulong
    return lambda word: int(getauxval(word))


def _sysctl(name: str) -> int:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    sysctlbyname = ctypes.CDLL(None).sysctlbyname
    sysctlbyname.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    failed = sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value
