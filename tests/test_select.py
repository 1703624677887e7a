# SPDX-License-Identifier: Apache-2.0
"""The selection table: its order, exactly one choice, a reason for every refusal."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awqjit import config, machine, select
from awqjit.errors import ConfigError, KernelRefusedError
from awqjit.machine import ISA_LEVELS, Machine
from awqjit.spec import MAX_W4A8_GROUP, Problem
from awqjit.target import TARGETS, target

ALL_FEATURES = frozenset().union(*(features for _, features in ISA_LEVELS))
BEST = Machine("x86_64", "Linux", "a CPU with everything", ALL_FEATURES)
NONE = dataclasses.replace(BEST, features=frozenset())
LAPTOP = dataclasses.replace(BEST, features=frozenset({"avx", "avx2", "fma", "f16c"}))
SKYLAKE_X = dataclasses.replace(BEST, features=LAPTOP.features | {"avx512f", "avx512vl", "avx512dq", "avx512bw"})
ALDER_LAKE = dataclasses.replace(BEST, features=LAPTOP.features | {"avx_vnni"})
ARM = Machine("aarch64", "Linux", "an ARM CPU", frozenset())
WINDOWS = dataclasses.replace(BEST, system="Windows")
BARE = dataclasses.replace(BEST, no_compiler="no working C++ compiler")

W4A16 = Problem(4096, 11008, 128, "bf16", "fp16", symmetric=False, bias=False, act_bits=16)
W4A8 = dataclasses.replace(W4A16, act_bits=8)


def problems() -> st.SearchStrategy[Problem]:
    dtypes = st.sampled_from(["bf16", "fp16", "fp32"])
    return st.integers(1, 4096).flatmap(
        lambda k: st.builds(
            Problem,
            k=st.just(k),
            n=st.integers(1, 4096),
            group_size=st.integers(1, k),
            x_dtype=dtypes,
            scale_dtype=dtypes,
            symmetric=st.booleans(),
            bias=st.booleans(),
            act_bits=st.sampled_from([16, 8]),
        )
    )


def machines() -> st.SearchStrategy[Machine]:
    return st.builds(
        Machine,
        architecture=st.sampled_from(["x86_64", "AMD64", "aarch64", "riscv64"]),
        system=st.sampled_from(["Linux", "Darwin", "Windows"]),
        cpu=st.just("some CPU"),
        features=st.frozensets(st.sampled_from(sorted(ALL_FEATURES))),
        max_isa=st.just(None),
        no_compiler=st.sampled_from([None, "no working C++ compiler"]),
    )


def test_the_table_is_ordered_best_first_with_the_reference_last() -> None:
    names = [row.name for row in select.ROWS]
    of_mode = {
        bits: [row.name for row in select.ROWS if row.target is None or bits in row.target.act_bits] for bits in (8, 16)
    }
    x86, others = [row.name for row in TARGETS if row.machines[:1] == ("x86_64",)], ["portable", "numba", "torch"]
    assert [name for name in of_mode[8] if name in x86] == ["amx_int8", "avx512_vnni", "avx_vnni", "avx512bw", "avx2"]
    assert [name for name in of_mode[16] if name in x86] == ["amx_bf16", "avx512_bf16", "avx512", "avx2"]
    assert of_mode[8][-3:] == of_mode[16][-3:] == others
    assert len(set(names)) == len(names)
    assert [row.target for row in select.ROWS if row.target is not None] == list(TARGETS)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), here=machines(), forced=st.sampled_from([None, *(row.name for row in select.ROWS)]))
def test_at_most_one_row_is_chosen_it_is_the_first_that_accepts_and_every_other_has_a_reason(
    problem: Problem, here: Machine, forced: str | None
) -> None:
    verdicts = select.explain(problem, here, forced=forced)
    assert [verdict.row for verdict in verdicts] == list(select.ROWS)
    chosen = [verdict for verdict in verdicts if verdict.chosen]
    accepting = [verdict for verdict in verdicts if verdict.reason is None]
    assert chosen == accepting[:1]
    assert all(verdict.reason for verdict in verdicts if verdict not in accepting)
    if forced is None:
        assert len(chosen) == 1  # the reference takes what no other row does
        assert select.choose(problem, here) is chosen[0].row
    elif chosen:
        assert chosen[0].row.name == forced
        assert accepting == chosen
    else:
        with pytest.raises(KernelRefusedError, match=f"AWQJIT_KERNEL={forced} cannot run {problem.slug}"):
            select.choose(problem, here, forced=forced)


@pytest.mark.parametrize(
    ("problem", "here", "wanted"),
    [
        (W4A16, BEST, "amx_bf16"),
        (W4A8, BEST, "amx_int8"),
        (W4A16, dataclasses.replace(BEST, features=ALL_FEATURES - {"amx_bf16"}), "avx512_bf16"),
        (W4A8, dataclasses.replace(BEST, features=ALL_FEATURES - {"amx_tile"}), "avx512_vnni"),
        (W4A16, NONE, "portable"),
        (W4A8, NONE, "portable"),
        (W4A16, ARM, "portable"),
        (W4A8, ARM, "portable"),
        (W4A16, WINDOWS, "torch"),
        (W4A16, BARE, "numba"),
        (W4A8, BARE, "numba"),
        (W4A16, dataclasses.replace(BARE, no_numba="numba is not installed"), "torch"),
        (W4A8, LAPTOP, "avx2"),
        (W4A16, LAPTOP, "avx2"),
        (W4A8, SKYLAKE_X, "avx512bw"),
        (W4A16, SKYLAKE_X, "avx512"),
        (W4A8, ALDER_LAKE, "avx_vnni"),
        (W4A16, ALDER_LAKE, "avx2"),
        (W4A8, dataclasses.replace(BEST, features=ALL_FEATURES - {"avx512_vnni"}), "avx_vnni"),
        (W4A16, dataclasses.replace(BEST, features=ALL_FEATURES - {"avx512_bf16"}), "avx512"),
        (W4A16, dataclasses.replace(BEST, features=ALL_FEATURES - {"avx512vl"}), "avx2"),
        (W4A16, dataclasses.replace(BEST, features=ALL_FEATURES - {"f16c"}), "portable"),
    ],
)
def test_the_best_row_that_a_machine_can_run_is_chosen(problem: Problem, here: Machine, wanted: str) -> None:
    assert select.choose(problem, here).name == wanted


@pytest.mark.parametrize(
    ("problem", "here", "row", "reason"),
    [
        (W4A16, BEST, "avx512_vnni", "computes w4a8 only"),
        (W4A8, BEST, "avx512_bf16", "computes w4a16 only"),
        (W4A8, NONE, "avx512_vnni", "this CPU has no avx512_vnni, avx512bw"),
        (W4A8, ARM, "avx512_vnni", "needs x86_64, this is aarch64"),
        (W4A16, WINDOWS, "portable", "compiled kernels run on Linux and macOS, this is Windows"),
        (W4A16, BARE, "portable", "no working C++ compiler"),
        (
            dataclasses.replace(W4A8, k=MAX_W4A8_GROUP + 1, group_size=MAX_W4A8_GROUP + 1),
            BEST,
            "avx512_vnni",
            f"int32 sums hold groups of at most {MAX_W4A8_GROUP} rows",
        ),
    ],
)
def test_a_refusal_says_why(problem: Problem, here: Machine, row: str, reason: str) -> None:
    (verdict,) = [verdict for verdict in select.explain(problem, here) if verdict.row.name == row]
    if reason.startswith("this CPU"):
        assert verdict.reason is not None
        assert "avx512_vnni" in verdict.reason
    else:
        assert verdict.reason == reason
    assert not verdict.chosen
    with pytest.raises(KernelRefusedError) as caught:
        select.choose(problem, here, forced=row)
    assert str(verdict.reason) in str(caught.value)
    assert caught.value.args[0] == row


def test_a_w4a8_group_too_long_for_int32_is_left_to_the_reference() -> None:
    long = dataclasses.replace(W4A8, k=MAX_W4A8_GROUP + 1, group_size=MAX_W4A8_GROUP + 1)
    assert select.choose(long, BEST).name == "torch"
    assert select.choose(dataclasses.replace(long, group_size=MAX_W4A8_GROUP), BEST).name == "amx_int8"
    assert select.choose(dataclasses.replace(long, act_bits=16), BEST).name == "amx_bf16"


def test_a_forced_row_that_does_not_exist_lists_those_that_do() -> None:
    rows = ", ".join(row.name for row in select.ROWS)
    assert rows.startswith("amx_int8, ")
    with pytest.raises(KernelRefusedError, match=f"no such row; rows: {rows}"):
        select.choose(W4A16, BEST, forced="amx_int9")


def test_a_row_makes_a_spec_of_its_own_target_and_tile() -> None:
    for row, dtype in itertools.product(select.ROWS, ("bf16", "fp16", "fp32")):
        problem = dataclasses.replace(W4A16, x_dtype=dtype, act_bits=row.target.act_bits[0] if row.target else 16)
        spec = row.spec(problem)
        if row.target is None:
            assert spec is None
        else:
            assert spec is not None
            assert spec.problem == problem
            assert spec.target is target(row.name)
            assert spec.tile == row.target.tile(problem.act_bits, dtype)


@pytest.mark.parametrize("level", [name for name, _ in ISA_LEVELS])
def test_max_isa_hides_every_feature_above_its_level(level: str) -> None:
    allowed: frozenset[str] = frozenset()
    for name, features in ISA_LEVELS:
        allowed |= features
        if name == level:
            break
    free = machine.detect()
    with config.override(max_isa=level):
        capped = machine.detect()
    assert capped.features == free.features & allowed
    assert capped.max_isa == level
    needed = target("avx512_vnni").features
    if free.missing(needed) is None and not needed <= allowed:
        reason = str(capped.missing(needed))
        assert f"hidden by AWQJIT_MAX_ISA={level}" in reason
        assert "this CPU has no" not in reason  # it has them


@pytest.mark.parametrize(
    ("level", "w4a8", "w4a16"),
    [
        ("portable", "portable", "portable"),
        ("avx2", "avx2", "avx2"),
        ("avx_vnni", "avx_vnni", "avx2"),
        ("avx512", "avx_vnni", "avx512"),
        ("avx512_vnni", "avx512_vnni", "avx512"),
        ("avx512_bf16", "avx512_vnni", "avx512_bf16"),
        ("amx", "amx_int8", "amx_bf16"),
    ],
)
def test_a_machine_capped_at_a_level_takes_the_best_rows_of_that_level(
    level: str, w4a8: str, w4a16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = dict.fromkeys(ALL_FEATURES, "")
    monkeypatch.setattr(machine, "_features", lambda: (everything, "invented"))
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    with config.override(max_isa=level):
        capped = machine.detect()
    assert select.choose(W4A8, capped).name == w4a8
    assert select.choose(W4A16, capped).name == w4a16
    # The same machine without AVX-VNNI, as most with AVX512 are.
    del everything["avx_vnni"]
    with config.override(max_isa=level):
        capped = machine.detect()
    without = {"avx_vnni": "avx2", "avx512": "avx512bw"}.get(level, w4a8)
    assert select.choose(W4A8, capped).name == without


def test_an_unknown_level_is_an_error_that_lists_the_known_ones() -> None:
    with config.override(max_isa="avx1024"), pytest.raises(ConfigError, match=r"AWQJIT_MAX_ISA='avx1024'.*portable"):
        machine.detect()


def test_every_feature_a_target_needs_can_be_detected_and_capped() -> None:
    for row in TARGETS:
        architecture = row.machines[0] if row.machines else "x86_64"
        assert row.features <= frozenset().union(*(features for _, features in machine.levels_of(architecture)))
