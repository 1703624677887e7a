# SPDX-License-Identifier: Apache-2.0
"""Homes, mounts and disks that do not serve: the next place is taken, with one warning that says why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from compilers import REAL, number_of
from faults import (  # noqa: F401  (fixtures)
    SEVEN,
    STRANGER,
    fetch_noting_warnings,
    folder_for_everyone,
    in_child,
    mounted,
    needs_root,
    own_home,
)

import awqjit
from awqjit import places, store, toolchain
from awqjit.cache import Request, fetch

pytestmark = [
    pytest.mark.skipif(not REAL or sys.platform != "linux", reason="needs Linux and g++ or clang++"),
    pytest.mark.usefixtures("home"),
]

PACKAGE = Path(awqjit.__file__).parent
ROOT = Path(__file__).parents[1]


def tmpfs(path: Path, options: str) -> AbstractContextManager[Path]:
    return mounted(path, "-t", "tmpfs", "-o", f"mode=755,{options}", "awqjit-test")


def user_cache(home: Path) -> Path:
    return home / ".cache" / "awqjit"


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*"))


# Places that cannot be used.


@needs_root
def test_a_cache_on_a_noexec_mount_is_left_for_the_users_own(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tmpfs(folder / "mount", "noexec") as mount:
        monkeypatch.setenv("AWQJIT_CACHE_DIR", str(mount / "cache"))
        origins, (warning,), number, used = in_child(fetch_noting_warnings)
        assert (origins, number, used) == (["built", "cache"], 7, user_cache(home))
        assert "AWQJIT_CACHE_DIR" in warning and "noexec" in warning and str(used) in warning
        assert list(mount.iterdir()) == []
        shutil.copytree(used, mount / "cache")
        monkeypatch.setenv("AWQJIT_CACHE_PATH", str(mount / "cache"))
        monkeypatch.delenv("AWQJIT_CACHE_DIR")
        origins, (warning,), number, used = in_child(fetch_noting_warnings)
        assert origins == ["cache", "cache"] and "AWQJIT_CACHE_PATH" in warning and "noexec" in warning


@needs_root
def test_a_noexec_temporary_directory_and_home_leave_another_temporary_directory(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other").mkdir(mode=0o700)
    with tmpfs(folder / "tmp", "noexec") as mount, tmpfs(home, "noexec"):
        monkeypatch.setattr(places, "_OTHER_TEMPORARY", (str(folder / "other"),))
        origins, (warning,), number, used = in_child(fetch_noting_warnings)
        assert (origins, number, used.parent) == (["built", "cache"], 7, folder / "other")
        assert "noexec" in warning
        assert list(mount.iterdir()) == []


@needs_root
def test_a_compiler_is_tried_out_in_the_cache_where_no_temporary_directory_will_do(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_OTHER_TEMPORARY", ())
    with tmpfs(folder / "tmp", "noexec") as mount:
        assert in_child(fetch_noting_warnings) == (["built", "cache"], [], 7, user_cache(home))
        assert list(mount.iterdir()) == []
    assert sorted(name.partition("-")[0] for name in os.listdir(user_cache(home))) == ["locks", "number"]


@needs_root
@pytest.mark.parametrize("room", ["8k", "24k", "40k", "64k", "100k"])
def test_a_full_disk_sends_the_build_to_the_next_place(
    room: str, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the source, the assembler's input, the object or the library is written."""
    request = Request("number", SEVEN.source + "// " + "x" * 20_000 + "\nint table[4000] = {1, 2, 3};\n", ())
    with tmpfs(folder / "mount", f"size={room}") as mount:
        monkeypatch.setenv("AWQJIT_CACHE_DIR", str(mount))

        def fetch_in_little_room() -> tuple[list[str], list[str], int, Path]:
            sys.modules["faults"].SEVEN = request
            return fetch_noting_warnings()

        toolchain.find_compiler()
        origins, warned, number, used = in_child(fetch_in_little_room)
        assert (origins, number) == (["built", "cache"], 7)
        if used != mount:  # with the most room the build may fit
            (warning,) = warned
            assert "AWQJIT_CACHE_DIR" in warning and str(mount) in warning and mount not in used.parents
            assert {path.name for path in mount.iterdir()} <= {"locks"}
        assert used != mount or room == "100k"


