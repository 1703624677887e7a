# SPDX-License-Identifier: Apache-2.0
"""`awqjit info`: every level, row, compiler and place, and why each is used or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for package in ("typer", "rich", "transformers"):
    pytest.importorskip(package)

from cache_commands import (  # noqa: E402, F401  (fixtures)
    folder_for_everyone,
    own_cache,
    place_of_everyone,
    run,
    run_json,
    stored,
)
from compilers import REAL, script  # noqa: E402

from awqjit import config, machine  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not REAL, reason="needs g++ or clang++"),
    pytest.mark.usefixtures("own_cache"),
]


def test_info_says_why_each_level_and_row_is_on_or_off(capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(max_isa="avx2"):
        found = run_json(capsys, "info")
    assert list(found["cpu"]["levels"]) == [name for name, _ in machine.ISA_LEVELS]
    assert found["cpu"]["levels"]["portable"] == "on"
    above = [name for name, _ in machine.ISA_LEVELS[2:]]
    for level in machine.detect().levels():  # as they are without the variable
        if level.name in above and level.on:
            assert "hidden by AWQJIT_MAX_ISA=avx2" in found["cpu"]["levels"][level.name]
        elif level.name in above:
            assert found["cpu"]["levels"][level.name] != "on"
    assert "amx_tile" in found["cpu"]["levels"]["amx"]
    assert found["kernel"]["portable"] == "on for w4a8 and w4a16"
    reason = found["kernel"]["avx512_vnni"]
    assert any(text in reason for text in ("hidden by AWQJIT_MAX_ISA=avx2", "this CPU has no", "needs x86_64"))
    with config.override(max_isa="sse9"):
        assert "one of portable" in run_json(capsys, "info")["cpu"]["error"]


def test_info_names_every_compiler_and_why_it_is_not_used(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(folder / "mine", "echo I am broken; exit 3")))
    works = script(folder / "g++", 'exec "$REAL" "$@"')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    lines = {name: text for row in run_json(capsys, "info")["compiler"] for name, text in row.items()}
    assert list(lines)[:3] == ["CXX", "g++", "clang++"]
    assert "mine" in lines["CXX"] and "used" not in lines["CXX"] and lines["CXX"].count(":") >= 2
    assert lines["g++"].startswith(f"{works}: used: ")
    assert "not tried: g++ works" in lines["clang++"]
    monkeypatch.setenv("AWQJIT_JIT", "0")
    assert run_json(capsys, "info")["compiler"] == [{"none": "AWQJIT_JIT=0 forbids compiling"}]


def test_info_says_of_each_place_whether_it_is_used_why_and_what_it_holds(
    folder: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(1)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(folder / "open"))
    lines = {name: text for row in run_json(capsys, "info")["cache"] for name, text in row.items()}
    assert "not used" in lines[str(folder / "open")] and "written by everyone" in lines[str(folder / "open")]
    assert lines[str(place)].startswith("AWQJIT_CACHE_DIR; read and written; entries: 1, ")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    threads = run_json(capsys, "info")["threads"]
    assert threads["OMP_NUM_THREADS"] == "2" and threads["compilers at once"] >= 1
    assert len(run(capsys, "info").splitlines()) <= 60
