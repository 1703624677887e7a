# SPDX-License-Identifier: Apache-2.0
"""`awqjit cache` and `awqjit info`: what they show, what they remove, what they leave alone, what an image gets."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

for package in ("typer", "rich", "transformers"):
    pytest.importorskip(package)

import torch  # noqa: E402
import typer.main  # noqa: E402
from compilers import REAL, counting, kernel_script, number_of, number_source, script  # noqa: E402
from faults import STRANGER, in_child, needs_root, wait_for  # noqa: E402
from models import write_float  # noqa: E402

from awqjit import bake, config, jit, machine, places, store, toolchain, upkeep  # noqa: E402
from awqjit.cache import Artifact, Request, fetch  # noqa: E402
from awqjit.cli import main  # noqa: E402
from awqjit.cli.app import app  # noqa: E402
from awqjit.errors import ArgumentError, AwqJitWarning, KernelMissingError  # noqa: E402
from awqjit.spec import Problem  # noqa: E402
from awqjit.target import TARGETS, target  # noqa: E402

pytestmark = pytest.mark.skipif(not REAL, reason="needs g++ or clang++")

ROOT = Path(__file__).parents[1]
DAY = 24 * 3600
needs_x86 = pytest.mark.skipif(machine.detect().architecture != "x86_64", reason="compiles AVX-512 code")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user can enter, as pytest's own cannot."""
    with tempfile.TemporaryDirectory(prefix="awqjit-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(os.path.realpath(name))


@pytest.fixture
def place(folder: Path) -> Path:
    return folder / "cache"


@pytest.fixture(autouse=True)
def own_cache(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CXX", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (folder / "home").mkdir()
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(place))
    monkeypatch.setattr(places, "_private", places._Private())
    monkeypatch.setattr(places, "_warned", set())
    toolchain.forget()
    yield
    toolchain.forget()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An AWQ folder whose 14 layers are all of one shape: one kernel a mode, dtype and row."""
    root = tmp_path_factory.mktemp("bake")
    source = write_float(root / "float", intermediate_size=64, num_key_value_heads=4)
    assert main(["quantize", str(source), str(root / "awq"), "--group-size", "32"]) == 0
    return root / "awq"


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    """What a command prints: on stdout, or on stderr for a code of 1 without output."""
    capsys.readouterr()
    given = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert given == code, captured.out + captured.err
    return captured.out or captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    return json.loads(run(capsys, *arguments, "--json", code=code))


def kernel(number: int) -> Request:
    return Request(f"number{number}", number_source(number), ())


def stored(number: int, days: float = 0) -> Artifact:
    """A kernel in the cache, last used some days ago."""
    found = fetch(kernel(number))
    used = time.time() - days * DAY
    os.utime(found.path, (used, used))
    os.utime(found.directory / store.META, (used, used))
    return found


def names(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["name"].rpartition("-")[0] for item in items]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


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


# ---- bake -------------------------------------------------------------------------------------------------------

PROBLEM = Problem(64, 64, 32, "bf16", "fp16", symmetric=False, bias=False, act_bits=8)

WRITING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.chmod", "os.link", "os.symlink")
STARTING = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system")


def deeds_of(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a function returns, and each write or start of a program that Python reports. Only for a child: it stays."""
    deeds: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in (*WRITING, *STARTING, "tempfile.mkdtemp", "tempfile.mkstemp"):
            deeds.append(f"{event} {arguments[0]}")

    sys.addaudithook(hook)
    return function(), deeds


def tree(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_mtime_ns, path.stat().st_mode) for path in folder.rglob("*"))


def fresh_choice(problem: Problem) -> tuple[str, str]:
    jit.forget()
    choice = jit.choose(problem)
    return choice.kernel.name, choice.origin


