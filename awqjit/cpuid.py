# SPDX-License-Identifier: Apache-2.0
"""Which x86-64 instructions may be used: what the CPU has, and what the operating system saves registers for.

CPUID alone is not enough. It also answers for registers that the operating system has not switched on (a boot option,
a hypervisor, a kernel too old for them); using these raises SIGILL. XCR0 says which registers are switched on.
Bits and their names are from the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 13,
and volume 2, CPUID.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

EAX, EBX, ECX, EDX = range(4)

Leaves = Mapping[tuple[int, int], tuple[int, int, int, int]]
"""(leaf, subleaf) -> EAX, EBX, ECX, EDX. A leaf that is absent has all bits clear."""


@dataclass(frozen=True)
class State:
    """Registers that the operating system switches on together: their name, and their bits in XCR0."""

    name: str
    bits: int


YMM = State("YMM", 0b110)  # XMM and the upper halves of YMM
ZMM = State("opmask and ZMM", 0b1110_0110)
TILES = State("tile", 0b11 << 17)  # and the process has to ask for them: see request_tiles


@dataclass(frozen=True)
class Feature:
    """One bit of CPUID, the registers it works on, and the feature without which it means nothing."""

    leaf: int
    subleaf: int
    register: int
    bit: int
    state: State
    needs: str | None = None


FEATURES: dict[str, Feature] = {
    "avx": Feature(1, 0, ECX, 28, YMM),
    "fma": Feature(1, 0, ECX, 12, YMM, "avx"),
    "f16c": Feature(1, 0, ECX, 29, YMM, "avx"),
    "avx2": Feature(7, 0, EBX, 5, YMM, "avx"),
    "avx_vnni": Feature(7, 1, EAX, 4, YMM, "avx2"),
    "avx512f": Feature(7, 0, EBX, 16, ZMM, "avx2"),
    "avx512dq": Feature(7, 0, EBX, 17, ZMM, "avx512f"),
    "avx512bw": Feature(7, 0, EBX, 30, ZMM, "avx512f"),
    "avx512vl": Feature(7, 0, EBX, 31, ZMM, "avx512f"),
    "avx512_vnni": Feature(7, 0, ECX, 11, ZMM, "avx512vl"),
    "avx512_bf16": Feature(7, 1, EAX, 5, ZMM, "avx512vl"),
    "amx_tile": Feature(7, 0, EDX, 24, TILES),
    "amx_int8": Feature(7, 0, EDX, 25, TILES, "amx_tile"),
    "amx_bf16": Feature(7, 0, EDX, 22, TILES, "amx_tile"),
}
"""In the spelling of ``/proc/cpuinfo``; what a feature needs comes before it."""

NOT_THERE = "the CPU does not have it"

_OSXSAVE = 27  # bit of leaf 1, ECX: the operating system uses XSAVE, and XGETBV may be executed


def explain_features(leaves: Leaves, xcr0: int) -> dict[str, str]:
    """Why each feature of :data:`FEATURES` cannot be used; "" for one that can.

    Args:
        leaves: answers of CPUID for leaves 1, 7.0 and 7.1.
        xcr0: extended control register 0; 0 where the CPU has none.
    """
    reasons: dict[str, str] = {}
    for name, feature in FEATURES.items():
        word = leaves.get((feature.leaf, feature.subleaf), (0, 0, 0, 0))[feature.register]
        off = feature.state.bits & ~xcr0
        if not word >> feature.bit & 1:
            reasons[name] = NOT_THERE
        elif off:
            reasons[name] = (
                f"the CPU has it, but the operating system has not switched on the {feature.state.name} registers "
                f"(XCR0 is {xcr0:#x}, without {off:#x})"
            )
        elif feature.needs is not None and reasons[feature.needs]:
            reasons[name] = f"the CPU claims it, but not {feature.needs}, on which it builds"
        else:
            reasons[name] = ""
    return reasons


def usable_features(leaves: Leaves, xcr0: int) -> frozenset[str]:
    """The features that can be used; arguments as for :func:`explain_features`."""
    return frozenset(name for name, reason in explain_features(leaves, xcr0).items() if not reason)


_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023  # asm/prctl.h: permission for registers that are large
_XTILEDATA = 18


def _arch_prctl(code: int, argument: int) -> int:
    """The system call: 0, or an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(code), ctypes.c_long(argument))
    return ctypes.get_errno() if failed else 0


