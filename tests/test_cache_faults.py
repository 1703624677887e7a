# SPDX-License-Identifier: Apache-2.0
"""The kernel cache when builders are killed or hang, files are damaged, and the file system does not keep its word."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import mmap
import os
import random
import shutil
import signal
import struct
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
    own_home,
    wait_for,
)

from awqjit import cache, jit, launch, machine, places, store, toolchain
from awqjit.cache import Request, fetch
from awqjit.errors import AwqJitWarning
from awqjit.target import TARGETS

pytestmark = [
    pytest.mark.skipif(not REAL or sys.platform != "linux", reason="needs Linux and g++ or clang++"),
    pytest.mark.usefixtures("home"),
]

WIDE = next(t.name for t in TARGETS if 16 in t.act_bits and not machine.detect().missing(t.features)) != "portable"


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(folder / "cache"))
    return folder / "cache"


def number() -> tuple[int, str]:
    found = fetch(SEVEN)
    return number_of(found.path), found.origin


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


# Damage. (More kinds of it, each found within one process, are in test_cache.py.)


def interesting_lengths(content: bytes) -> list[int]:
    """Ends of the ELF header, of the program headers, segments and sections, of pages; each with its neighbours."""
    program_headers, section_headers = struct.unpack_from("<QQ", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    ends = {0, 4, 16, 64, program_headers + size * count, section_headers, len(content) // 2, len(content)}
    for i in range(count):
        offset, _, _, length = struct.unpack_from("<QQQQ", content, program_headers + i * size + 8)
        ends.add(offset + length)
    ends |= set(range(0, len(content), 4096))
    lengths = {end + near for end in ends for near in (-1, 0, 1)}
    return sorted(length for length in lengths if 0 <= length < len(content))


def test_a_library_cut_anywhere_or_with_any_bit_flipped_is_noticed(place: Path) -> None:
    directory = fetch(SEVEN).directory
    wanted = SEVEN.identity(toolchain.find_compiler())
    library = directory / store.LIBRARY
    content = library.read_bytes()
    assert not store.check(directory, wanted)
    lengths = interesting_lengths(content)
    assert len(lengths) > 20
    for length in lengths:
        library.write_bytes(content[:length])
        assert f"{length} bytes instead of {len(content)}" in store.check(directory, wanted)
    rng = random.Random(1)
    for position in {0, 4, 18, 24, len(content) - 1, *(rng.randrange(len(content)) for _ in range(200))}:
        flipped = bytearray(content)
        flipped[position] ^= 1 << rng.randrange(8)
        library.write_bytes(flipped)
        assert "sha256" in store.check(directory, wanted), position
    library.write_bytes(content)
    assert not store.check(directory, wanted)


def link(path: Path, target: str) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


def directory_in_place_of(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").touch()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut within the ELF header": lambda directory: os.truncate(directory / "kernel.so", 63),
    "a dangling link for the library": lambda directory: link(directory / "kernel.so", "/nowhere/kernel.so"),
    "a dangling link for meta.json": lambda directory: link(directory / "meta.json", "/nowhere"),
    "a link to itself for the library": lambda directory: link(directory / "kernel.so", "kernel.so"),
    "a dangling link for the directory": lambda directory: link(directory, "/nowhere"),
    "a link to itself for the directory": lambda directory: link(directory, directory.name),
    "a filled directory for the library": lambda directory: directory_in_place_of(directory / "kernel.so"),
    "a filled directory for meta.json": lambda directory: directory_in_place_of(directory / "meta.json"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_reported_in_one_line_and_built_again(
    damage: Callable[[Path], None], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = fetch(SEVEN).directory
    damage(directory)
    with caplog.at_level(logging.WARNING, "awqjit"):
        assert number() == (7, "built")
    assert len(caplog.records) == 1 and str(directory) in caplog.text
    assert number() == (7, "cache") and not directory.is_symlink()
    assert sorted(path.name for path in place.iterdir()) == sorted(["locks", directory.name])


def forge(directory: Path, content: bytes, **changes: object) -> None:
    """Put a library into a kernel's directory whose meta.json agrees with it."""
    library = directory / store.LIBRARY
    library.unlink()
    library.write_bytes(content)
    library.chmod(0o755)
    meta = store.read_meta(directory) | {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} | changes
    (directory / store.META).write_text(json.dumps(meta))


def of_another_architecture(library: Path) -> bytes:
    content = bytearray(library.read_bytes())
    content[18:20] = struct.pack("<H", 8)  # e_machine: MIPS
    return bytes(content)