@needs_root
def test_a_disk_without_room_for_one_more_file_is_a_full_disk_too(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tmpfs(folder / "mount", "nr_inodes=5") as mount:
        monkeypatch.setenv("AWQJIT_CACHE_DIR", str(mount))
        origins, (warning,), number, used = in_child(fetch_noting_warnings)
        assert (origins, number) == (["built", "cache"], 7) and mount not in (used, *used.parents)
        assert str(mount) in warning


@needs_root
def test_a_read_only_mount_is_left_for_the_users_own(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(folder / "mount", "ro") as mount:
        monkeypatch.setenv("AWQJIT_CACHE_DIR", str(mount / "cache"))
        origins, (warning,), number, used = in_child(fetch_noting_warnings)
        assert (origins, number, used) == (["built", "cache"], 7, user_cache(home))
        assert f"{mount} cannot be written" in warning


# Homes.


@needs_root
@pytest.mark.parametrize(
    ("home_is", "reason"),
    [
        ("unset", "no home directory"),
        ("nonexistent", "cannot be written"),
        ("read-only", "cannot be written"),
        ("another user's", "belongs to another user"),
        ("a file", "cannot be examined: Not a directory"),
        ("too long", "cannot be examined: File name too long"),
    ],
)
def test_without_a_home_of_ones_own_kernels_go_to_a_temporary_directory_with_one_warning(
    home_is: str, reason: str, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a user id without an entry in the password file, as containers like to have them."""
    if home_is == "unset":
        monkeypatch.delenv("HOME")
    elif home_is == "nonexistent":
        monkeypatch.setenv("HOME", "/nonexistent")
    elif home_is == "read-only":
        os.chown(home, STRANGER, STRANGER)
        home.chmod(0o555)
    elif home_is == "another user's":
        os.chown(home, STRANGER + 1, STRANGER + 1)
        home.chmod(0o777)
    elif home_is == "a file":
        home.rmdir()
        home.touch()
    else:
        monkeypatch.setenv("HOME", f"{home}/{'x' * 300}")
    before = snapshot(folder)
    monkeypatch.chdir(folder)
    origins, (warning,), number, used = in_child(fetch_noting_warnings, STRANGER)
    assert (origins, number) == (["built", "cache"], 7)
    assert reason in warning and "AWQJIT_CACHE_DIR" in warning
    assert used.parent == folder / "tmp"
    assert [path for path in snapshot(folder) if str(folder / "tmp") not in path[0]] == [
        path for path in before if str(folder / "tmp") not in path[0]
    ]


def test_the_order_of_places(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Baked before AWQJIT_CACHE_DIR, this before the user's cache, and that before a temporary directory."""
    chosen, baked = folder / "chosen", folder / "baked"
    assert in_child(fetch_noting_warnings)[3] == user_cache(home)
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(chosen))
    assert in_child(fetch_noting_warnings) == (["built", "cache"], [], 7, chosen)
    shutil.copytree(chosen, baked)
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(baked))
    assert in_child(fetch_noting_warnings) == (["baked", "baked"], [], 7, baked)
    shutil.rmtree(baked)
    baked.mkdir()
    assert in_child(fetch_noting_warnings) == (["cache", "cache"], [], 7, chosen)
    chosen.chmod(0o777)
    origins, (warning,), _, used = in_child(fetch_noting_warnings)
    assert (origins, used) == (["cache", "cache"], user_cache(home))
    assert f"{chosen} can be written by everyone" in warning
    monkeypatch.delenv("AWQJIT_CACHE_DIR")
    monkeypatch.setenv("HOME", "/proc/no such home")
    origins, (warning,), _, used = in_child(fetch_noting_warnings)
    assert (origins, used.parent) == (["built", "cache"], folder / "tmp")


# Paths.


@pytest.mark.parametrize("name", ["mit Leerzeichen", "ein Pfad — ‹größer›", "a'b\"c$(d);e", "-o", "\udcff\udcfe"])
def test_any_path_will_do(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / name / "cache"
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(place))
    assert in_child(fetch_noting_warnings) == (["built", "cache"], [], 7, place)
    assert in_child(fetch_noting_warnings) == (["cache", "cache"], [], 7, place)
    assert len(list(store.entries(place))) == 1


@pytest.mark.parametrize("length", [1000, 3400, 3700, 4070, 4090, 5000])
def test_a_very_long_path_serves_or_is_left_for_the_users_own(
    length: int, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(folder)
    while len(path) < length:
        path += "/" + "x" * min(200, max(length - len(path) - 1, 1))
    monkeypatch.setenv("AWQJIT_CACHE_DIR", path)
    origins, warned, number, used = in_child(fetch_noting_warnings)
    assert (origins, number) == (["built", "cache"], 7)
    if length < 3500:
        assert (warned, str(used)) == ([], path)
    else:
        (warning,) = warned
        assert used == user_cache(home) and "long" in warning
        assert sorted(os.listdir(folder)) == ["home", "tmp"]


# Trust.


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_refused_directory_comes_with_the_command_that_mends_it(
    mode: int, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = folder / "my cache"
    chosen.mkdir()
    chosen.chmod(mode)
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(chosen))
    origins, (warning,), _, used = in_child(fetch_noting_warnings)
    assert (origins, used) == (["built", "cache"], user_cache(home))
    command = warning[warning.index("chmod") :].partition(";")[0]
    subprocess.run(command, shell=True, check=True)
    assert in_child(fetch_noting_warnings) == (["built", "cache"], [], 7, chosen)


@needs_root
@pytest.mark.parametrize("uid", [STRANGER, 0])
def test_the_reason_names_the_owner_or_the_group(uid: int, folder: Path) -> None:
    (folder / "theirs").mkdir()
    os.chown(folder / "theirs", uid, STRANGER)
    (folder / "theirs").chmod(0o775)
    reason = places.distrust(folder / "theirs" / "cache")
    if uid:
        assert f"uid {STRANGER}" in reason and "belongs to you or root" in reason
    else:
        assert f"gid {STRANGER}" in reason
        subprocess.run(reason[reason.index("chmod") :], shell=True, check=True)
        assert places.distrust(folder / "theirs" / "cache") == ""


@needs_root
def test_a_temporary_directory_that_others_could_replace_is_passed_over(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tmp").chmod(0o777)  # not sticky: anyone may rename what is in it
    (folder / "other").mkdir(mode=0o700)
    monkeypatch.setattr(places, "_OTHER_TEMPORARY", (str(folder / "other"),))
    assert places.loadable_directory().parent == folder / "other"
    assert list((folder / "tmp").iterdir()) == []
    monkeypatch.setattr(places, "_OTHER_TEMPORARY", ())
    with pytest.raises(OSError, match="can be written by everyone"):
        places.loadable_directory()


def test_a_library_with_a_wrong_checksum_is_read_and_never_mapped(folder: Path, home: Path) -> None:
    marker = folder / "was here"
    evil = f'#include <cstdio>\n__attribute__((constructor)) static void run() {{ fclose(fopen("{marker}", "w")); }}\n'
    planted = fetch(Request("planted", evil + SEVEN.source, ())).path
    assert in_child(lambda: number_of(planted)) == 7 and marker.exists()
    marker.unlink()
    target = fetch(SEVEN).path
    target.unlink()
    shutil.copy(planted, target)
    assert in_child(fetch_noting_warnings) == (["built", "cache"], [], 7, user_cache(home))
    assert not marker.exists()


# What is never written.

ANSWER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import faults
if len(sys.argv) > 2:  # as another user, who may not be able to read what Python imports: so all of that first
    faults.answer_noting_warnings()
    faults.ops.forget()
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
    os.path.exists("/the user was changed")
print(faults.answer_noting_warnings())
"""


def answer_in_new_process(
    *before: str, python_path: Path = ROOT, uid: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-B", "-c", ANSWER, str(ROOT / "tests"), *([] if uid is None else [str(uid)])],
        env={**os.environ, "PYTHONPATH": str(python_path), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def site_packages(folder: Path) -> Iterator[Path]:
    """The package as pip installs it."""
    site = folder / "site-packages"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, site / "awqjit", ignore=ignored)
    for name in ("templates",):
        if not (site / "awqjit" / name).exists():
            shutil.copytree(ROOT / name, site / "awqjit" / name, ignore=ignored)
    yield site


@pytest.mark.parametrize("home_is", ["there", "missing"])
def test_nothing_is_written_into_site_packages(home_is: str, site_packages: Path, folder: Path, home: Path) -> None:
    before = snapshot(site_packages)
    environment = {"TMPDIR": str(folder / "tmp"), "AWQJIT_KERNEL": "portable"}
    if home_is == "missing":
        environment["HOME"] = "/proc/no such home"
    done = answer_in_new_process(python_path=site_packages, **environment)
    assert done.stdout.startswith("('portable', 'built'"), done.stderr
    assert snapshot(site_packages) == before


@needs_root
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to see every write")
def test_a_baked_cache_is_used_by_another_user_without_one_write(folder: Path, home: Path) -> None:
    baked = folder / "baked"
    built = answer_in_new_process(AWQJIT_CACHE_DIR=str(baked), TMPDIR=str(folder / "tmp"))
    assert "'built'" in built.stdout, built.stderr
    os.chown(home, STRANGER, STRANGER)  # it could be written
    before = snapshot(baked)
    log = folder / "trace"
    done = answer_in_new_process(
        *("strace", "-f", "-qq", "-o", str(log), "-e", "trace=%file,ftruncate,fchmod,fchown,memfd_create"),
        uid=STRANGER,
        AWQJIT_CACHE_PATH=str(baked),
        TMPDIR=str(folder / "tmp"),
    )
    if "ptrace" in done.stderr and not done.stdout:
        pytest.skip(f"tracing is not allowed here: {done.stderr.strip()}")
    assert "'baked', [])" in done.stdout, done.stderr
    _, mark, lines = log.read_text(errors="replace").partition("the user was changed")
    assert mark and f"{baked}/" in lines
    reads = re.compile(r"\w+ +(newfstatat|stat|lstat|statx|statfs|readlink|readlinkat|access|faccessat2?|getcwd)\(")
    opens = re.compile(r"\w+ +open(at)?\(.*O_RDONLY(?!.*O_CREAT)")
    calls = [line for line in lines.splitlines()[1:] if "(" in line]
    assert [line for line in calls if not reads.match(line) and not opens.match(line)] == []
    assert snapshot(baked) == before and list(home.iterdir()) == []


@needs_root
def test_a_baked_cache_on_a_read_only_mount_serves_another_user(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(folder / "baked"))
    in_child(fetch_noting_warnings)
    monkeypatch.delenv("AWQJIT_CACHE_DIR")
    with mounted(folder / "image", "--bind", "-o", "ro", str(folder / "baked")) as image:
        monkeypatch.setenv("AWQJIT_CACHE_PATH", str(image))
        monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
        monkeypatch.setenv("PATH", "/nowhere")
        assert in_child(fetch_noting_warnings, STRANGER) == (["baked", "baked"], [], 7, image)
