# SPDX-License-Identifier: Apache-2.0
"""The kernel cache when files are damaged or are not what they say: noticed, reported in one line, built again."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compilers import REAL
from faults import (  # noqa: F401  (fixtures)
    PROBLEM,
    SEVEN,
    answer_noting_warnings,
    answer_of,
    folder_for_everyone,
    fork,
    in_child,
    is_answered_right,
    number,
    own_home,
    place_of_everyone,
    wait_for,
)

from awqjit import machine, store, toolchain
from awqjit.cache import fetch
from awqjit.target import TARGETS

pytestmark = [
    pytest.mark.skipif(not REAL or sys.platform != "linux", reason="needs Linux and g++ or clang++"),
    pytest.mark.usefixtures("home"),
]

WIDE = next(t.name for t in TARGETS if 16 in t.act_bits and not machine.detect().missing(t.features)) != "portable"


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
