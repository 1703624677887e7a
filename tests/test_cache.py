# SPDX-License-Identifier: Apache-2.0
"""The kernel cache within one process: what is found, what is rebuilt, what is refused, what an error says."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import pickle
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest
from compilers import REAL, counting, kernel_script, number_of, number_source, script

from awqjit import cache, config, places, store, toolchain
from awqjit.cache import Request, fetch
from awqjit.errors import (
    ArgumentError,
    AwqJitWarning,
    CompileError,
    KernelMissingError,
    NoCompilerError,
)

pytestmark = pytest.mark.skipif(not REAL, reason="needs g++ or clang++")

SEVEN = Request("number", number_source(7), ())
EIGHT = Request("number", number_source(8), ())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and home directory of this test's own."""
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    for name in ("CXX", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_private", places._Private())
    monkeypatch.setattr(places, "_warned", set())
    toolchain.forget()
    yield tmp_path / "home"
    toolchain.forget()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "candidates", lambda: (toolchain.Candidate("g++", ("/nowhere/g++",)),))


def kinds(place: Path) -> list[str]:
    """What lies in a cache, hashes left out."""
    return sorted(path.name[:-17] if path.name[-17:-16] == "-" else path.name for path in place.iterdir())


def test_a_kernel_is_built_once_and_then_found(place: Path) -> None:
    built = fetch(SEVEN)
    assert built.origin == "built" and built.seconds > 0 and number_of(built.path) == 7
    found = fetch(SEVEN)
    assert (found.path, found.origin, found.seconds) == (built.path, "cache", 0)
    assert kinds(place) == ["locks", "number"]
    assert sorted(path.name for path in built.directory.iterdir()) == [
        "build.log",
        "kernel.cpp",
        "kernel.so",
        "meta.json",
    ]
    assert (built.directory / "kernel.cpp").read_text() == SEVEN.source
    meta = json.loads((built.directory / "meta.json").read_text())
    assert meta["command"] == list(toolchain.neutral_command(()))
    assert "-ffp-contract=off" in (built.directory / "build.log").read_text()


def test_a_kernel_is_found_without_starting_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(SEVEN)
    toolchain.forget()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch(SEVEN).origin == "cache"


def test_source_flags_and_compiler_make_different_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {fetch(request).path for request in (SEVEN, EIGHT, Request("number", SEVEN.source, ("-DX",)))}
    monkeypatch.setenv("AWQJIT_CXX", f"{REAL} -DY")
    paths.add(fetch(SEVEN).path)
    assert len(paths) == 4
    assert fetch(SEVEN).path in paths


def test_a_replaced_compiler_of_the_same_version_keeps_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = script(tmp_path / "c++", 'exec "$REAL" "$@"')
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    first = fetch(SEVEN)
    os.utime(compiler, (1, 1))
    assert fetch(SEVEN) == cache.Artifact(first.path, first.directory, 0.0, "cache")


@pytest.mark.parametrize("slug", ["", "a/b", "../x", ".hidden", "a b", "-a", "x" * 161, "failed-x", "build-x"])
def test_a_slug_that_is_no_plain_file_name_is_refused(slug: str) -> None:
    with pytest.raises(ArgumentError, match="slug"):
        Request(slug, "", ())


def test_spaces_and_non_ascii_in_paths_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "ein Pfad — mit ‹Zeichen›"
    odd.mkdir()
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(odd / "cäche dir"))
    monkeypatch.setenv("AWQJIT_CXX", str(script(odd / "c++ compiler", 'exec "$REAL" "$@"')))
    request = Request("number", "// größer\n" + SEVEN.source, ())
    assert number_of(fetch(request).path) == 7
    assert fetch(request).origin == "cache"


# Damage: each must be noticed, reported once, and replaced by a sound kernel.


def rewrite(path: Path, content: bytes) -> None:
    """Replace a file's content as damage does: in place."""
    path.write_bytes(content)