@needs_root
@needs_x86
def test_an_image_holds_kernels_of_several_cpus_for_any_user_and_is_never_written(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    baked = folder / "opt" / "kernels"

    def bake_it() -> Any:
        os.umask(0o077)
        command = ["cache", "bake", baked, model, "--compute", "w4a8"]
        return run_json(capsys, *command, "--max-isa", "avx512_vnni", "--max-isa", "avx2")

    report = in_child(bake_it)
    assert [row["kernel"] for row in report["kernels"]] == ["avx512_vnni", "avx2"]
    assert {row["problem"] for row in report["kernels"]} == {PROBLEM.slug} and report["notes"] == []
    kept = {path.name for path in baked.iterdir()}
    assert {name.partition("-")[0] for name in kept - {row["name"] for row in report["kernels"]}} == {"dispatcher"}
    assert len(kept) == 3
    assert run(capsys, "cache", "verify", "--dir", baked).endswith("3 sound, 0 damaged\n")

    monkeypatch.delenv("AWQJIT_CACHE_DIR")
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(baked))
    monkeypatch.setenv("AWQJIT_JIT", "0")
    monkeypatch.setenv("HOME", "/nonexistent")
    if machine.detect().missing(frozenset({"avx512_vnni"})) is not None:
        pytest.skip("the kernels baked here are for wider CPUs than this one")
    for cap, row in ((None, "avx512_vnni"), ("avx2", "avx2")):
        if cap:
            monkeypatch.setenv("AWQJIT_MAX_ISA", cap)
        fresh_choice(PROBLEM)  # so that the child, who may not read the package's files, has all of it imported
        before = tree(folder)
        answer, deeds = in_child(lambda: deeds_of(lambda: fresh_choice(PROBLEM)), STRANGER)
        assert answer == (row, "baked") and deeds == []
        assert tree(folder) == before


def test_the_watch_over_writes_sees_what_it_looks_for() -> None:
    found = stored(1, days=40)
    _, deeds = in_child(lambda: deeds_of(lambda: fetch(kernel(1)).origin))
    assert deeds == [f"os.utime {found.directory / store.META}"]
    _, deeds = in_child(lambda: deeds_of(lambda: fetch(kernel(2)).origin))
    assert {deed.split()[0] for deed in deeds} >= {"os.mkdir", "open", "os.rename"}


@needs_x86
def test_all_rows_can_be_baked_at_once(folder: Path) -> None:
    both = [Problem(64, 64, 32, "bf16", "fp16", symmetric=False, bias=False, act_bits=bits) for bits in (8, 16)]
    chosen = [(spec.target.name, spec.problem.act_bits) for spec in bake.specs(both, rows=("all", "portable"))]
    here = [row for row in TARGETS if not row.machines or platform.machine() in row.machines]
    assert chosen == [(row.name, bits) for row in here for bits in (8, 16) if bits in row.act_bits]


