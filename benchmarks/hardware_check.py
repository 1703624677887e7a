# SPDX-License-Identifier: Apache-2.0
"""One command for a machine that the project has not seen: what is there, does it work, how fast is it.

    python -m benchmarks.hardware_check

Looks for AMX, Intel GPUs and CUDA GPUs, runs the tests of what is there on it (nothing is emulated where the hardware
is), times one layer beside the peers that are installed, on 1, 2, 4 ... all cores, and writes a JSON report to send in.
What is not there is named in the report, and is no failure. Nothing is sent anywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from awqjit import machine
from benchmarks import device_times
from benchmarks.common import cpu_slug, stamp

ROOT = Path(__file__).parents[1]
REPORT = 1
"""The form of the report; a number that counts up."""

TEST_SECONDS, TIMING_SECONDS = 3600, 3600
MOST_FAILURES, MOST_TEXT = 20, 2000

console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Hardware:
    """One kind that is looked for: what was found, or why it cannot be used."""

    name: str
    found: str
    missing: str | None = None


def _amx() -> Hardware:
    (level,) = [one for one in machine.detect().levels() if one.name == "amx"] or [None]
    if level is None:
        return Hardware("AMX", "", f"an instruction set of x86-64, this is {machine.detect().architecture}")
    return Hardware("AMX", "tile registers granted by the operating system" if level.on else "", level.reason or None)


def _gpu(name: str, kind: str) -> Hardware:
    backend = getattr(torch, kind, None)
    if backend is None or not backend.is_available():
        return Hardware(name, "", f"torch {torch.__version__} finds none (is its build one for this device?)")
    names = [backend.get_device_name(i) for i in range(backend.device_count())]
    return Hardware(name, ", ".join(names))


def detect() -> dict[str, Hardware]:
    """Every kind by its short name, the CPU among them."""
    here = machine.detect()
    cores = f"{here.cpu}, {len(usable_cpus())} usable CPUs"
    return {
        "cpu": Hardware("CPU", cores),
        "amx": _amx(),
        "xpu": _gpu("Intel GPU", "xpu"),
        "cuda": _gpu("CUDA GPU", "cuda"),
    }


def usable_cpus() -> list[int]:
    """The CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Suite:
    """Tests that belong to one kind of hardware.

    Attributes:
        name: as the report calls it.
        needs: short names of hardware, one of which has to be there.
        patterns: of file names in ``tests``.
        select: ``pytest -k``.
        quick: the same for a quick run, which only shows that all parts work.
    """

    name: str
    needs: tuple[str, ...]
    patterns: tuple[str, ...]
    select: str = ""
    quick: str = ""


SUITES = (
    Suite("kernels of this CPU", ("cpu",), ("test_kernels.py",), quick="test_a_row_of_zeros_gives_the_bias"),
    # Rows that this CPU has are tested by test_kernels.py, those of AMX among them; the other file adds what is theirs.
    Suite("AMX, natively", ("amx",), ("test_kernels.py", "test_amx.py"), "amx", "test_w4a8_rows_agree_in_every_bit"),
    Suite("Intel GPU", ("xpu",), ("test_xpu*.py",)),
    Suite("Triton", ("cuda", "xpu"), ("test_triton*.py",)),
)


@dataclass
class Outcome:
    """What became of a suite or a timing run. ``missing``: why it did not run; ``error``: why it did not end well."""

    name: str
    missing: str | None = None
    error: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    result: dict[str, Any] | None = None

    @property
    def verdict(self) -> str:
        """``missing``, ``failed`` or ``passed``."""
        if self.missing:
            return "missing"
        bad = self.error or any(self.counts.get(kind) for kind in ("failures", "errors"))
        return "failed" if bad else "passed"


def read_junit(path: Path) -> Outcome:
    """Counts, the first failures with the end of their text, and reasons for skipping, of pytest's own XML."""
    found = Outcome("", counts={"tests": 0, "failures": 0, "errors": 0, "skipped": 0})
    for case in ET.parse(path).getroot().iter("testcase"):
        found.counts["tests"] += 1
        for part in case:
            if part.tag in ("failure", "error"):
                found.counts[part.tag + "s"] += 1
                text = (part.text or part.get("message") or "")[-MOST_TEXT:]
                if len(found.failures) < MOST_FAILURES:
                    found.failures.append({"test": f"{case.get('classname')}::{case.get('name')}", "text": text})
            elif part.tag == "skipped":
                found.counts["skipped"] += 1
                reason = part.get("message") or "no reason given"
                found.skipped[reason] = found.skipped.get(reason, 0) + 1
    return found


