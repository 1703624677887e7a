# SPDX-License-Identifier: Apache-2.0
"""Which instructions count as usable: invented registers, this machine's own, and that nothing else is ever loaded."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from pathlib import Path

import compilers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from awqjit import cache, config, cpuid, jit, launch, machine
from awqjit.cpuid import FEATURES, explain_features, usable_features
from awqjit.errors import KernelRefusedError
from awqjit.machine import ISA_LEVELS, Machine
from awqjit.render import render
from awqjit.select import ROWS
from awqjit.spec import Problem
from awqjit.target import TARGETS, Target

YMM, ZMM, TILES = 0b111, 0b1110_0111, 0b110_0000_0000_1110_0111
X86_LINUX = platform.machine() in ("x86_64", "AMD64") and platform.system() == "Linux"
WIDE = tuple(target for target in TARGETS if "x86_64" in target.machines)


def leaves(*names: str) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """What CPUID answers on a CPU with these features."""
    words: dict[tuple[int, int], list[int]] = {}
    for name in names:
        feature = FEATURES[name]
        words.setdefault((feature.leaf, feature.subleaf), [0] * 4)[feature.register] |= 1 << feature.bit
    return {leaf: (a, b, c, d) for leaf, (a, b, c, d) in words.items()}


EVERYTHING = leaves(*FEATURES)
AVX = frozenset({"avx", "fma", "f16c", "avx2", "avx_vnni"})
AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})


# ---- invented registers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xcr0", "usable"),
    [
        (0, frozenset()),
        (0b011, frozenset()),
        (0b101, frozenset()),  # AVX without SSE: not a state a CPU can be in, and not one to trust
        (YMM, AVX),
        (YMM | 0b0010_0000, AVX),  # opmask alone
        (YMM | 0b1100_0000, AVX),  # ZMM without opmask
        (YMM | 0b0110_0000, AVX),  # without the upper sixteen ZMM
        (ZMM, frozenset(FEATURES) - AMX),
        (ZMM | 1 << 17, frozenset(FEATURES) - AMX),  # tile configuration without tile data
        (TILES, frozenset(FEATURES)),
    ],
)
def test_a_feature_needs_its_registers_switched_on(xcr0: int, usable: frozenset[str]) -> None:
    assert usable_features(EVERYTHING, xcr0) == usable


def test_a_cpu_that_claims_avx512_under_a_system_without_it_is_explained() -> None:
    reasons = explain_features(EVERYTHING, YMM)
    assert reasons["avx2"] == ""
    assert reasons["avx512f"] == (
        "the CPU has it, but the operating system has not switched on the opmask and ZMM registers "
        "(XCR0 is 0x7, without 0xe0)"
    )
    assert "YMM registers (XCR0 is 0x3, without 0x4)" in explain_features(EVERYTHING, 0b11)["avx2"]
    assert "tile registers" in explain_features(EVERYTHING, ZMM)["amx_tile"]
    assert explain_features(leaves("avx"), ZMM)["avx2"] == cpuid.NOT_THERE


def test_a_feature_without_what_it_builds_on_is_not_believed() -> None:
    assert usable_features(leaves("avx512f", "avx512_vnni"), TILES) == frozenset()
    reasons = explain_features(leaves("avx", "avx2", "avx512f", "avx512_vnni"), ZMM)
    assert reasons["avx512_vnni"] == "the CPU claims it, but not avx512vl, on which it builds"


def test_no_leaves_are_no_features() -> None:
    assert usable_features({}, TILES) == frozenset()
    assert usable_features({(7, 0): (2**32 - 1,) * 4, (7, 1): (2**32 - 1,) * 4}, TILES) == AMX


@given(st.frozensets(st.sampled_from(sorted(FEATURES))), st.integers(0, 2**20))
def test_whatever_the_registers_say_a_usable_feature_is_claimed_and_saved(claimed: frozenset[str], xcr0: int) -> None:
    usable = usable_features(leaves(*claimed), xcr0)
    assert usable <= claimed
    for name in usable:
        feature = FEATURES[name]
        assert feature.state.bits & xcr0 == feature.state.bits
        assert feature.needs is None or feature.needs in usable


def test_every_feature_of_a_level_is_one_bit_of_its_own() -> None:
    assert set().union(*(features for _, features in ISA_LEVELS)) == FEATURES.keys()
    places = {(f.leaf, f.subleaf, f.register, f.bit) for f in FEATURES.values()}
    assert len(places) == len(FEATURES)


# ---- this machine -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not X86_LINUX, reason="not x86-64 Linux")
def test_the_registers_and_the_linux_kernel_agree_on_this_machine() -> None:
    found = usable_features(*cpuid.read_registers())
    _, listed = machine._cpuinfo()
    assert listed & FEATURES.keys() <= found
    # A kernel older than an instruction that needs no registers of its own cannot list it; it runs all the same.
    young = {"avx_vnni", "avx512_bf16", *AMX}
    assert found - young == listed & (FEATURES.keys() - young)
    here = machine.detect()
    assert here.features == found
    assert here.source == "CPUID and XCR0"


# Forbids what SELinux (execmem) and systemd (MemoryDenyWriteExecute) forbid: making written memory executable.
FORBID = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)

def forbid_executable_memory():
    load, equal, both, give = 0x20, 0x15, 0x45, 0x06
    program = [
        (load, 0, 0, 0),           # number of the system call
        (equal, 0, 3, 10),         # mprotect
        (load, 0, 0, 32),          # its third argument
        (both, 0, 1, 4),           # PROT_EXEC
        (give, 0, 0, 0x50000 | 1), # EPERM
        (give, 0, 0, 0x7FFF0000),  # allowed
    ]
    code = b"".join(struct.pack("HBBI", *one) for one in program)
    text = ctypes.create_string_buffer(code, len(code))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(text)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    return libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(head)), 0, 0) == 0  # PR_SET_SECCOMP, a filter
"""


