# SPDX-License-Identifier: Apache-2.0
"""`awqjit tune`: what is measured, what is remembered, and which records are believed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import compilers
import pytest
import torch

from awqjit import config, jit, launch, machine, ops, records, select, store, tiles, tune, upkeep
from awqjit.errors import ArgumentError, AwqJitWarning, ConfigError
from awqjit.spec import KernelSpec, Problem
from awqjit.target import Tile

pytestmark = pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")

PROBLEM = Problem(64, 48, 32, "fp32", "fp16", symmetric=False, bias=True, act_bits=8)
HASTE = tune.Effort(screen=0, final=0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with nothing in it."""
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "cache"))
    ops.forget()
    yield tmp_path / "cache"
    ops.forget()


def default_spec(problem: Problem = PROBLEM) -> KernelSpec:
    spec = select.choose(problem, machine.detect()).spec(problem)
    assert spec is not None
    return spec


def other_tile(problem: Problem = PROBLEM) -> Tile:
    default = default_spec(problem).tile
    return replace(default, prefetch=next(one for one in tiles.PREFETCH if one != default.prefetch))


def remember(tile: Tile, problem: Problem = PROBLEM) -> Path:
    return records.write(records.Record(records.key_of(default_spec(problem)), tile, {"decode": (2.0, 1.0)}))


def chosen_tile() -> Tile:
    jit.forget()
    kernel = jit.choose(PROBLEM).kernel
    assert isinstance(kernel, launch.CompiledKernel)
    return kernel.spec.tile


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that make times up: all tiles of tuning compile at once and give the same results."""
    monkeypatch.setattr(tune._Bench, "compile", lambda self, tiles, step: None)
    monkeypatch.setattr(tune._Bench, "same_results", lambda self, tile, rows: True)


def test_tuning_measures_every_regime_and_remembers_the_winner(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "candidates", lambda *given: tiles.candidates(*given)[:4])
    (outcome,) = tune.tune([PROBLEM, PROBLEM], effort=HASTE, show_progress=False)
    assert outcome.tried is not None and set(outcome.tried) == {regime.name for regime in tiles.REGIMES}
    assert set(outcome.tried.values()) == {4}
    assert outcome.microseconds is not None and all(b > 0 and a > 0 for b, a in outcome.microseconds.values())
    assert outcome.path is not None and outcome.path.parent == place
    assert [path.name for path in place.iterdir()] == [outcome.path.name], "candidates leave nothing in the cache"
    record, reasons = records.find(default_spec())
    assert record is not None and record.tile == outcome.tile and not reasons
    assert chosen_tile() == outcome.tile


class FakeTimes:
    """Measurements in which one tile takes a given share of the default's time."""

    def __init__(self, fast: Callable[[Tile, int], float]) -> None:
        self.fast = fast

    def __call__(
        self, bench: tune._Bench, tiles: Any, m: int, seconds: float, least: int, most: int
    ) -> list[list[float]]:
        noise = (1.0, 1.01, 0.99, 1.0, 1.0)
        return [[self.fast(tile, m) * noise[turn % 5] * 1e-3 for turn in range(15)] for tile in tiles]


