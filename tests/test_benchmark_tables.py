# SPDX-License-Identifier: Apache-2.0
"""Tables and the plot of the kernel benchmark from invented results, and ``awqjit bench``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("an sdist holds the tests, but not the benchmarks", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import kernel_tables, kernels, limit_tables, report, roofline  # noqa: E402
from benchmarks.plan import ONE_THREAD  # noqa: E402

# ---- tables from a result ----


def _cell(m: int, foreign: float = 0.0, section: str = "peers", **medians: float) -> dict[str, Any]:
    """An invented cell of nine rounds in which each contender always takes the same time."""
    entry = {"bytes": 1000, "copies": 3, "takes": "bf16", "arithmetic": "int8", "error": 0.01, "error_outliers": 0.02}
    return {
        "section": section,
        "k": 64,
        "n": 32,
        "group": 32,
        "dtype": "bf16",
        "m": m,
        "rounds": [{"gbs": 50.0, "ping_pong_ns": 40.0, "foreign": foreign}] * 9,
        "contenders": {
            name.replace("_", " "): entry | {"right": True, "medians": [time] * 9, "least": [time] * 9}
            for name, time in medians.items()
        },
    }


def _result(*cells: dict[str, Any]) -> dict[str, Any]:
    limits = [{"threads": 1, "gops": {"dot_int8": 1000.0}, "gbs": 30.0}]
    limits.append({"threads": 2, "gops": {"dot_int8": 2000.0}, "gbs": 50.0})
    return {
        "limits": limits,
        "limits_after": limits,
        "busy_limit": 0.05,
        "absent": {"g32 bf16": {"ggml Q4_0": "no library"}},
        "left_out": {"old": "dead"},
        "cells": list(cells),
    }


def test_a_table_compares_with_the_fastest_right_peer() -> None:
    cell = _cell(1, awqjit_w4a8=1e-6, awqjit_w4a16=2e-6, torch_int4pack=3e-6, dense_bf16=5e-6, dense_fp32=1e-7)
    cell["contenders"]["dense fp32"]["right"] = False
    table = kernel_tables.ratio_table(_result(cell), 32, "bf16")
    assert table.columns == ("", "M=1")
    assert table.rows[0] == ("awqjit w4a8, every peer", "3.00 (3.00 to 3.00)")
    assert ("awqjit w4a16, 16-bit peers", "1.50 (1.50 to 1.50)") in table.rows
    assert table.rows[2] == ("fastest peer", "torch int4pack")
    assert kernel_tables.wrong_cells(_result(cell)) == ["dense fp32 K=64 N=32 M=1 g=32 bf16: 1.0e-02"]


def test_a_cell_on_a_busy_machine_is_marked() -> None:
    result = _result(_cell(1, foreign=0.3, awqjit_w4a8=1e-6, dense_bf16=5e-6))
    assert kernel_tables.ratio_table(result, 32, "bf16").rows[0][1] == "5.00 (5.00 to 5.00)" + kernel_tables.BUSY_MARK


def test_ratios_are_split_by_the_memory_state_of_their_rounds() -> None:
    cell = _cell(1, awqjit_w4a8=1e-6, dense_bf16=2e-6)
    cell["rounds"] = [{"gbs": 50.0, "ping_pong_ns": 40.0 if i < 4 else 300.0, "foreign": 0.0} for i in range(9)]
    cell["contenders"]["dense bf16"]["medians"] = [2e-6] * 4 + [3e-6] * 5
    table = kernel_tables.state_table(_result(cell), 32, "bf16")
    assert table.columns == ("", "cores on one chiplet", "cores on two chiplets")
    assert table.rows[0] == ("awqjit w4a8, every peer, M=1", "2.00 (2.00 to 2.00)", "3.00 (3.00 to 3.00)")


def test_only_quiet_rounds_count_where_there_are_enough() -> None:
    cell = _cell(1, awqjit_w4a8=1e-6, dense_bf16=5e-6)
    cell["rounds"] = [{"gbs": 50.0, "foreign": 0.5 if index in (0, 4) else 0.0} for index in range(9)]
    for index in (0, 4):
        cell["contenders"]["awqjit w4a8"]["medians"][index] = 1e-3
    assert kernel_tables.counted(_result(cell), cell) == [1, 2, 3, 5, 6, 7, 8]
    assert kernel_tables.median(_result(cell), cell, "awqjit w4a8") == 1e-6
    assert kernel_tables.ratio_table(_result(cell), 32, "bf16").rows[0][1] == "5.00 (5.00 to 5.00)"


def test_shares_of_the_limits_are_what_was_done_over_what_can_be() -> None:
    reading = _cell(1, awqjit_w4a8=40e-9)
    assert limit_tables.bandwidth_shares(_result(reading), reading, "awqjit w4a8") == {
        "one chiplet": pytest.approx(0.5)  # 1000 bytes in 40 ns: 25 of 50 GB/s
    }
    computing = _cell(64, awqjit_w4a8=2 * 64 * 64 * 32 / 1500e9)
    assert limit_tables.share_of_peak(_result(computing), computing, "awqjit w4a8") == pytest.approx(0.75)
    result = _result(_cell(64, section="threads", **{"awqjit_w4a8": 1.0, "awqjit_w4a8" + ONE_THREAD: 1.9}))
    assert limit_tables.thread_table(result).rows == [("awqjit w4a8, K=64 N=32 M=64", "1.90", "2.00", "0.95")]


def test_the_sweep_shows_cliffs() -> None:
    result = _result(_cell(5, section="sweep", awqjit_w4a8=3.0), _cell(8, section="sweep", awqjit_w4a8=2.0))
    assert limit_tables.cliff_table(result).rows[0] == ("awqjit w4a8, K=64 N=32", "M=5 slower than M=8")


def test_a_result_survives_writing_and_every_absent_contender_is_in_the_tables(tmp_path: Path) -> None:
    result = _result(_cell(1, awqjit_w4a8=1e-6, dense_bf16=5e-6))
    kernels.write(result, tmp_path / "kernels.json")
    assert json.loads((tmp_path / "kernels.json").read_text()) == result
    assert kernel_tables.absent_table(result).rows == [("ggml Q4_0", "no library"), ("old", "dead")]
    assert {table.title for table in kernels.summary(result)} >= {"Largest relative error", "Limits", "Absent"}


def test_the_picture_names_its_run_and_holds_every_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [_cell(m, awqjit_w4a8=m * 1e-6, dense_bf16=m * 5e-6) | {"group": 128} for m in (1, 16)]
    result = _result(*cells) | {"machine": {"time": "2031-02-03T04:05:06+00:00"}}
    operations = 2 * 64 * 32
    assert roofline.points(result, "awqjit w4a8", 64, 32) == [
        (pytest.approx(m * operations / 1000), pytest.approx(operations / 1e-6 / 1e9)) for m in (1, 16)
    ]
    monkeypatch.setattr(report, "result_of_kernels", lambda: result)
    monkeypatch.setattr(report, "PICTURE", tmp_path / "roofline.svg")
    assert report.picture_is_old()
    pytest.importorskip("matplotlib")
    roofline.draw(result, tmp_path / "roofline.svg", 64, 32)
    assert not report.picture_is_old()
    assert roofline.source_of(tmp_path / "roofline.svg") == "2031-02-03T04:05:06+00:00"


def test_the_reports_write_what_the_result_says(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _result(_cell(1, awqjit_w4a8=1e-6, awqjit_w4a16=2e-6, dense_bf16=5e-6))
    monkeypatch.setattr(report, "result_of_kernels", lambda: result)
    assert "| awqjit w4a8, every peer | 5.00 (5.00 to 5.00) |" in report.kernel_ratios()
    assert "| old | dead |" in report.kernel_absent()


# ---- awqjit bench ----


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    for package in ("typer", "rich", "transformers"):
        pytest.importorskip(package)
    from awqjit.cli import bench

    monkeypatch.setattr(bench, "ROTATE_BYTES", 20_000)
    return bench


def test_bench_prints_every_contender_with_its_error(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from awqjit.cli import main

    assert main(["bench", "64x32", "--m", "1", "--m", "3", "--group-size", "32", "--seconds", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    present = ["w4a16", "w4a8", bench.DENSE, bench.INT4PACK]
    if bench.INT4PACK in found["absent"]:
        present.remove(bench.INT4PACK)
    assert [(row["m"], row["contender"]) for row in rows] == [(m, name) for m in (1, 3) for name in present]
    for row in rows:
        assert 0 < row["error"] < 0.02
        assert row["right"] and row["seconds"] > 0
        assert bool(row["kernel"]) == row["contender"].startswith("w4a")
        assert row["gops"] == pytest.approx(2 * row["m"] * 64 * 32 / row["seconds"] / 1e9)
        dense = next(one for one in rows if one["m"] == row["m"] and one["contender"] == bench.DENSE)
        assert row["over_dense"] == pytest.approx(dense["seconds"] / row["seconds"])


def test_bench_calls_a_wrong_kernel_wrong(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from awqjit.cli import main

    right = bench._int4

    def half_of_the_columns(*arguments: Any) -> Any:
        contender = right(*arguments)

        def call(x: Any, copy: int) -> Any:
            y = contender.call(x, copy)
            y[:, 16:] = 0
            return y

        return dataclasses.replace(contender, call=call)

    monkeypatch.setattr(bench, "_int4", half_of_the_columns)
    assert main(["bench", "64x32", "--m", "1", "--group-size", "32", "--seconds", "0"]) == 1
    printed = capsys.readouterr()
    assert "WRONG" in printed.out
    assert "not what its arithmetic allows" in printed.err


def test_bench_refuses_what_is_no_shape(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from awqjit.cli import main

    for shape in ("64", "64x", "0x32", "64xabc"):
        assert main(["bench", shape]) == 1
        assert f"SHAPES: got '{shape}', wanted in and out features" in capsys.readouterr().err