def test_every_mode_and_dtype_that_is_asked_for_is_baked_once(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cache", "bake", folder / "baked", model, model, "--kernel", "portable"]
    wanted = ["--compute", "w4a8", "--compute", "w4a16", "--dtype", "bfloat16", "--dtype", "auto"]
    report = run_json(capsys, *command, *wanted)
    assert sorted(row["problem"] for row in report["kernels"]) == [
        f"{mode}-{dtype}-k64-n64-g32-sfp16-asym" for mode in ("w4a16", "w4a8") for dtype in ("bf16", "fp32")
    ]
    assert all(row["seconds"] > 0 for row in report["kernels"])
    before = tree(folder / "baked")
    again = run_json(capsys, *command, *wanted)
    assert [row["name"] for row in again["kernels"]] == [row["name"] for row in report["kernels"]]
    assert {row["seconds"] for row in again["kernels"]} == {0}
    assert [entry[:2] for entry in tree(folder / "baked")] == [entry[:2] for entry in before]
    assert "there already" in run(capsys, *command, "--compute", "w4a8")


def test_without_a_level_or_a_row_this_machines_own_kernels_are_baked_and_used(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = run_json(capsys, "cache", "bake", folder / "baked", model, "--compute", "w4a8")["kernels"]
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(folder / "baked"))
    monkeypatch.setenv("AWQJIT_JIT", "0")
    assert fresh_choice(PROBLEM) == (row["kernel"], "baked")
    import awqjit

    ids = torch.arange(5)[None]
    small = awqjit.from_pretrained(model, compute="w4a8", progress=False)
    with torch.inference_mode():
        assert torch.isfinite(small(ids).logits).all()  # a missing kernel would be an error
    assert {choice.origin for choice in jit.choices()} == {"baked"}
    assert not (folder / "cache").exists()


@pytest.mark.skipif(machine.detect().missing(target("avx512_vnni").features) is not None, reason="no AVX512-VNNI")
def test_an_image_that_lacks_the_best_kernel_runs_the_next_one_after_one_warning(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "cache", "bake", folder / "baked", model, "--compute", "w4a8", "--kernel", "portable")
    monkeypatch.setenv("AWQJIT_CACHE_PATH", str(folder / "baked"))
    monkeypatch.setattr(toolchain, "candidates", lambda: (toolchain.Candidate("g++", ("/nowhere/g++",)),))
    toolchain.forget()
    with pytest.warns(AwqJitWarning, match="portable is used") as caught:
        assert fresh_choice(PROBLEM) == ("portable", "baked")
    assert len(caught) == 1 and "/nowhere/g++" in str(caught[0].message)
    monkeypatch.setenv("AWQJIT_JIT", "0")
    with pytest.raises(KernelMissingError, match="avx512_vnni is in no cache"):
        fresh_choice(PROBLEM)


def test_what_cannot_be_baked_is_said_before_anything_is_compiled(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["cache", "bake", folder / "baked", model]
    assert "one of portable, avx2" in run(capsys, *command, "--max-isa", "sse9", code=1)
    assert "all or one of amx_int8, avx512_vnni" in run(capsys, *command, "--kernel", "torch", code=1)
    assert "computes w4a8 only" in run(capsys, *command, "--kernel", "avx512_vnni", "--compute", "w4a16", code=1)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    assert "written by everyone" in run(capsys, "cache", "bake", folder / "open", model, code=1)
    (folder / "file").touch()
    assert "not a directory" in run(capsys, "cache", "bake", folder / "file", model, code=1)
    monkeypatch.setenv("AWQJIT_JIT", "0")
    assert "AWQJIT_JIT" in run(capsys, *command, code=1)
    monkeypatch.delenv("AWQJIT_JIT")
    monkeypatch.setenv("AWQJIT_CXX", str(folder / "no-such-compiler"))
    assert "no working C++ compiler" in run(capsys, *command, code=1)
    assert not (folder / "baked").exists() and list((folder / "open").iterdir()) == []


def test_a_kernel_the_compiler_refuses_is_an_error_and_not_left_out(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = kernel_script(folder / "c++", "echo 'kernel.cpp:1:1: error: too old for this' >&2; exit 1")
    monkeypatch.setenv("AWQJIT_CXX", str(compiler))
    message = run(capsys, "cache", "bake", folder / "baked", model, "--kernel", "portable", code=1)
    assert "too old for this" in message and "command: " in message
    assert {item.kind for item in upkeep.items(folder / "baked")} == {"failed"}


@needs_root
def test_bake_says_what_will_keep_other_users_away(folder: Path) -> None:
    baked = folder / "closed" / "baked"
    baked.mkdir(parents=True)
    assert bake.obstacles(baked) == ()
    (folder / "closed").chmod(0o700)
    os.chown(baked, STRANGER, STRANGER)
    baked.chmod(0o775)
    owner, group, entry = bake.obstacles(baked)
    assert f"{baked} must belong to root" in owner and f"{baked} can be written by a group" in group
    assert f"{folder / 'closed'} cannot be entered" in entry


# ---- info -------------------------------------------------------------------------------------------------------


def test_info_says_why_each_level_and_row_is_on_or_off(capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(max_isa="avx2"):
        found = run_json(capsys, "info")
    assert list(found["cpu"]["levels"]) == [name for name, _ in machine.ISA_LEVELS]
    assert found["cpu"]["levels"]["portable"] == "on"
    assert "AWQJIT_MAX_ISA=avx2" in found["cpu"]["levels"]["amx"] and "amx_tile" in found["cpu"]["levels"]["amx"]
    assert found["kernel"]["portable"] == "on for w4a8 and w4a16"
    reason = found["kernel"]["avx512_vnni"]
    assert "AWQJIT_MAX_ISA=avx2" in reason or "needs x86_64" in reason
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


def test_the_modes_of_baked_files_do_not_depend_on_the_umask(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bake_it() -> None:
        os.umask(0o077)
        run(capsys, "cache", "bake", folder / "a" / "b", model, "--kernel", "portable")

    in_child(bake_it)
    for path in (folder / "a", folder / "a" / "b", *(folder / "a" / "b").rglob("*")):
        mode = path.stat().st_mode
        assert mode & stat.S_IROTH and not mode & (stat.S_IWGRP | stat.S_IWOTH), path
        assert mode & stat.S_IXOTH or not path.is_dir(), path
