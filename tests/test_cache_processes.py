# SPDX-License-Identifier: Apache-2.0
"""The kernel cache between processes and users: cold starts, kills, forks, and directories that cannot be trusted."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compilers import REAL, counting, number_of, number_source

from awqjit import config, places, store, toolchain
from awqjit.cache import Request, fetch
from awqjit.errors import AwqJitWarning, KernelMissingError

pytestmark = pytest.mark.skipif(not REAL, reason="needs g++ or clang++")

ROOT = Path(__file__).parents[1]
SEVEN = Request("number", number_source(7), ())
STRANGER = 54321  # a user id without a name or a home
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user can enter, as pytest's own cannot."""
    with tempfile.TemporaryDirectory(prefix="awqjit-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(os.path.realpath(name))


@pytest.fixture(autouse=True)
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    for name in ("CXX", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (folder / "home").mkdir()
    made(folder / "tmp", 0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))  # forked children leave theirs behind
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setattr(places, "_private", places._Private())
    monkeypatch.setattr(places, "_warned", set())
    toolchain.forget()
    yield folder / "home"
    toolchain.forget()


def in_child(function: Callable[[], Any], uid: int | None = None) -> Any:
    """What a function returns in a forked child, as another user if one is given."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: the child only runs our code
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(function(), pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child failed; its traceback is in the captured stderr"
    return pickle.loads(answer)


def fetch_noting_warnings() -> tuple[list[str], list[str], int]:
    """Fetch the same kernel twice: origins, warnings, number."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [fetch(SEVEN), fetch(SEVEN)]
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, AwqJitWarning)]
    return [artifact.origin for artifact in found], texts, number_of(found[0].path)


FETCH = """
from awqjit.cache import Request, fetch
from compilers import number_of, number_source
found = fetch(Request("number", number_source(7), ()))
print(number_of(found.path), found.origin)
"""