def request_tiles() -> str:
    """Ask Linux to let this process use the tile registers: without, the first tile instruction ends it.

    The permission is for all threads, now and later, and a forked child has it too. Asking twice does no harm.

    Returns:
        "" when granted, else why not.
    """
    if platform.system() != "Linux":
        return f"no permission for tile registers can be asked for on {platform.system()}"
    error = _arch_prctl(_ARCH_REQ_XCOMP_PERM, _XTILEDATA)
    if not error:
        return ""
    why = {
        errno.ENOSPC: "a thread of this process has an alternative signal stack that is too small for them",
        errno.EINVAL: "it needs Linux 5.16 or newer",
        errno.EOPNOTSUPP: "Linux does not support them on this CPU",
        errno.EPERM: "something forbids the system call",
    }.get(error, "an answer that arch_prctl is not known to give")
    return f"Linux does not let this process use tile registers ({os.strerror(error)}: {why})"


class UnreadableError(OSError):
    """The registers cannot be read here; the message says why."""


# void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]) and uint64_t xgetbv0(void), System V calling
# convention. They need no compiler, which may not be there, and nothing else that Python comes with executes CPUID.
_CPUID = bytes.fromhex(
    "f30f1efa"  # endbr64
    "53"  # push rbx, which CPUID overwrites and the caller wants back
    "4989d0"  # mov r8, rdx
    "89f8 89f1"  # mov eax, edi; mov ecx, esi
    "0fa2"  # cpuid
    "418900 41895804 41894808 4189500c"  # mov [r8], eax; [r8+4], ebx; [r8+8], ecx; [r8+12], edx
    "5b c3"  # pop rbx; ret
)
_XGETBV = bytes.fromhex(
    "f30f1efa"  # endbr64
    "31c9 0f01d0"  # xor ecx, ecx; xgetbv
    "48c1e220 4809d0"  # shl rdx, 32; or rax, rdx
    "c3"  # ret
)
_XGETBV_OFFSET = 64


def read_registers() -> tuple[dict[tuple[int, int], tuple[int, int, int, int]], int]:
    """CPUID leaves and XCR0 of the CPU this thread runs on, for :func:`explain_features`.

    Raises:
        UnreadableError: not an x86-64 CPU, a system without this calling convention, or one that lets no process
            execute memory it has written (SELinux, seccomp, a hardened kernel).
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UnreadableError(f"CPUID is an instruction of x86-64, this is {platform.machine()}")
    if platform.system() not in ("Linux", "Darwin"):
        raise UnreadableError(f"CPUID is not read on {platform.system()}")
    try:
        page = mmap.mmap(
            -1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError as error:
        raise UnreadableError(f"no memory for the code that executes CPUID: {error}") from None
    with page:
        page[: len(_CPUID)] = _CPUID
        page[_XGETBV_OFFSET : _XGETBV_OFFSET + len(_XGETBV)] = _XGETBV
        view = ctypes.c_char.from_buffer(page)
        try:
            return _read(ctypes.addressof(view))
        finally:
            del view  # the page cannot be unmapped while something refers to it


def _read(address: int) -> tuple[dict[tuple[int, int], tuple[int, int, int, int]], int]:
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Never writable and executable at once: many systems allow the one after the other only.
    if mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise UnreadableError(f"this process may not execute memory it has written ({os.strerror(ctypes.get_errno())})")
    cpuid = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)
    xgetbv0 = ctypes.CFUNCTYPE(ctypes.c_uint64)(address + _XGETBV_OFFSET)
    registers = (ctypes.c_uint32 * 4)()

    def ask(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
        cpuid(leaf, subleaf, ctypes.addressof(registers))
        return registers[0], registers[1], registers[2], registers[3]

    # A leaf beyond the last one answers with the data of another leaf.
    last = ask(0)[EAX]
    leaves = {(1, 0): ask(1)}
    if last >= 7:
        leaves[7, 0] = ask(7)
        if leaves[7, 0][EAX] >= 1:
            leaves[7, 1] = ask(7, 1)
    has_xcr0 = leaves[1, 0][ECX] >> _OSXSAVE & 1
    return leaves, int(xgetbv0()) if has_xcr0 else 0
