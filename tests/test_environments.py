# SPDX-License-Identifier: Apache-2.0
"""Every test runs, and runs once: the table of environments, tox.ini and the files agree."""

from __future__ import annotations

import configparser
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from environments import ENVIRONMENTS, FOLDER, environments_of

ROOT = FOLDER.parent
FILES = sorted(path.name for path in FOLDER.rglob("test_*.py"))


def tox() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return parser


@pytest.mark.parametrize("name", FILES)
def test_a_file_belongs_to_exactly_one_environment(name: str) -> None:
    assert len(environments_of(name)) == 1, f"{name} is in {environments_of(name)}: see tests/environments.py"


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_environment_has_files(environment: str) -> None:
    assert [name for name in FILES if environment in environments_of(name)]


def test_patterns_without_a_star_name_files_that_are_there() -> None:
    names = [pattern for patterns in ENVIRONMENTS.values() for pattern in patterns if "*" not in pattern]
    assert [name for name in names if not (FOLDER / name).is_file()] == []


def test_tests_lie_in_one_folder_so_that_names_are_enough() -> None:
    assert {path.parent for path in FOLDER.rglob("test_*.py")} == {FOLDER}
    assert [name for name in FILES if not fnmatch(name, "test_*.py")] == []


def test_tox_runs_every_environment() -> None:
    parser = tox()
    listed = [name.strip() for name in parser["tox"]["env_list"].split(",")]
    assert len(listed) == len(set(listed))
    left_out = {"vllm"}  # CONTRIBUTING.md says why
    assert set(ENVIRONMENTS) - left_out == set(listed) - {"lint", "types"}
    for name in ENVIRONMENTS:
        section = f"testenv:{name}"
        commands = parser.get(section, "commands", fallback=parser["testenv"]["commands"])
        assert "--environment {env_name}" in commands, name


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return {Path(line.partition("::")[0]).name for line in done.stdout.splitlines() if "::" in line}


def test_pytest_collects_the_files_of_one_environment() -> None:
    assert collected("--environment", "faults") == {name for name in FILES if environments_of(name) == ["faults"]}


def test_an_environment_that_is_not_there_is_refused() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--environment", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 4 and "invalid choice: 'nothing'" in done.stderr