def run_suite(suite: Suite, here: dict[str, Hardware], quick: bool, tests: Path) -> Outcome:
    """Run the files of a suite that exist, in a process of their own."""
    absent = [here[name] for name in suite.needs if here[name].missing]
    if len(absent) == len(suite.needs):
        return Outcome(suite.name, missing="; ".join(f"no {one.name}: {one.missing}" for one in absent))
    files = sorted(str(path) for pattern in suite.patterns for path in tests.glob(pattern))
    if not files:
        return Outcome(suite.name, missing=f"no {' or '.join(suite.patterns)} in {tests}")
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            return Outcome(suite.name, missing=f"the package {module}: pip install -e '.[test]'")
    select = (suite.quick or suite.select) if quick else suite.select
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        ended, output = _run([*command, *(("-k", select) if select else ())], TEST_SECONDS)
        if not report.exists():
            return Outcome(suite.name, error=f"pytest {ended}: {output[-MOST_TEXT:]}")
        found = read_junit(report)
    found.name = suite.name
    # 0: all passed, 1: some failed, 5: nothing was selected.
    found.error = None if ended in ("ended with 0", "ended with 1") else f"pytest {ended}: {output[-MOST_TEXT:]}"
    return found


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """How a command ended, and what it said."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as stopped:
        said = stopped.stdout or b""
        return f"was stopped after {seconds:.0f} s", said.decode(errors="replace") if isinstance(said, bytes) else said
    return f"ended with {done.returncode}", done.stdout


def sweep(cpus: int) -> list[int]:
    """1, 2, 4 ... and all."""
    return sorted({*(1 << i for i in range(cpus.bit_length())), cpus})


def time_kernels(threads: int, quick: bool, home: Path | None) -> Outcome:
    """``benchmarks.kernels`` on so many threads, with every peer that is installed."""
    name = f"one layer, {threads} thread{'s' if threads > 1 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.json"
        command = [sys.executable, "-m", "benchmarks.kernels", "--sections", "peers", "--groups", "128"]
        command += ["--dtypes", "bf16", "--threads", str(threads), "--output", str(path)]
        shape = (
            ("896x4864", "--m", "1", "64", "--rounds", "2")
            if quick
            else ("4096x4096", "--m", "1", "4", "16", "64", "512")
        )
        command += ["--shapes", *shape, *(("--home", str(home)) if home else ())]
        ended, output = _run(command, TIMING_SECONDS)
        found = Outcome(name, result=json.loads(path.read_text()) if path.exists() else None)
    if ended != "ended with 0" or found.result is None:
        found.error = f"benchmarks.kernels {ended}: {output[-MOST_TEXT:]}"
    return found


def time_device(kind: str, hardware: Hardware, quick: bool) -> Outcome:
    """Layers on a GPU."""
    if hardware.missing:
        return Outcome(hardware.name, missing=hardware.missing)
    try:
        result = device_times.measure(kind, quick)
    except Exception as error:  # whatever a driver raises: the report is for those who cannot try it themselves
        return Outcome(hardware.name, error=f"{type(error).__name__}: {error}"[:MOST_TEXT])
    wrong = device_times.wrong(result)
    return Outcome(hardware.name, error=f"wrong results: {', '.join(wrong)}" if wrong else None, result=result)


def show_hardware(here: dict[str, Hardware]) -> None:
    table = Table(title="Hardware", title_justify="left")
    for column in ("kind", "found"):
        table.add_column(column, overflow="fold")
    for one in here.values():
        table.add_row(one.name, escape(one.found) if not one.missing else f"[yellow]not here[/]: {escape(one.missing)}")
    console.print(table)


def show(outcome: Outcome) -> None:
    """One line; of a failure, why."""
    color = {"missing": "yellow", "failed": "red", "passed": "green"}[outcome.verdict]
    why = outcome.missing or outcome.error or ", ".join(f"{count} {kind}" for kind, count in outcome.counts.items())
    console.print(f"[{color}]{outcome.verdict:8}[/] {escape(outcome.name)}{': ' + escape(why) if why else ''}")
    for failure in outcome.failures:
        console.print(f"         {escape(failure['test'])}")


def check(
    quick: bool,
    threads: Sequence[int],
    home: Path | None,
    tests: bool,
    timings: bool,
    tell: Callable[[Outcome], None],
) -> dict[str, Any]:
    """The whole check: the report, as JSON takes it.

    Args:
        quick: a small part of everything.
        threads: numbers of threads to time the CPU's kernels on.
        home: folder of the peers' environments, or None for the usual one.
        tests: whether to run the tests.
        timings: whether to time kernels.
        tell: called with each outcome as it comes.
    """
    here = detect()
    report: dict[str, Any] = {"report": REPORT, "quick": quick, "machine": stamp()}
    report |= {"hardware": {name: asdict(one) for name, one in here.items()}, "tests": [], "timings": []}
    steps: list[tuple[str, Callable[[], Outcome]]] = []
    if tests:
        steps += [("tests", lambda suite=suite: run_suite(suite, here, quick, ROOT / "tests")) for suite in SUITES]
    if timings:
        steps += [("timings", lambda count=count: time_kernels(count, quick, home)) for count in threads]
        steps += [("timings", lambda kind=kind: time_device(kind, here[kind], quick)) for kind in ("xpu", "cuda")]
    for part, step in steps:
        outcome = step()
        tell(outcome)
        report[part].append({"verdict": outcome.verdict, **asdict(outcome)})
    return report | {"machine_after": stamp()}


def main(
    out: Annotated[Path | None, typer.Option(help="The report's file. [default: hardware-<cpu>.json here]")] = None,
    quick: Annotated[bool, typer.Option(help="Minutes instead of hours; the figures mean nothing.")] = False,
    threads: Annotated[list[int] | None, typer.Option(help="Threads, repeatable. [default: 1, 2, 4 ... all]")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of the peers' environments.")] = None,
    tests: Annotated[bool, typer.Option(help="Run the tests.")] = True,
    timings: Annotated[bool, typer.Option(help="Time kernels.")] = True,
) -> None:
    """Test and time awqjit on this machine's hardware, and write a report to send in."""
    available = len(usable_cpus())
    wrong = [count for count in threads or () if not 1 <= count <= available]
    if wrong:
        raise typer.BadParameter(f"--threads {wrong[0]}: this process may use 1 to {available} CPUs")
    show_hardware(detect())
    report = check(quick, threads or sweep(available), home, tests, timings, show)
    path = out or Path(f"hardware-{cpu_slug()}.json")
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [one["name"] for part in ("tests", "timings") for one in report[part] if one["verdict"] == "failed"]
    console.print(f"written: {path}; please attach it to an issue of the project", soft_wrap=True)
    if failed:
        console.print(f"[red]failed[/]: {escape(', '.join(failed))}", soft_wrap=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
