# SPDX-License-Identifier: Apache-2.0
"""The kernel cache when builders are killed or hang, files are damaged, and the file system does not keep its word."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from compilers import REAL, counting, kernel_script, number_of, number_source
from faults import (  # noqa: F401  (fixtures)
    PROBLEM,
    SEVEN,
    answer_noting_warnings,
    answer_of,
    folder_for_everyone,
    fork,
    in_child,
    is_answered_right,
    kill,
    number,
    own_home,
    place_of_everyone,
    wait_for,
)

from awqjit import cache, jit, launch, places, store, toolchain
from awqjit.cache import Request, fetch
from awqjit.errors import AwqJitWarning

pytestmark = [
    pytest.mark.skipif(not REAL or sys.platform != "linux", reason="needs Linux and g++ or clang++"),
    pytest.mark.usefixtures("home"),
]


# Builders that die or hang.


def pause_before(module: object, name: str, marker: Path) -> None:
    """Stop this process for good where it is about to call a function, and say so."""

    def pause(*arguments: object, **named: object) -> None:
        marker.write_text("here")
        time.sleep(600)

    setattr(module, name, pause)


def pause_at_rename(marker: Path, after: bool) -> None:
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if after:
            real(source, target)
        marker.write_text("here")
        time.sleep(600)

    os.rename = rename  # type: ignore[assignment]  # in a forked child


STAGES: dict[str, Callable[[Path], None]] = {
    "after mkdir": lambda marker: pause_before(store, "sweep", marker),
    "before the compiler": lambda marker: pause_before(toolchain, "compile_shared", marker),
    "after the compiler": lambda marker: pause_before(store, "seal", marker),
    "before the log": lambda marker: pause_before(store, "write_log", marker),
    "before the files are on the disk": lambda marker: pause_before(store, "_sync", marker),
    "before the rename": lambda marker: pause_at_rename(marker, after=False),
    "after the rename": lambda marker: pause_at_rename(marker, after=True),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_builder_killed_at_any_stage_blocks_nobody(
    stage: str, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, runs = counting(folder / "c++")
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    toolchain.find_compiler()  # once; the children know it

    def build() -> None:
        STAGES[stage](folder / "marker")
        fetch(SEVEN)

    victim = fork(build)
    wait_for(folder / "marker")
    kill(victim)
    before = len(runs.read_text().splitlines())
    start = time.monotonic()
    assert in_child(number) == (7, "cache" if stage == "after the rename" else "built")
    assert time.monotonic() - start < 60  # a lock of the dead would be waited for twice as long
    assert len(runs.read_text().splitlines()) - before == (0 if stage == "after the rename" else 1)
    assert in_child(number) == (7, "cache")


def test_a_builder_killed_while_the_compiler_runs_blocks_nobody(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, runs = counting(folder / "c++", 600)
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    toolchain.find_compiler()
    victim = fork(number)
    wait_for(runs)
    kill(victim)
    try:
        compiler.write_text(compiler.read_text().replace("sleep 600", "true"))
        start = time.monotonic()
        assert in_child(number) == (7, "built")
        assert time.monotonic() - start < 60
        assert len(runs.read_text().splitlines()) == 2
        assert in_child(number) == (7, "cache")
    finally:
        os.killpg(int(runs.read_text().split()[0]), signal.SIGKILL)  # it leads a process group of its own


def test_a_stopped_lock_holder_is_waited_for_no_longer_than_a_compile_may_take(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, runs = folder / "gate", folder / "runs"
    body = f'echo $$ >> "{runs}"; while [ ! -e "{gate}" ]; do sleep 0.05; done'
    monkeypatch.setenv("AWQJIT_CXX", str(kernel_script(folder / "c++", body)))
    toolchain.find_compiler()
    holder = fork(number)
    wait_for(runs)
    os.kill(holder[0], signal.SIGSTOP)
    gate.touch()
    try:

        def wait_and_build() -> tuple[tuple[int, str], float]:
            os.environ["AWQJIT_COMPILE_TIMEOUT"] = "8"
            start = time.monotonic()
            return number(), time.monotonic() - start

        answer, seconds = in_child(wait_and_build)
        assert answer == (7, "built") and 7.9 < seconds < 60
        assert in_child(number) == (7, "cache")
    finally:
        os.kill(holder[0], signal.SIGCONT)
    assert answer_of(holder) == (7, "built")  # it lost the race and used its own build
    (entry,) = store.entries(place)
    assert not store.check(entry.path, SEVEN.identity(toolchain.find_compiler()))


def test_sixty_four_kernels_wanted_by_eight_processes_are_compiled_once_each_and_side_by_side(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = folder / "log"
    body = f'echo "+ $$" >> "{log}"; sleep 0.1; "$REAL" "$@"; rc=$?; echo "- $$" >> "{log}"; exit $rc'
    monkeypatch.setenv("AWQJIT_CXX", str(kernel_script(folder / "c++", body)))
    toolchain.find_compiler()
    requests = [Request(f"number_{i}", number_source(i), ()) for i in range(64)]

    def fetch_all(rank: int) -> list[int]:
        order = list(range(64))
        random.Random(rank).shuffle(order)
        found = {i: fetch(requests[i]).path for i in order}
        return [number_of(found[i]) for i in range(64)]

    children = [fork(lambda rank=rank: fetch_all(rank)) for rank in range(8)]  # type: ignore[misc]
    assert all(answer_of(child) == list(range(64)) for child in children)
    running = most = 0
    for line in log.read_text().splitlines():
        running += 1 if line.startswith("+") else -1
        most = max(most, running)
    assert log.read_text().count("+") == 64
    assert most >= 3  # a lock for all of them would make it 1
    assert len(list(store.entries(place))) == 64


# File systems that do not keep their word, simulated at the functions that do input and output.


def failing_rename(code: int) -> Callable[[Path], Callable[..., None]]:
    def make(place: Path) -> Callable[..., None]:
        def rename(source: Path, target: Path) -> None:
            raise OSError(code, os.strerror(code), str(target))

        return rename

    return make


def rename_whose_answer_is_lost(place: Path) -> Callable[..., None]:
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        real(source, target)  # done; then the server is asked again, and finds nothing to rename
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))

    return rename


def rename_seen(after: float | None) -> Callable[[Path], Callable[..., None]]:
    """A rename that is done, and seen only later or never."""

    def make(place: Path) -> Callable[..., None]:
        real = os.rename

        def rename(source: Path, target: Path) -> None:
            hidden = place.parent / f"hidden-{Path(target).name}"
            real(source, hidden)
            if after is not None:
                threading.Timer(after, real, (hidden, target)).start()

        return rename

    return make


RENAMES: dict[str, tuple[Callable[[Path], Callable[..., None]], str]] = {
    "across file systems": (failing_rename(errno.EXDEV), "own"),
    "of a stale handle": (failing_rename(errno.ESTALE), "own"),
    "that fails with an I/O error": (failing_rename(errno.EIO), "own"),
    "that is not done": (lambda place: lambda source, target: None, "own"),
    "whose answer is lost": (rename_whose_answer_is_lost, "published"),
    "that is seen late": (rename_seen(0.15), "published"),
}


@pytest.mark.parametrize("kind", RENAMES)
def test_a_rename_that_goes_wrong_is_survived(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, ending = RENAMES[kind]
    target = place / SEVEN.directory_name(toolchain.find_compiler())
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", make(place))
        found = fetch(SEVEN)
        assert (number_of(found.path), found.origin) == (7, "built")
        assert (found.directory == target) == (ending == "published")
    assert number() == (7, "cache" if ending == "published" else "built")
    assert fetch(SEVEN).directory == target


def test_a_build_that_a_rename_loses_is_made_again_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.warns(AwqJitWarning, match="compiles them again"):
        real, lose = os.rename, rename_seen(None)(place)
        patch.setattr(os, "rename", lambda source, target: (lose if place in target.parents else real)(source, target))
        found = fetch(SEVEN)
    assert number_of(found.path) == 7 and place not in found.path.parents


def test_a_stale_handle_while_reading_costs_a_line_in_the_log_at_most(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fetch(SEVEN)
    real, failed = os.open, []

    def stale_once(path: object, *arguments: int, **named: int) -> int:
        if str(path).endswith(store.LIBRARY) and not failed:
            failed.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", stale_once)
    assert number()[0] == 7
    assert failed and len(caplog.records) == 1


def test_a_kernel_that_vanishes_between_the_look_and_the_load_is_built_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_KERNEL", "portable")
    real = cache.fetch

    def fetch_and_lose(request: Request) -> cache.Artifact:
        found = real(request)
        shutil.rmtree(found.directory)
        return found

    monkeypatch.setattr(cache, "fetch", fetch_and_lose)
    assert in_child(answer_noting_warnings) == ("portable", "built", [])


def test_a_forged_library_is_closed_before_the_next_is_loaded_from_its_path(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_KERNEL", "portable")
    assert is_answered_right()
    spec, path = jit.choose(PROBLEM).kernel.spec, place / "kernel.so"  # type: ignore[attr-defined]
    shutil.copy(fetch(SEVEN).path, path)
    with pytest.raises(launch.ForeignKernelError):
        launch.CompiledKernel.load(spec, path)
    path.unlink()
    shutil.copy(jit.choose(PROBLEM).kernel.path, path)  # type: ignore[attr-defined]
    assert launch.CompiledKernel.load(spec, path).path == path


def test_the_directory_a_build_needs_is_made_again_by_the_next(place: Path) -> None:
    """Nothing that a cache is made of has to be there: someone may delete all of it at any time."""
    fetch(SEVEN)
    shutil.rmtree(place)
    assert number() == (7, "built")
    shutil.rmtree(place / "locks")
    assert fetch(Request("other", SEVEN.source, ())).origin == "built"
    assert places.places()[0].path == place
    assert ctypes.CDLL(str(fetch(SEVEN).path)).number() == 7