def start(code: str = FETCH, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_cold_processes_at_once_compile_at_most_twice(folder: Path) -> None:
    compiler, runs = counting(folder / "c++", 0.5)
    environment = {"AWQJIT_CACHE_DIR": str(folder / "cache"), "AWQJIT_CXX": str(compiler)}
    outputs = [process.communicate(timeout=100) for process in [start(**environment) for _ in range(2)]]
    assert {output.split()[0] for output, _ in outputs} == {"7"}, outputs
    assert len(runs.read_text().splitlines()) <= 2
    output, errors = start(**environment).communicate(timeout=100)
    assert output.split() == ["7", "cache"], errors


def fetch_number(_: int) -> tuple[int, str]:
    found = fetch(SEVEN)
    return number_of(found.path), found.origin


def test_eight_cold_processes_at_once_compile_at_most_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, runs = counting(folder / "c++", 0.5)
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # Forked, not started afresh: eight interpreters that import torch would not reach the cache at once.
        with multiprocessing.get_context("fork").Pool(8) as pool:
            found = pool.map(fetch_number, range(8), chunksize=1)
    assert {number for number, _ in found} == {7}
    assert len(runs.read_text().splitlines()) <= 2
    (entry,) = store.entries(folder / "cache")
    assert [name for name in os.listdir(folder / "cache") if name != "locks"] == [entry.path.name]
    assert fetch_number(0) == (7, "cache")


def test_a_killed_build_leaves_a_sound_cache_and_blocks_nobody(folder: Path) -> None:
    compiler, runs = counting(folder / "c++", 60)
    environment = {"AWQJIT_CACHE_DIR": str(folder / "cache")}
    victim = start(AWQJIT_CXX=f"{compiler}", **environment)
    deadline = time.monotonic() + 60
    while not runs.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.kill()
    victim.communicate()
    try:
        (left,) = (folder / "cache").glob("build-*")
        script = compiler.read_text()
        compiler.write_text(script.replace("sleep 60", "true"))
        begin = time.monotonic()
        output, errors = start(AWQJIT_CXX=f"{compiler}", **environment).communicate(timeout=50)
        assert output.split() == ["7", "built"], errors
        assert time.monotonic() - begin < 40  # it did not wait for the lock of the dead
    finally:
        # The compiler of the dead process still sleeps; it is the leader of a process group of its own.
        os.killpg(int(runs.read_text().split()[0]), signal.SIGKILL)
    os.utime(left, (1, 1))
    output, errors = start(FETCH.replace("number_source(7)", "number_source(8)"), **environment).communicate(timeout=50)
    assert output.split() == ["8", "built"], errors
    assert not left.exists()


def test_without_a_place_to_write_one_warning_and_a_directory_that_goes_with_the_process(folder: Path) -> None:
    code = "import warnings\nwarnings.simplefilter('always')\n" + FETCH + FETCH + "print(found.directory.parent)\n"
    process = start(code, HOME="/proc/no such home", TMPDIR=str(folder))
    output, errors = process.communicate(timeout=100)
    first, second, directory = output.splitlines()
    assert (first, second) == ("7 built", "7 cache")
    assert errors.count("AwqJitWarning") == 1 and "AWQJIT_CACHE_DIR" in errors
    assert Path(directory).parent == folder and not Path(directory).exists()


def test_a_failed_build_outlives_the_process_that_had_no_place_to_write(folder: Path) -> None:
    code = "from awqjit.cache import *\nfetch(Request('broken', '?', ()))"
    _, errors = start(code, HOME="/proc/no such home", TMPDIR=str(folder)).communicate(timeout=100)
    source = next(line.partition(":")[2].strip() for line in errors.splitlines() if line.startswith("source:"))
    assert Path(source).read_text() == "?"


def test_a_forked_child_uses_its_parents_temporary_directory_and_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/proc/no such home")
    with pytest.warns(AwqJitWarning):
        mine = fetch(SEVEN)
    path, origin, warned = in_child(lambda: (fetch(SEVEN).path, fetch(SEVEN).origin, fetch_noting_warnings()[1]))
    assert (path, origin, warned) == (mine.path, "cache", [])

    in_child(lambda: places._remove(os.getppid(), mine.directory.parent))  # as the end of the child would call it
    assert mine.path.exists()

    def child_whose_parent_has_ended() -> tuple[int, bool]:
        places._remove(os.getpid(), mine.directory.parent)
        other = fetch(SEVEN)
        return number_of(other.path), other.directory.parent != mine.directory.parent

    assert in_child(child_whose_parent_has_ended) == (7, True)


def test_kernels_are_not_open_to_others_even_with_an_open_umask(folder: Path) -> None:
    def build() -> None:
        os.umask(0)
        os.environ["AWQJIT_CACHE_DIR"] = str(folder / "cache")
        fetch(SEVEN)

    in_child(build)
    paths = [folder / "cache", *(folder / "cache").rglob("*")]
    assert not [path for path in paths if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]


# Another user.


@needs_root
def test_a_read_only_home_costs_one_warning_and_is_not_written(folder: Path, home: Path) -> None:
    os.chown(home, STRANGER, STRANGER)
    home.chmod(0o555)
    origins, warned, number = in_child(fetch_noting_warnings, STRANGER)
    assert (origins, number, len(warned)) == (["built", "cache"], 7, 1)
    assert "cannot be written" in warned[0] and str(home) in warned[0]
    assert list(home.iterdir()) == []


@needs_root
def test_a_user_without_a_home_gets_a_temporary_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    origins, warned, number = in_child(fetch_noting_warnings, STRANGER)
    assert (origins, number, len(warned)) == (["built", "cache"], 7, 1)
    assert "no home directory" in warned[0]
    assert sorted(folder.iterdir()) == before


@needs_root
def test_a_cache_of_root_that_cannot_be_written_any_more_is_still_read(folder: Path, home: Path) -> None:
    (home / ".cache").mkdir()
    built = fetch(SEVEN)
    assert (home / ".cache" / "awqjit") in built.path.parents
    origins, warned, number = in_child(fetch_noting_warnings, STRANGER)
    assert (origins, warned, number) == (["cache", "cache"], [], 7)


def tree(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_mtime_ns, path.stat().st_mode) for path in folder.rglob("*"))