@pytest.mark.skipif(not X86_LINUX, reason="not x86-64 Linux")
def test_where_written_memory_cannot_be_executed_the_linux_kernel_is_asked_and_the_reason_kept() -> None:
    script = FORBID + (
        "from awqjit import machine\n"
        "print(forbid_executable_memory())\n"
        "here = machine.detect()\n"
        "print(here.source)\n"
        "print(*sorted(here.features))\n"
        "print({level.name: level.reason for level in here.levels() if not level.on})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    forbidden, source, features, off = done.stdout.splitlines()
    if forbidden != "True":
        pytest.skip("no seccomp filters here")
    assert source == "/proc/cpuinfo (this process may not execute memory it has written (Operation not permitted))"
    assert set(features.split()) == machine._cpuinfo()[1] & FEATURES.keys()
    assert off == "{}" or "/proc/cpuinfo does not list it" in off


@pytest.mark.skipif(X86_LINUX, reason="x86-64 Linux")
def test_elsewhere_the_reason_is_kept() -> None:
    with pytest.raises(cpuid.UnreadableError):
        cpuid.read_registers()
    assert machine.detect().source.startswith("/proc/cpuinfo (")


# ---- levels -----------------------------------------------------------------------------------------------------


def test_levels_say_which_are_on_and_why_the_others_are_not() -> None:
    reasons = explain_features(leaves(*FEATURES.keys() - AMX - {"avx_vnni"}), YMM)
    here = Machine(
        "x86_64",
        "Linux",
        "a CPU",
        frozenset(name for name, reason in reasons.items() if not reason),
        absent={name: reason for name, reason in reasons.items() if reason},
    )
    levels = {level.name: level for level in here.levels()}
    assert list(levels) == [name for name, _ in ISA_LEVELS]
    assert [name for name, level in levels.items() if level.on] == ["portable", "avx2"]
    assert levels["portable"].reason == levels["avx2"].reason == ""
    assert levels["avx_vnni"].reason == "avx_vnni: the CPU does not have it"
    assert levels["avx512"].reason.startswith("avx512bw, avx512dq, avx512f, avx512vl: the CPU has it, but")
    assert levels["amx"].reason == "amx_bf16, amx_int8, amx_tile: the CPU does not have it"
    # The selection table gives the same reason.
    assert "XCR0" in str(here.missing(frozenset({"avx512f"})))
    assert here.missing(frozenset({"amx_tile"})) == "this CPU has no amx_tile"


def test_a_hidden_level_names_the_variable_that_hides_it() -> None:
    with config.override(max_isa="portable"):
        hidden = machine.detect()
    free = machine.detect()
    assert hidden.features == frozenset()
    for level, before in zip(hidden.levels(), free.levels(), strict=True):
        assert not level.on or not dict(ISA_LEVELS)[level.name]
        if before.on and not level.on:
            assert "hidden by AWQJIT_MAX_ISA=portable" in level.reason


def test_a_refusal_tells_what_is_hidden_from_what_is_not_there() -> None:
    why = {"avx512_vnni": "the CPU does not have it", "avx512f": "hidden by AWQJIT_MAX_ISA=avx2", "avx512bw": "broken"}
    here = Machine("x86_64", "Linux", "a CPU", frozenset({"avx2"}), max_isa="avx2", absent=why)
    assert here.missing(frozenset({"avx2"})) is None
    assert here.missing(frozenset({"avx512f"})) == "avx512f: hidden by AWQJIT_MAX_ISA=avx2"
    assert here.missing(frozenset({"avx2", *why})) == (
        "this CPU has no avx512_vnni; avx512bw: broken; avx512f: hidden by AWQJIT_MAX_ISA=avx2"
    )


# ---- nothing that would raise SIGILL is loaded ------------------------------------------------------------------


def problem(target: Target) -> Problem:
    return Problem(64, 16, 32, "fp32", "fp32", symmetric=False, bias=False, act_bits=target.act_bits[0])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine as it would be if the operating system had not switched AVX on: CPUID claims it, XCR0 does not."""
    reasons = explain_features(EVERYTHING, 0b011)
    monkeypatch.setattr(machine, "_features", lambda: (reasons, "invented"))


@pytest.mark.parametrize("target", WIDE, ids=lambda target: target.name)
def test_forcing_a_row_does_not_load_what_the_registers_are_off_for(narrow: None, target: Target) -> None:
    with config.override(kernel=target.name), pytest.raises(KernelRefusedError, match="has not switched on"):
        jit.choose(problem(target))
    assert jit.choices() == ()
    jit.forget()
    assert jit.choose(problem(target)).kernel.name in ("portable", "torch")


@pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
@pytest.mark.parametrize("target", WIDE, ids=lambda target: target.name)
def test_what_a_wider_machine_left_in_the_cache_is_not_loaded_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    """The kernel is there, sound and with the right name: only the CPU differs. Its copy stands for a baked image."""
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "wide"))
    spec = next(row for row in ROWS if row.name == target.name).spec(problem(target))
    assert spec is not None
    built = cache.fetch(cache.Request(spec.slug, render(spec), spec.target.flags))  # compiling needs no such CPU
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(tmp_path / "wide"))
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "narrow"))
    reasons = explain_features(EVERYTHING, 0b011)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_features", lambda: (reasons, "invented"))
        assert jit.choose(problem(target)).kernel.name == "portable"
        with pytest.raises(launch.ForeignKernelError, match=r"is not loaded: .*operating system has not switched on"):
            launch.CompiledKernel.load(spec, built.path)
    assert str(built.directory) not in _maps()


def _maps() -> str:
    path = Path("/proc/self/maps")
    return path.read_text() if path.exists() else ""


def test_a_machine_is_plain_data() -> None:
    here = machine.detect()
    assert here == dataclasses.replace(here)
    assert hash(here) == hash(dataclasses.replace(here, absent={}))