@pytest.mark.parametrize("what", ["another architecture", "garbage", "no kernel at all", "another kernel"])
def test_a_kernel_that_is_whole_and_cannot_be_used_here_is_reported_in_one_line_and_built_again(
    what: str, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWQJIT_KERNEL", "portable")
    # In children: a library once loaded stays in its process.
    assert in_child(answer_noting_warnings) == ("portable", "built", [])
    (entry,) = store.entries(place)
    other = {
        "another architecture": lambda: of_another_architecture(entry.path / store.LIBRARY),
        "garbage": lambda: os.urandom(9999),
        "no kernel at all": lambda: fetch(SEVEN).path.read_bytes(),
        "another kernel": lambda: (
            (entry.path / store.LIBRARY).read_bytes().replace(PROBLEM.slug.encode(), b"x" * len(PROBLEM.slug))
        ),
    }[what]()
    forge(entry.path, other)

    def answer_noting_log() -> tuple[tuple[str, str, list[str]], list[str]]:
        with caplog.at_level(logging.WARNING, "awqjit"):
            return answer_noting_warnings(), [record.getMessage() for record in caplog.records]

    answer, lines = in_child(answer_noting_log)
    assert answer == ("portable", "built", [])
    assert len(lines) == 1 and "cannot be loaded" in lines[0] and str(entry.path) in lines[0]
    assert in_child(answer_noting_warnings) == ("portable", "cache", [])


def test_a_kernel_said_to_be_for_another_machine_is_not_even_read(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = fetch(SEVEN).directory
    forge(directory, b"not a library", machine="riscv64")
    with caplog.at_level(logging.WARNING, "awqjit"):
        assert number() == (7, "built")
    assert len(caplog.records) == 1 and "another machine" in caplog.text


def test_a_baked_kernel_that_cannot_be_loaded_is_passed_over_and_left_alone(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_KERNEL", "portable")
    in_child(answer_noting_warnings)
    (entry,) = store.entries(place)
    forge(entry.path, of_another_architecture(entry.path / store.LIBRARY))
    place.rename(folder / "baked")
    forged = (folder / "baked" / entry.path.name / store.LIBRARY).read_bytes()
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(folder / "baked"))
    assert in_child(answer_noting_warnings) == ("portable", "built", [])
    assert in_child(answer_noting_warnings) == ("portable", "cache", [])
    assert (folder / "baked" / entry.path.name / store.LIBRARY).read_bytes() == forged


def test_a_published_file_never_changes_in_place(place: Path) -> None:
    directory = fetch(SEVEN).directory
    library = directory / store.LIBRARY
    os.chmod(library, 0o777)  # reason enough to build it again
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before, inode = bytes(mapped), os.fstat(file.fileno()).st_ino
        assert number() == (7, "built")
        status = os.fstat(file.fileno())
        assert bytes(mapped) == before and status.st_ino == inode and status.st_size == len(before)
        assert library.stat().st_ino != inode


def test_a_kernel_in_use_goes_on_while_it_is_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("AWQJIT_KERNEL", "portable")

    def answer_until_told() -> int:
        answers = 0
        while not (folder / "enough").exists() or answers < 20:
            assert is_answered_right()
            answers += 1
            (folder / "running").write_text(str(answers))
        return answers

    child = fork(answer_until_told)
    try:
        wait_for(folder / "running")
        (entry,) = store.entries(place)
        (entry.path / store.META).write_text("{}")  # damaged, so that the others replace it
        assert in_child(answer_noting_warnings) == ("portable", "built", [])
        shutil.rmtree(place)
    finally:
        (folder / "enough").touch()
    assert answer_of(child) >= 20


@pytest.mark.skipif(not WIDE, reason="this CPU runs the portable row alone")
def test_a_cache_made_on_a_wider_machine_is_not_used_on_a_narrower_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, origin, _ = in_child(answer_noting_warnings)
    assert wide != "portable" and origin == "built"
    (entry,) = store.entries(place)

    def answer_with_maps() -> tuple[tuple[str, str, list[str]], str]:
        return answer_noting_warnings(), Path("/proc/self/maps").read_text()

    answer, maps = in_child(answer_with_maps)
    assert answer == (wide, "cache", []) and str(entry.path) in maps
    monkeypatch.setenv("AWQJIT_MAX_ISA", "portable")
    for origin in ("built", "cache"):
        answer, maps = in_child(answer_with_maps)
        assert answer == ("portable", origin, [])
        assert str(entry.path) not in maps and str(place) in maps


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
