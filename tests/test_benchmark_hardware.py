# SPDX-License-Identifier: Apache-2.0
"""The check for machines that the project has not seen: it works here, and says what is not here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("an sdist holds the tests, but not the benchmarks", allow_module_level=True)
pytest.importorskip("typer")
pytest.importorskip("rich")
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from awqjit import machine  # noqa: E402
from benchmarks import device_times, hardware_check  # noqa: E402
from benchmarks.hardware_check import Hardware, Outcome, Suite  # noqa: E402

HERE = {"cpu": Hardware("CPU", "some"), "amx": Hardware("AMX", "", "no such bit in CPUID")}

FAILING = Suite("failing", ("cpu",), ("test_bad.py",))


def folder_of_tests(folder: Path) -> Path:
    (folder / "test_good.py").write_text(
        "import pytest\ndef test_one(): pass\ndef test_two(): pass\ndef test_three(): pytest.skip('no such thing')\n"
    )
    (folder / "test_bad.py").write_text("def test_sum():\n    assert 1 + 1 == 3\n")
    (folder / "test_broken.py").write_text("import a_package_that_nobody_has\n")
    return folder


def run(pattern: str, folder: Path, **changed: str) -> Outcome:
    suite = Suite("a suite", ("cpu",), (pattern,), **changed)
    return hardware_check.run_suite(suite, HERE, False, folder_of_tests(folder))


@pytest.mark.parametrize(
    ("cpus", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (128, [1, 2, 4, 8, 16, 32, 64, 128])]
)
def test_threads_are_doubled_up_to_all(cpus: int, counts: list[int]) -> None:
    assert hardware_check.sweep(cpus) == counts


def test_each_kind_of_hardware_is_found_or_its_absence_explained() -> None:
    found = hardware_check.detect()
    assert set(found) == {"cpu", "amx", "xpu", "cuda"}
    assert all(bool(one.found) != bool(one.missing) for one in found.values()), found
    assert not found["cpu"].missing
    assert bool(found["amx"].missing) != ("amx_tile" in machine.detect().features)
    assert bool(found["cuda"].missing) != torch.cuda.is_available()


def test_a_suite_counts_what_passed_and_why_tests_were_skipped(tmp_path: Path) -> None:
    found = run("test_good.py", tmp_path)
    assert found.verdict == "passed"
    assert found.counts == {"tests": 3, "failures": 0, "errors": 0, "skipped": 1}
    assert list(found.skipped) == ["no such thing"]


def test_a_failure_is_kept_with_its_text(tmp_path: Path) -> None:
    found = run("test_bad.py", tmp_path)
    assert found.verdict == "failed" and found.counts["failures"] == 1
    (failure,) = found.failures
    assert failure["test"].endswith("test_sum") and "assert (1 + 1) == 3" in failure["text"]


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    found = run("test_broken.py", tmp_path)
    assert found.verdict == "failed" and "a_package_that_nobody_has" in str(found)


def test_tests_that_are_not_there_pass_for_nothing(tmp_path: Path) -> None:
    assert run("test_none_such*.py", tmp_path).missing == f"no test_none_such*.py in {tmp_path}"
    selected = run("test_good.py", tmp_path, select="no_test_has_this_name")
    assert selected.verdict == "failed" and "ended with 5" in str(selected.error)


def test_a_suite_without_its_hardware_says_so(tmp_path: Path) -> None:
    found = hardware_check.run_suite(Suite("tiles", ("amx",), ("test_good.py",)), HERE, False, tmp_path)
    assert found.verdict == "missing" and found.missing == "no AMX: no such bit in CPUID"


def test_every_suite_finds_its_files_and_names_known_hardware() -> None:
    for suite in hardware_check.SUITES:
        assert set(suite.needs) <= set(hardware_check.detect())
        assert [path for pattern in suite.patterns for path in (ROOT / "tests").glob(pattern)], suite.name


def test_a_command_that_takes_too_long_is_stopped() -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    assert hardware_check._run([sys.executable, "-c", code], 3) == ("was stopped after 3 s", "begun\n")


def test_layers_on_a_device_are_right_and_timed() -> None:
    """The code for GPUs, with a device that is everywhere."""
    result = device_times.measure("cpu", quick=True)
    assert not result["absent"] and not device_times.wrong(result)
    for cell in result["cells"]:
        assert set(cell["contenders"]) == {"w4a16", "w4a8", "dense bf16"}
        assert all(one["seconds"]["median"] > 0 for one in cell["contenders"].values())


def test_a_device_s_wrong_result_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_times, "TOLERANCE", 1e-9)
    found = hardware_check.time_device("cpu", HERE["cpu"], quick=True)
    assert found.verdict == "failed" and "w4a8 at m=1" in str(found.error)


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(hardware_check.main)
    return made


def test_the_command_writes_a_report_of_everything(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = CliRunner().invoke(app(), ["--quick", "--no-tests", "--threads", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["report"] == hardware_check.REPORT and report["machine"]["cpu"]
    assert [one["name"] for one in report["timings"]] == ["one layer, 1 thread", "Intel GPU", "CUDA GPU"]
    (layer, *_) = report["timings"]
    assert layer["verdict"] == "passed" and layer["result"]["cells"]
    assert "attach it to an issue" in result.output


def test_the_command_fails_where_a_test_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    folder_of_tests(tmp_path / "tests")
    monkeypatch.setattr(hardware_check, "ROOT", tmp_path)
    monkeypatch.setattr(hardware_check, "SUITES", (FAILING,))
    out = tmp_path / "report.json"
    result = CliRunner().invoke(app(), ["--no-timings", "--out", str(out)])
    assert result.exit_code == 1 and "failed: failing" in result.output
    assert json.loads(out.read_text())["tests"][0]["verdict"] == "failed"


def test_threads_beyond_the_machine_s_are_refused() -> None:
    result = CliRunner().invoke(app(), ["--threads", "100000"])
    assert result.exit_code == 2 and "--threads 100000" in result.output