def test_a_tile_that_is_clearly_faster_wins_and_one_within_the_noise_does_not(
    place: Path, nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = other_tile().prefetch
    monkeypatch.setattr(tune._Bench, "times", lambda *a: FakeTimes(lambda t, m: 0.9 if t.prefetch == wanted else 1)(*a))
    (outcome,) = tune.tune([PROBLEM], effort=HASTE, show_progress=False)
    assert outcome.tile == other_tile()
    monkeypatch.setattr(
        tune._Bench, "times", lambda *a: FakeTimes(lambda t, m: 0.99 if t.prefetch == wanted else 1)(*a)
    )
    (outcome,) = tune.tune([PROBLEM], effort=HASTE, show_progress=False)
    assert outcome.tile == outcome.default
    assert chosen_tile() == outcome.default, "the new record takes the old one's place"


def test_a_gain_in_one_regime_may_not_cost_an_earlier_one(
    place: Path, nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = default_spec().tile

    def seconds(tile: Tile, m: int) -> float:
        if tile.row_chunk == default.row_chunk:
            return 1.0
        return 0.5 if m >= 64 else 1.2

    monkeypatch.setattr(tune._Bench, "times", lambda *a: FakeTimes(seconds)(*a))
    (outcome,) = tune.tune([PROBLEM], effort=HASTE, show_progress=False)
    assert outcome.tile == default


def test_a_winner_that_a_last_comparison_does_not_confirm_is_dropped(
    place: Path, nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = default_spec().tile
    # The comparison is the only one that has two tiles and begins with the default.
    lucky = FakeTimes(lambda tile, m: 1.0 if tile == default else 0.5)
    sober = FakeTimes(lambda tile, m: 1.0)
    monkeypatch.setattr(tune._Bench, "times", lambda *a: (sober if len(a[1]) == 2 else lucky)(*a))
    (outcome,) = tune.tune([PROBLEM], effort=HASTE, show_progress=False)
    assert outcome.tile == default


def test_a_tile_with_other_results_is_never_chosen(
    place: Path, nothing_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = default_spec().tile
    monkeypatch.setattr(tune._Bench, "same_results", lambda self, tile, rows: tile == default)
    monkeypatch.setattr(tune._Bench, "times", lambda *a: FakeTimes(lambda t, m: 1 if t == default else 0.5)(*a))
    (outcome,) = tune.tune([PROBLEM], effort=HASTE, show_progress=False)
    assert outcome.tile == default


def test_outputs_are_compared_bit_for_bit(place: Path, tmp_path: Path) -> None:
    bench = tune._Bench(default_spec(), Path(os.path.realpath(tmp_path)))
    default, other = default_spec().tile, other_tile()
    bench.compile([default, other], lambda: None)
    assert bench.same_results(other, [1, 4])
    right = bench.kernels[other]
    bench.kernels[other] = lambda *a: right(*a).nextafter(torch.tensor(torch.inf))  # type: ignore[assignment]
    assert not bench.same_results(other, [4])


def test_a_record_is_used_once_per_problem_and_gives_the_same_bits(place: Path) -> None:
    default = default_spec().tile
    assert chosen_tile() == default
    bench = tune._Bench(default_spec(), place.parent)
    x, weight = bench.x[16], bench.copies[0]
    before = jit.choose(PROBLEM).kernel(x, *weight, bench.bias)
    remember(other_tile())
    assert jit.choose(PROBLEM).kernel.spec.tile == default, "what is chosen stays"  # type: ignore[attr-defined]
    assert chosen_tile() == other_tile()
    assert torch.equal(jit.choose(PROBLEM).kernel(x, *weight, bench.bias), before)


def edit(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: body | changes


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: {key: value for key, value in body.items() if key != name}


def tile_of(**changes: Any) -> dict[str, Any]:
    return asdict(other_tile()) | changes


SEALED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a later form": (edit(schema=records.SCHEMA + 1), "of form 2"),
    "another version": (edit(version="99.0"), "awqjit 99.0 measured it"),
    "another CPU": (edit(cpu="Abacus"), "another cpu"),
    "other threads": (edit(threads=4096), "another threads"),
    "another problem": (edit(problem="w4a8-bf16-k1-n1"), "another problem"),
    "another row": (edit(row="portable_too"), "another row"),
    "no tile": (without("tile"), "KeyError"),
    "a tile with a new field": (lambda body: edit(tile=tile_of(depth=1))(body), "other fields"),
    "a tile of text": (lambda body: edit(tile=tile_of(prefetch="0"))(body), "whole numbers"),
    "a tile of truth": (lambda body: edit(tile=tile_of(prefetch=True))(body), "whole numbers"),
    "a tile out of range": (lambda body: edit(tile=tile_of(rows=4096))(body), "Tile.rows"),
    "a tile that is not tried": (lambda body: edit(tile=tile_of(prefetch=77))(body), "not among the candidates"),
    "times that are none": (edit(microseconds=["fast"]), "AttributeError"),
}


@pytest.mark.parametrize("name", SEALED)
def test_a_whole_record_that_does_not_fit_is_passed_over_with_the_reason(
    place: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason = SEALED[name]
    path = remember(other_tile())
    body = change({key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"})
    path.write_text(json.dumps(body | {"sha256": records._digest(body)}))
    record, reasons = records.find(default_spec())
    assert record is None and len(reasons) == 1 and reason in reasons[0]
    with caplog.at_level(logging.WARNING, "awqjit"):
        assert chosen_tile() == default_spec().tile
    assert reason in caplog.text


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a changed digit": lambda path: path.write_text(path.read_text().replace("2.0", "3.0")),
    "not JSON": lambda path: path.write_bytes(os.urandom(300)),
    "a list": lambda path: path.write_text("[]"),
    "nested too deeply": lambda path: path.write_text("[" * 30_000),
    "too large": lambda path: path.write_text(" " * (records._MAX_BYTES + 1)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
    "writable by all": lambda path: path.chmod(0o666),
    "of another problem": lambda path: remember(other_tile(), replace(PROBLEM, bias=False)).replace(path),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_passed_over_and_verify_finds_and_removes_it(place: Path, name: str) -> None:
    path = remember(other_tile())
    DAMAGE[name](path)
    record, reasons = records.find(default_spec())
    assert record is None and len(reasons) == 1
    assert chosen_tile() == default_spec().tile
    own = upkeep.named_place(place)
    bad = [finding for finding in upkeep.verify(own) if finding.reason]
    assert [finding.item.path for finding in bad] == [path]
    upkeep.verify(own, remove=True)
    assert not os.path.lexists(path)


def test_a_record_in_a_place_that_others_can_write_is_not_believed(place: Path) -> None:
    remember(other_tile())
    place.chmod(0o777)
    assert records.find(default_spec())[0] is None


def test_the_cache_commands_know_records(place: Path) -> None:
    path = remember(other_tile())
    own = upkeep.named_place(place)
    (item,) = upkeep.items(place)
    assert (item.path, item.kind, item.bytes) == (path, "tuned", path.stat().st_size)
    assert [finding.reason for finding in upkeep.verify(own)] == [""]
    assert upkeep.described(item)[1]["threads"] == torch.get_num_threads()
    assert upkeep.prune(own, older_than=3600).removed == ()
    long_ago = path.stat().st_mtime - 7200
    os.utime(path, (long_ago, long_ago))
    assert [gone.path for gone in upkeep.prune(own, older_than=3600, dry_run=True).removed] == [path]
    assert chosen_tile() == other_tile()
    assert upkeep.prune(own, older_than=3600).removed == (), "what is used is kept"
    assert path in [gone.path for gone in upkeep.clear(own).removed]
    assert not path.exists()


def test_a_reader_finds_the_old_record_or_the_new_one_and_nothing_else_is_left(place: Path) -> None:
    path = remember(default_spec().tile)
    before = path.stat().st_ino
    assert remember(other_tile()) == path
    assert path.stat().st_ino != before and [entry.name for entry in place.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644


def test_without_the_tuned_kernel_the_default_one_runs_with_a_warning(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_tile() == default_spec().tile  # now it is in the cache
    remember(other_tile())
    monkeypatch.setenv("AWQJIT_JIT", "0")
    with pytest.warns(AwqJitWarning, match="a tuned kernel cannot be had"):
        assert chosen_tile() == default_spec().tile


def test_records_of_different_thread_counts_stand_side_by_side(place: Path) -> None:
    before = torch.get_num_threads()
    first = remember(other_tile())
    torch.set_num_threads(before + 1)
    try:
        assert records.find(default_spec()) == (None, ())
        assert remember(default_spec().tile) != first
    finally:
        torch.set_num_threads(before)
    assert chosen_tile() == other_tile()


def test_tuning_needs_a_compiler_and_a_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with config.override(jit="0"), pytest.raises(ConfigError, match="to tune is to compile"):
        tune.tune([PROBLEM])
    with config.override(kernel="torch"):
        (outcome,) = tune.tune([PROBLEM], show_progress=False)
    assert outcome.tile is None and outcome.path is None and "no tiles" in outcome.reason
    with pytest.raises(ArgumentError, match=r"Effort\.final"):
        tune.Effort(final=-1)
    monkeypatch.setattr(records.places, "places", tuple)
    with pytest.raises(ArgumentError, match="cache"):
        remember(other_tile())


def test_a_slug_cannot_be_taken_for_a_record() -> None:
    with pytest.raises(ArgumentError, match="slug"):
        store.Request("tuned-x", "", ())