def cut(bytes_left: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda directory: os.truncate(directory / "kernel.so", bytes_left((directory / "kernel.so").stat().st_size))


def flip_a_bit(directory: Path) -> None:
    content = bytearray((directory / "kernel.so").read_bytes())
    content[len(content) // 2] ^= 1
    rewrite(directory / "kernel.so", bytes(content))


def swap_library(directory: Path) -> None:
    rewrite(directory / "kernel.so", fetch(EIGHT).path.read_bytes())


def swap_directory(directory: Path) -> None:
    other = fetch(EIGHT).directory
    shutil.rmtree(directory)
    other.rename(directory)


def directory_for_file(directory: Path) -> None:
    (directory / "kernel.so").unlink()
    (directory / "kernel.so").mkdir()


def link_for_file(directory: Path) -> None:
    (directory / "kernel.so").rename(directory / "elsewhere.so")
    (directory / "kernel.so").symlink_to("elsewhere.so")


def pipe_for_file(directory: Path) -> None:
    (directory / "meta.json").unlink()
    os.mkfifo(directory / "meta.json")


def file_for_directory(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("not a directory")


def edit_meta(**changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        meta = json.loads((directory / "meta.json").read_text()) | changes
        (directory / "meta.json").write_text(json.dumps(meta))

    return edit


def writable_for_all(directory: Path) -> None:
    (directory / "kernel.so").chmod(0o777)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated to nothing": cut(lambda size: 0),
    "truncated to a byte": cut(lambda size: 1),
    "truncated to half": cut(lambda size: size // 2),
    "truncated by a byte": cut(lambda size: size - 1),
    "grown": cut(lambda size: size + 1),
    "zeroed": lambda directory: rewrite(directory / "kernel.so", bytes((directory / "kernel.so").stat().st_size)),
    "a bit flipped": flip_a_bit,
    "another kernel's library": swap_library,
    "text": lambda directory: rewrite(directory / "kernel.so", b"not a library"),
    "no library": lambda directory: (directory / "kernel.so").unlink(),
    "a directory for the library": directory_for_file,
    "a link for the library": link_for_file,
    "a library all can write": writable_for_all,
    "no meta.json": lambda directory: (directory / "meta.json").unlink(),
    "an empty meta.json": lambda directory: rewrite(directory / "meta.json", b""),
    "a binary meta.json": lambda directory: rewrite(directory / "meta.json", b"\xff\xfe\0"),
    "a meta.json that is a list": lambda directory: rewrite(directory / "meta.json", b"[]"),
    "a deeply nested meta.json": lambda directory: rewrite(directory / "meta.json", b"[" * 100_000),
    "a pipe for meta.json": pipe_for_file,
    "a wrong size": edit_meta(size=-1),
    "no size": edit_meta(size=None),
    "no checksum": edit_meta(sha256=None),
    "a file for the directory": file_for_directory,
    "an empty directory": lambda directory: [path.unlink() for path in directory.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_kernel_is_reported_once_and_built_again(
    damage: Callable[[Path], None], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = fetch(SEVEN).directory
    damage(directory)
    with caplog.at_level(logging.WARNING, "awqjit"):
        again = fetch(SEVEN)
    assert (again.origin, again.directory) == ("built", directory)
    assert number_of(again.path) == 7
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(directory) in caplog.text
    assert fetch(SEVEN).origin == "cache"
    assert set(kinds(place)) == {"locks", "number"}


@pytest.mark.parametrize("damage", [swap_directory, edit_meta(source_sha256="0"), edit_meta(schema=0)])
def test_a_directory_that_holds_another_kernel_is_replaced(damage: Callable[[Path], None]) -> None:
    directory = fetch(SEVEN).directory
    damage(directory)
    again = fetch(SEVEN)
    assert again.origin == "built" and number_of(again.path) == 7
    assert number_of(fetch(EIGHT).path) == 8


def test_a_library_that_is_not_what_was_built_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    evil = f'#include <cstdio>\n__attribute__((constructor)) static void run() {{ fclose(fopen("{marker}", "w")); }}\n'
    planted = fetch(Request("planted", evil + number_source(6), ())).path
    number_of(planted)
    assert marker.exists()  # the library does what it should not
    marker.unlink()
    target = fetch(SEVEN).path
    shutil.copyfile(planted, target.with_name("new"))
    target.with_name("new").rename(target)
    assert ctypes.CDLL(str(fetch(SEVEN).path)).number() == 7
    assert not marker.exists()


# Compilers that fail.


def test_a_compile_error_survives_pickling_and_shows_error_source_and_command(place: Path) -> None:
    with pytest.raises(CompileError) as caught:
        fetch(Request("broken", "int good;\nint bad = ;\n", ("-DX=1",)))
    error = pickle.loads(pickle.dumps(caught.value))
    text = str(error)
    assert text == str(caught.value) and "kernel.cpp:2" in error.first_error and "broken" in text
    lines = dict(line.split(": ", 1) for line in text.splitlines()[1:])
    source, log = Path(lines["source"].strip()), Path(lines["log"].strip())
    assert source.read_text().startswith("int good;") and source.parent.name.startswith("failed-broken-")
    assert lines["command"] in log.read_text() and error.first_error in log.read_text()
    again = subprocess.run(lines["command"], shell=True, cwd="/", capture_output=True, text=True, timeout=60)
    assert again.returncode != 0 and "kernel.cpp:2" in again.stderr


def test_only_the_last_failed_build_of_a_kernel_is_kept(place: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            fetch(Request("broken", "?", ()))
    assert kinds(place) == ["failed-broken", "locks"]


def test_a_compiler_that_hangs_on_a_kernel_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_CXX", str(kernel_script(tmp_path / "c++", "sleep 300")))
    monkeypatch.setenv("AWQJIT_COMPILE_TIMEOUT", "1")
    with pytest.raises(CompileError, match="AWQJIT_COMPILE_TIMEOUT"):
        fetch(SEVEN)
    monkeypatch.delenv("AWQJIT_CXX")
    monkeypatch.setenv("AWQJIT_COMPILE_TIMEOUT", "100")
    assert number_of(fetch(SEVEN).path) == 7


@pytest.mark.parametrize("ending", ["exit 1", "exit 0", "kill -9 $$"])
def test_a_compiler_that_prints_garbage_leaves_no_kernel(
    ending: str, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"head -c 5000 /dev/urandom; {ending}"
    monkeypatch.setenv("AWQJIT_CXX", str(kernel_script(tmp_path / "c++", body)))
    with pytest.raises(CompileError) as caught:
        fetch(SEVEN)
    assert str(caught.value)
    assert kinds(place) == ["failed-number", "locks"]


def test_a_full_disk_sends_the_build_to_a_temporary_directory(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = f'case "$PWD" in {place}/*) echo "ld: cannot write: No space left on device" >&2; exit 1 ;; esac'
    monkeypatch.setenv("AWQJIT_CXX", str(kernel_script(tmp_path / "c++", full)))
    with pytest.warns(AwqJitWarning, match="AWQJIT_CACHE_DIR"):
        found = fetch(SEVEN)
    assert number_of(found.path) == 7 and place not in found.path.parents
    assert kinds(place) == ["locks"]
    assert fetch(SEVEN).path == found.path


def test_without_a_compiler_and_a_stored_kernel_there_is_none(no_compiler: None) -> None:
    with pytest.raises(NoCompilerError):
        fetch(SEVEN)


def test_a_stored_kernel_outlives_its_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = fetch(SEVEN)
    toolchain.forget()
    monkeypatch.setattr(toolchain, "candidates", lambda: (toolchain.Candidate("g++", ("/nowhere/g++",)),))
    assert fetch(SEVEN).path == built.path
    for other in (EIGHT, Request("number", SEVEN.source, ("-DX",)), Request("numbe", SEVEN.source, ())):
        with pytest.raises(NoCompilerError):
            fetch(other)
    edit_meta(machine="vax")(built.directory)
    with pytest.raises(NoCompilerError):
        fetch(SEVEN)


def test_a_forced_compiler_that_does_not_work_is_not_replaced_by_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(SEVEN)
    monkeypatch.setenv("AWQJIT_CXX", "/nowhere/c++")
    with pytest.raises(NoCompilerError, match="/nowhere/c"):
        fetch(SEVEN)


def test_jit_off_only_looks_and_starts_no_program(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(SEVEN)
    toolchain.forget()
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setenv("AWQJIT_JIT", "0")
    assert fetch(SEVEN).origin == "cache"
    before = kinds(place)
    with pytest.raises(KernelMissingError) as caught:
        fetch(Request("another", EIGHT.source, ()))
    assert "another" in str(caught.value) and str(place) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert kinds(place) == before
    flip_a_bit(fetch(SEVEN).directory)
    with pytest.raises(KernelMissingError):
        fetch(SEVEN)


# Many at once, and what they leave behind.


def test_eight_threads_build_a_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, runs = counting(tmp_path / "c++", 0.3)
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    found: list[cache.Artifact] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(SEVEN))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(artifact.origin for artifact in found) == ["built"] + ["cache"] * 7
    assert len(runs.read_text().splitlines()) == 1


def test_a_lock_that_is_never_given_back_only_costs_time(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWQJIT_COMPILE_TIMEOUT", "2")
    name = SEVEN.directory_name(toolchain.find_compiler())
    (place / "locks").mkdir(parents=True)
    start = time.monotonic()
    with filelock.FileLock(place / "locks" / f"{name}.lock"):
        found: list[cache.Artifact] = []
        thread = threading.Thread(target=lambda: found.append(fetch(SEVEN)))
        thread.start()
        thread.join(60)
    assert found[0].origin == "built" and 1.9 < time.monotonic() - start < 30
    assert "without its lock" in caplog.text
    assert (place / "locks" / f"{name}.lock").exists()


def test_a_file_system_without_locks_only_costs_time(place: Path) -> None:
    place.mkdir()
    (place / "locks").write_text("a file where the locks should be")
    assert number_of(fetch(SEVEN).path) == 7
    assert fetch(SEVEN).origin == "cache"


def test_who_loses_the_race_loads_its_own_build(place: Path) -> None:
    first = fetch(SEVEN)
    compiler = toolchain.find_compiler()
    mine = place / store.passing_name("build")
    shutil.copytree(first.directory, mine)
    before = first.directory.stat().st_ctime_ns
    used = store.publish(mine, first.directory, SEVEN.identity(compiler))
    assert first.directory.stat().st_ctime_ns == before  # a sound kernel is not moved, not even for a moment
    assert used.name.startswith("own-") and number_of(used / "kernel.so") == 7
    assert not store.check(first.directory, SEVEN.identity(compiler))


def test_what_killed_processes_left_is_removed_when_old_and_nothing_else_is(place: Path) -> None:
    fetch(SEVEN)
    day = 24 * 3600
    ages = {"build": 2 * day, "stale": 2 * day, "own": 31 * day, "failed-x": 31 * day}
    for kind, age in ages.items():
        for name, seconds in ((f"{kind}-{1:016x}", age), (f"{kind}-{2:016x}", age - 1.5 * day)):
            (place / name).mkdir()
            (place / name / "kernel.cpp").touch()
            os.utime(place / name, (time.time() - seconds,) * 2)
    strange = [place / "notes", place / "build-of-mine", place / "number-0000000000000000"]
    for path in strange:
        path.mkdir()
        os.utime(path, (1, 1))
    fetch(EIGHT)
    left = [name for name in os.listdir(place) if name.partition("-")[0] in ("build", "stale", "own", "failed")]
    assert sorted(left) == sorted([f"{kind}-{2:016x}" for kind in ages] + ["build-of-mine"])
    assert all(path.exists() for path in strange)


def test_entries_lists_the_kernels_of_a_place(place: Path) -> None:
    assert list(store.entries(place)) == []
    found = fetch(SEVEN)
    with pytest.raises(CompileError):
        fetch(Request("broken", "?", ()))
    (entry,) = store.entries(place)
    assert entry.path == found.directory
    assert entry.bytes == sum(path.stat().st_size for path in found.directory.iterdir())
