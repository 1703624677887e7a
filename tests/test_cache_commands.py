# SPDX-License-Identifier: Apache-2.0
"""`awqjit cache`: what its commands show, what they remove, what they leave alone."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

for package in ("typer", "rich", "transformers"):
    pytest.importorskip(package)

import typer.main  # noqa: E402
from cache_commands import (  # noqa: E402, F401  (fixtures)
    DAY,
    ROOT,
    contents,
    folder_for_everyone,
    kernel,
    names,
    own_cache,
    place_of_everyone,
    run,
    run_json,
    stored,
)
from compilers import REAL, counting, number_of  # noqa: E402
from faults import STRANGER, in_child, needs_root, wait_for  # noqa: E402

from awqjit import store, upkeep  # noqa: E402
from awqjit.cache import Artifact, Request, fetch  # noqa: E402
from awqjit.cli.app import app  # noqa: E402
from awqjit.errors import ArgumentError  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not REAL, reason="needs g++ or clang++"),
    pytest.mark.usefixtures("own_cache"),
]

# ---- last use ---------------------------------------------------------------------------------------------------


def test_a_fetch_records_its_time_and_changes_no_byte(place: Path) -> None:
    found = stored(1, days=40)
    before, library = contents(found.directory), found.path.stat()
    (old,) = upkeep.items(place)
    assert 39 * DAY < time.time() - old.used < 41 * DAY
    assert fetch(kernel(1)).origin == "cache"
    (new,) = upkeep.items(place)
    assert abs(time.time() - new.used) < 600 and new.built == old.built
    assert contents(found.directory) == before
    after = found.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (library.st_ino, library.st_mtime_ns)


def test_a_kernel_in_constant_use_is_touched_once_an_hour(place: Path) -> None:
    meta = stored(1, days=600 / DAY).directory / store.META
    before = meta.stat().st_mtime_ns
    fetch(kernel(1))
    assert meta.stat().st_mtime_ns == before


@needs_root
def test_where_the_time_cannot_be_recorded_kernels_are_still_found(place: Path) -> None:
    found = stored(1, days=40)
    before = (found.directory / store.META).stat().st_mtime_ns
    answer = in_child(lambda: (fetch(kernel(1)).origin, number_of(found.path)), STRANGER)
    assert answer == ("cache", 1)
    assert (found.directory / store.META).stat().st_mtime_ns == before


# ---- list and show ----------------------------------------------------------------------------------------------


def test_list_shows_sizes_ages_and_last_use_of_every_place(
    folder: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(folder / "baked"))
    stored(2)
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(place))
    one = stored(1, days=3)
    monkeypatch.setenv("AWQJIT_CACHE_PATH", f"{folder / 'baked'}{os.pathsep}{folder / 'absent'}")
    baked, absent, own = run_json(capsys, "cache", "list")
    assert (names(baked["items"]), baked["use"]) == (["number2"], "read only")
    assert (absent["items"], absent["use"], absent["reason"]) == ([], "not used", "does not exist")
    assert (own["origin"], own["use"]) == ("AWQJIT_CACHE_DIR", "read and written")
    (item,) = own["items"]
    assert item["name"] == one.directory.name and item["kind"] == "kernel"
    assert item["bytes"] == sum(path.stat().st_size for path in one.directory.iterdir())
    text = run(capsys, "cache", "list")
    assert one.directory.name in text and "3 d" in text and "kB" in text and "does not exist" in text
    assert names(run_json(capsys, "cache", "list", "--dir", place)[0]["items"]) == ["number1"]


def test_show_tells_all_that_is_known_of_a_kernel(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = stored(1)
    (row,) = run_json(capsys, "cache", "show", "number")
    assert (row["sound"], row["reason"], row["directory"]) == (True, "", str(found.directory))
    assert row["meta"]["slug"] == "number1" and row["meta"]["size"] == found.path.stat().st_size
    assert "-ffp-contract=off" in run(capsys, "cache", "show", found.directory.name)
    found.path.write_bytes(b"")
    assert "bytes instead of" in run_json(capsys, "cache", "show", "number1")[0]["reason"]
    assert "awqjit cache list" in run(capsys, "cache", "show", "other", code=1)


# ---- verify -----------------------------------------------------------------------------------------------------


def damage(found: Artifact, how: str, place: Path) -> None:
    directory = found.directory
    if how == "truncated":
        os.truncate(found.path, found.path.stat().st_size // 2)
    elif how == "a bit flipped":
        content = bytearray(found.path.read_bytes())
        content[len(content) // 2] ^= 1
        found.path.write_bytes(content)
    elif how == "another kernel's":
        other = fetch(kernel(100))
        shutil.rmtree(directory)
        shutil.copytree(other.directory, directory)
    elif how == "another source":
        (directory / store.SOURCE).write_text("int other;")
    elif how == "no meta.json":
        (directory / store.META).unlink()
    elif how == "a dangling link":
        shutil.rmtree(directory)
        directory.symlink_to(place / "nowhere")


DAMAGES = {
    "truncated": "bytes instead of",
    "a bit flipped": "sha256",
    "another kernel's": "holds another kernel: number100",
    "another source": "kernel.cpp is not what",
    "no meta.json": "meta.json",
    "a dangling link": "symbolic link",
}


def test_verify_finds_every_kind_of_damage_and_removes_it_on_request(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = stored(0)
    assert run(capsys, "cache", "verify").endswith("1 sound, 0 damaged\n")
    for number, how in enumerate(DAMAGES, start=1):
        damage(stored(number), how, place)
    (report,) = run_json(capsys, "cache", "verify", code=1)
    reasons = {item["name"].rpartition("-")[0]: item["reason"] for item in report["items"]}
    for number, (how, text) in enumerate(DAMAGES.items(), start=1):
        assert text in reasons[f"number{number}"], how
    assert reasons["number0"] == reasons["number100"] == ""
    assert "damaged" in run(capsys, "cache", "verify", code=1)
    (report,) = run_json(capsys, "cache", "verify", "--remove")
    assert {item["removed"] for item in report["items"] if item["reason"]} == {True}
    assert names(run_json(capsys, "cache", "list")[0]["items"]) == ["number0", "number100"]
    assert sound.path.exists() and fetch(kernel(1)).origin == "built"
    assert run(capsys, "cache", "verify").endswith("3 sound, 0 damaged\n")


# ---- prune and clear --------------------------------------------------------------------------------------------


def test_a_size_cap_drops_the_least_recently_used(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, days in ((1, 9), (2, 20), (3, 1), (4, 30)):
        stored(number, days)
    fetch(kernel(4))  # so it is the most recently used
    size = max(item.bytes for item in upkeep.items(place))
    cap = f"{2 * size + size // 2}B"
    done = run_json(capsys, "cache", "prune", "--max-size", cap, "--dry-run")
    assert (names(done["removed"]), len(upkeep.items(place))) == (["number2", "number1"], 4)
    done = run_json(capsys, "cache", "prune", "--max-size", cap)
    assert (names(done["removed"]), names(done["kept"])) == (["number2", "number1"], ["number3", "number4"])
    assert done["kept_bytes"] == sum(item.bytes for item in upkeep.items(place)) <= 2 * size
    assert names(run_json(capsys, "cache", "prune", "--max-size", "1GB")["removed"]) == []


def test_an_age_limit_drops_what_was_not_used_for_so_long(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, days in ((1, 29), (2, 31)):
        stored(number, days)
    fetch_failing()
    (failed,) = place.glob("failed-*")
    assert "number2" in run(capsys, "cache", "prune", "--older-than", "30d")
    assert names([item.to_dict() for item in upkeep.items(place)]) == [failed.name.rpartition("-")[0], "number1"]
    os.utime(failed, (1, 1))
    assert names(run_json(capsys, "cache", "prune", "--older-than", "4w")["removed"]) == ["failed-broken", "number1"]


def fetch_failing() -> None:
    with pytest.raises(Exception, match="compiling the kernel broken failed"):
        fetch(Request("broken", "?", ()))


@pytest.mark.parametrize("text", ["200", "MB", "-1MB", "2 parsecs", ""])
def test_a_size_without_a_unit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ArgumentError, match="for example 200MB"):
        upkeep.parse_size(text)


def test_sizes_and_ages_have_the_units_people_write() -> None:
    assert [upkeep.parse_size(text) for text in ("7B", "1.5kB", "200MB", "1 GiB")] == [7, 1500, 200_000_000, 1 << 30]
    assert [upkeep.parse_age(text) for text in ("90m", "12h", "30d", "2w")] == [5400, 43200, 30 * DAY, 14 * DAY]
    with pytest.raises(ArgumentError, match="for example 30d"):
        upkeep.parse_age("30")


def test_a_limit_must_be_given_and_the_place_must_be_ones_own(
    folder: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(1)
    assert "--max-size" in run(capsys, "cache", "prune", code=1)
    assert "existing directory" in run(capsys, "cache", "clear", "--dir", folder / "absent", code=1)
    place.chmod(0o777)
    for command in (["clear"], ["prune", "--max-size", "0B"], ["verify", "--remove"]):
        assert "written by everyone" in run(capsys, "cache", *command, "--dir", place, code=1)
    assert len(upkeep.items(place)) == 1
    (folder / "file").touch()
    monkeypatch.setenv("HOME", str(folder / "file"))
    assert "name one with --dir" in run(capsys, "cache", "clear", code=1)


def test_clear_removes_all_kernels_and_nothing_that_is_not_the_caches(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(1)
    fetch_failing()
    strange = place / "photos-0123456789abcdef"
    strange.mkdir()
    (strange / "cat.jpg").touch()
    (place / "models").mkdir()
    (place / "models" / "weights").touch()
    young, old = place / store.passing_name("build"), place / store.passing_name("build")
    for directory in (young, old, place / store.passing_name("own"), place / store.passing_name("stale")):
        directory.mkdir()
        (directory / store.SOURCE).touch()
    os.utime(old, (1, 1))
    assert "4 would be removed" in run(capsys, "cache", "clear", "--dry-run")
    done = run_json(capsys, "cache", "clear")
    assert [item["name"] for item in done["kept"]] == [young.name]
    left = sorted(path.name for path in place.iterdir())
    assert left == sorted(["locks", "models", strange.name, young.name])
    assert (strange / "cat.jpg").exists() and (place / "models" / "weights").exists()


def test_a_cache_that_does_not_exist_yet_is_empty(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    for command in (["list"], ["verify"], ["prune", "--max-size", "0B"], ["clear"]):
        run(capsys, "cache", *command)
    assert not place.exists()


def start(code: str) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_another_process_is_building_is_left_alone(
    folder: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, runs = counting(folder / "c++")
    go = folder / "go"
    compiler.write_text(compiler.read_text().replace("sleep 0", f"while [ ! -e {go} ]; do sleep 0.1; done"))
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    builder = start(
        "from awqjit.cache import *\nfrom compilers import *\n"
        "found = fetch(Request('number7', number_source(7), ()))\nprint(found.origin, number_of(found.path))"
    )
    try:
        wait_for(runs)
        (building,) = place.glob("build-*")
        for command in (["clear"], ["prune", "--max-size", "0B", "--older-than", "0m"], ["verify", "--remove"]):
            run(capsys, "cache", *command)
        assert building.is_dir()
    finally:
        go.touch()
        output, errors = builder.communicate(timeout=100)
    assert output.split() == ["built", "7"], errors
    assert names([item.to_dict() for item in upkeep.items(place)]) == ["number7"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_kernel_that_is_removed_still_runs_where_it_is_loaded(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = stored(7)
    user = start(
        f"import ctypes\nlibrary = ctypes.CDLL({str(found.path)!r})\nprint('loaded', flush=True)\ninput()\n"
        "maps = [line for line in open('/proc/self/maps') if 'kernel.so' in line]\n"
        "print(library.number(), all('(deleted)' in line for line in maps) and len(maps) > 0)"
    )
    assert user.stdout is not None and user.stdout.readline() == "loaded\n"
    assert names(run_json(capsys, "cache", "prune", "--max-size", "0B")["removed"]) == ["number7"]
    output, errors = user.communicate("\n", timeout=100)
    assert output.split() == ["7", "True"], errors


def test_clearing_while_others_fetch_gives_right_answers_and_no_false_alarm(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(7)
    done = threading.Event()
    failures: list[str] = []

    def keep_clearing() -> None:
        while not done.wait(0.02):
            failures.extend(upkeep.clear(upkeep.named_place(place)).failed)

    cleaner = threading.Thread(target=keep_clearing)
    with caplog.at_level(logging.WARNING, "awqjit"):
        cleaner.start()
        try:
            for _ in range(15):
                for _ in range(20):  # a library may go between the fetch and the load
                    try:
                        assert number_of(fetch(kernel(7)).path) == 7
                        break
                    except FileNotFoundError:
                        continue
                else:
                    pytest.fail("not found twenty times in a row")
        finally:
            done.set()
            cleaner.join()
    assert failures == [] and not [record for record in caplog.records if "damaged" in record.getMessage()]


# ---- the documentation's commands -------------------------------------------------------------------------------


def test_the_documentation_shows_only_commands_and_options_that_exist() -> None:
    group: Any = typer.main.get_command(app)
    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in group.commands["cache"].commands.items()
    }
    shown = re.findall(r"awqjit cache (\w+)([^\n`]*)", (ROOT / "docs" / "cache.md").read_text(encoding="utf-8"))
    assert {name for name, _ in shown} == known.keys()
    for name, rest in shown:
        assert set(re.findall(r"--[a-z-]+", rest)) <= known[name], f"awqjit cache {name}{rest}"
