# SPDX-License-Identifier: Apache-2.0
"""ARM machines: what is read of their features, on Linux and macOS, and which row is chosen."""

from __future__ import annotations

import mmap
import platform
from dataclasses import replace

import pytest

from awqjit import config, hwcap, machine, select
from awqjit.cpuid import UnreadableError
from awqjit.errors import ConfigError
from awqjit.machine import ARM_LEVELS, ISA_LEVELS, Machine, levels_of
from awqjit.spec import Problem
from awqjit.target import TARGETS

W4A16 = Problem(4096, 11008, 128, "bf16", "fp16", symmetric=False, bias=False, act_bits=16)
W4A8 = replace(W4A16, act_bits=8)
NOTHING = frozenset[str]()
OLD, NEW = frozenset({"asimd"}), frozenset({"asimd", "asimddp"})


@pytest.mark.parametrize(
    ("architecture", "system", "features", "wanted"),
    [
        ("aarch64", "Linux", NEW, {16: "neon", 8: "neon_dot"}),
        ("arm64", "Darwin", NEW, {16: "neon", 8: "neon_dot"}),
        ("aarch64", "Linux", OLD, {16: "neon", 8: "portable"}),
        ("aarch64", "Linux", NOTHING, {16: "portable", 8: "portable"}),
        ("x86_64", "Linux", NEW, {16: "portable", 8: "portable"}),
        ("arm64", "Windows", NEW, {16: "torch", 8: "torch"}),
    ],
)
def test_the_best_row_of_an_arm_machine_is_chosen(
    architecture: str, system: str, features: frozenset[str], wanted: dict[int, str]
) -> None:
    here = Machine(architecture, system, "an ARM CPU", features)
    assert {bits: select.choose(replace(W4A16, act_bits=bits), here).name for bits in wanted} == wanted


def test_a_refusal_names_what_the_cpu_lacks() -> None:
    here = Machine("aarch64", "Linux", "an ARM CPU", OLD)
    reasons = {verdict.row.name: verdict.reason for verdict in select.explain(W4A8, here)}
    assert reasons["neon_dot"] == "this CPU has no asimddp"
    assert reasons["neon"] == "computes w4a16 only"
    assert reasons["avx512_vnni"] == "needs x86_64, this is aarch64"


def test_every_feature_of_an_arm_row_can_be_detected_and_capped() -> None:
    detected = set().union(*(features for _, features in ARM_LEVELS))
    assert detected == hwcap.FEATURES.keys()
    for one in TARGETS:
        if set(one.machines) & set(hwcap.MACHINES):
            assert one.features <= detected
    assert not detected & set().union(*(features for _, features in ISA_LEVELS))
    assert {name: levels_of(name) for name in ("aarch64", "arm64", "x86_64", "AMD64")} == {
        "aarch64": ARM_LEVELS,
        "arm64": ARM_LEVELS,
        "x86_64": ISA_LEVELS,
        "AMD64": ISA_LEVELS,
    }


@pytest.fixture
def arm_linux(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """This process as it would be on an ARM machine under Linux; the two words of bits, to be filled in."""
    words = {hwcap.HWCAP: 0, hwcap.HWCAP2: 0}
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(hwcap, "_getauxval", lambda: words.__getitem__)
    monkeypatch.setattr(machine, "_features", machine._features.__wrapped__)  # keeps no answer
    return words


def test_linux_tells_the_features_by_bits(arm_linux: dict[int, int]) -> None:
    # As the kernel's header numbers them: HWCAP_ASIMD, HWCAP_ASIMDDP; HWCAP2_I8MM.
    arm_linux[hwcap.HWCAP] = 1 << 1 | 1 << 20
    arm_linux[hwcap.HWCAP2] = 1 << 13
    here = machine.detect()
    assert here.features == {"asimd", "asimddp", "i8mm"}
    assert here.source == "HWCAP and HWCAP2"
    assert [(level.name, level.on) for level in here.levels()] == [
        ("portable", True),
        ("neon", True),
        ("neon_dot", True),
        ("neon_i8mm", True),
        ("neon_bf16", False),
    ]
    assert here.levels()[-1].reason == "bf16: the CPU does not have it"
    arm_linux[hwcap.HWCAP] = 1 << 20
    assert machine.detect().features == {"asimddp", "i8mm"}


def test_max_isa_takes_the_levels_of_arm(arm_linux: dict[int, int]) -> None:
    arm_linux[hwcap.HWCAP] = arm_linux[hwcap.HWCAP2] = 2**64 - 1
    chosen = {}
    for level, _ in ARM_LEVELS:
        with config.override(max_isa=level):
            here = machine.detect()
        chosen[level] = [select.choose(problem, here).name for problem in (W4A16, W4A8)]
    assert chosen["portable"] == ["portable", "portable"]
    assert chosen["neon"] == ["neon", "portable"]
    assert chosen["neon_dot"] == chosen["neon_bf16"] == ["neon", "neon_dot"]
    with config.override(max_isa="neon"):
        (level,) = [level for level in machine.detect().levels() if level.name == "neon_dot"]
    assert not level.on
    assert level.reason == "asimddp: hidden by AWQJIT_MAX_ISA=neon"
    with config.override(max_isa="avx2"), pytest.raises(ConfigError, match="portable, neon, neon_dot"):
        machine.detect()


def test_where_the_c_library_does_not_tell_the_linux_kernel_is_asked(
    arm_linux: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise AttributeError("no getauxval")

    monkeypatch.setattr(hwcap, "_getauxval", absent)
    monkeypatch.setattr(machine, "_cpuinfo", lambda: ("an ARM CPU", frozenset({"fp", "asimd"})))
    here = machine.detect()
    assert here.features == {"asimd"}
    assert here.source == "/proc/cpuinfo (the C library does not say what the CPU has: no getauxval)"
    assert here.absent["asimddp"].startswith("/proc/cpuinfo does not list it")


def test_macos_tells_the_features_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"hw.optional.neon": 1, "hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_BF16": 0}
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(hwcap, "_sysctl", lambda name: known.get(name, 0))
    reasons, source = hwcap.explain_features()
    assert {name for name, reason in reasons.items() if not reason} == {"asimd", "asimddp"}
    assert source == "sysctl hw.optional"


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    with pytest.raises(UnreadableError, match="not read on Plan9"):
        hwcap.explain_features()


@pytest.mark.skipif(platform.system() != "Linux", reason="getauxval is Linux's")
def test_the_words_are_read_by_their_keys() -> None:
    """AT_PAGESZ, 6: the same call answers with something that is known here."""
    assert hwcap._getauxval()(6) == mmap.PAGESIZE
