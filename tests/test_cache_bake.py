# SPDX-License-Identifier: Apache-2.0
"""`awqjit cache bake`: what an image gets, which kernels run from it, and that nothing is written there."""

from __future__ import annotations

import os
import platform
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for package in ("typer", "rich", "transformers"):
    pytest.importorskip(package)

import torch  # noqa: E402
from cache_commands import (  # noqa: E402, F401  (fixtures)
    folder_for_everyone,
    kernel,
    needs_x86,
    one_shape_model,
    own_cache,
    place_of_everyone,
    run,
    run_json,
    stored,
)
from compilers import REAL, kernel_script  # noqa: E402
from faults import STRANGER, in_child, needs_root  # noqa: E402

from awqjit import bake, jit, machine, store, toolchain, upkeep  # noqa: E402
from awqjit.cache import fetch  # noqa: E402
from awqjit.errors import AwqJitWarning, KernelMissingError  # noqa: E402
from awqjit.spec import Problem  # noqa: E402
from awqjit.target import TARGETS, target  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not REAL, reason="needs g++ or clang++"),
    pytest.mark.usefixtures("own_cache"),
]

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
    assert {name.partition("-")[0] for name in kept - {row["name"] for row in report["kernels"]}} == {
        "dispatcher",
        "packer",
    }
    assert len(kept) == 4
    assert run(capsys, "cache", "verify", "--dir", baked).endswith("4 sound, 0 damaged\n")

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