@needs_root
@pytest.mark.parametrize("jit", ["1", "0"])
def test_a_baked_cache_serves_any_user_without_a_compiler_or_a_write(
    jit: str, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baked = folder / "baked"
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(baked))
    fetch(SEVEN)
    monkeypatch.delenv("AWQJIT_CACHE_DIR")
    monkeypatch.setenv("AWQJIT_CACHE_PATH", f"/nowhere{os.pathsep}{baked}")
    monkeypatch.setenv("AWQJIT_JIT", jit)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(subprocess, "Popen", None)
    before = tree(baked), tree(home), os.listdir(folder / "tmp")
    origins, warned, number = in_child(fetch_noting_warnings, STRANGER)
    assert (origins, number) == (["baked", "baked"], 7)
    assert len(warned) == 1 and "/nowhere" in warned[0]
    assert (tree(baked), tree(home), os.listdir(folder / "tmp")) == before


# Trust.


def test_a_baked_cache_that_anyone_can_write_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baked = folder / "baked"
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(baked))
    fetch(SEVEN)
    monkeypatch.delenv("AWQJIT_CACHE_DIR")
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(baked))
    assert fetch(SEVEN).origin == "baked"
    baked.chmod(0o777)
    with pytest.warns(AwqJitWarning, match=f"{baked} can be written by everyone"):
        assert fetch(SEVEN).origin == "built"
    monkeypatch.setenv("AWQJIT_JIT", "0")
    with pytest.raises(KernelMissingError, match="can be written by everyone"):
        fetch(Request("other", SEVEN.source, ()))


def test_a_cache_directory_that_anyone_can_write_is_left_for_the_users_own(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777)  # sticky is enough for a parent, not for the cache itself
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(shared))
    origins, warned, number = in_child(fetch_noting_warnings)
    assert (origins, number, len(warned)) == (["built", "cache"], 7, 1)
    assert f"{shared} can be written by everyone" in warned[0] and str(home) in warned[0]
    assert list(shared.iterdir()) == [] and len(list(store.entries(home / ".cache" / "awqjit"))) == 1


def made(path: Path, mode: int, uid: int = -1, gid: int = -1) -> Path:
    path.mkdir()
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def test_a_directory_is_trusted_by_its_owner_mode_and_parents(folder: Path) -> None:
    assert places.distrust(folder) == ""
    assert places.distrust(folder / "not" / "yet" / "there") == ""
    assert places.distrust(made(folder / "group", 0o770)) == ""  # of this user's own group
    assert "everyone" in places.distrust(made(folder / "open", 0o757))
    assert "everyone" in places.distrust(made(folder / "open" / "inside", 0o700))
    assert places.distrust(made(made(folder / "sticky", 0o1777) / "inside", 0o700)) == ""
    (folder / "link").symlink_to(folder / "group")
    assert "symbolic link" in places.distrust(folder / "link")
    (folder / "file").touch()
    assert "ot a directory" in places.distrust(folder / "file" / "inside")


@needs_root
def test_directories_of_other_users_and_groups_are_not_trusted(folder: Path) -> None:
    assert f"uid {STRANGER}" in places.distrust(made(folder / "theirs", 0o755, uid=STRANGER))
    assert f"uid {STRANGER}" in places.distrust(made(folder / "theirs" / "ours", 0o755))
    assert f"gid {STRANGER}" in places.distrust(made(folder / "team", 0o775, gid=STRANGER))
    assert places.distrust(made(folder / "readers", 0o755, gid=STRANGER)) == ""
    own = made(folder / "own", 0o700, uid=STRANGER, gid=STRANGER)
    assert in_child(lambda: places.distrust(own), STRANGER) == ""  # theirs, below a directory of root


def test_a_place_behind_a_link_is_judged_by_where_it_leads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(folder / "open", 0o777)
    (folder / "link").symlink_to(folder / "open" / "cache")
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(folder / "link"))
    place = places.places()[0]
    assert place.path == folder / "open" / "cache" and not place.trusted and "everyone" in place.reason


def test_looking_at_the_places_makes_nothing_and_says_why_one_is_not_used(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    paths = [folder / "absent", folder / "file"]
    monkeypatch.setenv("AWQJIT_CACHE_PATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(folder / "file" / "below"))
    before = sorted(folder.rglob("*"))
    found = places.places()
    assert [place.origin for place in found] == ["AWQJIT_CACHE_PATH"] * 2 + ["AWQJIT_CACHE_DIR", "user cache"]
    assert [bool(place.reason) for place in found] == [True, True, True, False]
    assert (found[3].trusted, found[3].writable, found[3].path) == (True, True, home / ".cache" / "awqjit")
    assert sorted(folder.rglob("*")) == before
