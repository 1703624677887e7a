# SPDX-License-Identifier: Apache-2.0
"""Compilers are found, tried out, run within bounds and reported on."""

from __future__ import annotations

import importlib.util
import os
import pickle
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compilers import REAL, counting, number_of, number_source, script

from awqjit import child, places, toolchain
from awqjit.errors import ArgumentError, CompileError, NoCompilerError

needs_compiler = pytest.mark.skipif(not REAL, reason="needs g++ or clang++")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWQJIT_CXX", "CXX"):
        monkeypatch.delenv(name, raising=False)
    toolchain.forget()
    yield
    toolchain.forget()


def compiler_at(path: Path) -> toolchain.Compiler:
    return toolchain.Compiler((str(path),), "gcc", "", "")


def compile_number(folder: Path, compiler: toolchain.Compiler, text: str = "", **named: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "kernel.cpp"
    source.write_text(text or number_source(7))
    toolchain.compile_shared(compiler, source, named.pop("flags", ()), folder / "kernel.so", named.pop("timeout", 60))
    return folder / "kernel.so"


@pytest.mark.parametrize("zig", [False, True])
def test_candidates_come_in_order_and_zig_only_where_installed(zig: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.util.find_spec("json" if zig else "no_such_module_at_all")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    monkeypatch.setenv("CXX", "my-c++ -pipe")
    found = toolchain.candidates()
    assert [one.origin for one in found] == ["CXX", "g++", "clang++"] + ["ziglang"] * zig
    assert found[0].argv == ("my-c++", "-pipe")


def test_zig_is_told_not_to_compile_for_this_very_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json"))
    assert "-mcpu=baseline" in toolchain.candidates()[-1].argv


ZIG_FLAGS = ("-nostdlib++", "-mcpu=baseline")


@pytest.mark.parametrize("command", ["/opt/zig c++", "/opt/zig-0.17/zig c++ -mcpu=baseline", "py -m ziglang c++"])
def test_a_zig_that_the_user_names_is_told_so_too(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_CXX", command)
    (found,) = toolchain.candidates()
    assert sorted(found.argv[-2:]) == sorted(ZIG_FLAGS) and found.argv[-3] == "c++"


def test_zig_as_something_other_than_a_compiler_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_CXX", "/opt/zigzag -pipe")
    assert toolchain.candidates()[0].argv == ("/opt/zigzag", "-pipe")


def defaults(folder: Path, refused: str) -> Path:
    """A compiler made to allow SSE3 always, unless it is told which CPU to compile for; some flags it does not know."""
    told = f'case "$*" in *{refused}*) echo \'error: unknown option\' >&2; exit 1;; *-march=*) exec "$REAL" "$@";; esac'
    return script(folder / "wide-c++", f'{told}\nexec "$REAL" -msse3 "$@"')


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="flags of x86-64 on Linux")
def test_a_compiler_that_allows_more_than_every_cpu_has_is_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = defaults(tmp_path, refused="-mcpu=")
    monkeypatch.setenv("AWQJIT_CXX", str(wide))
    found = toolchain.find_compiler()
    assert found.argv == (str(wide), "-march=x86-64")
    assert found.identity.endswith("|-march=x86-64")
    with pytest.raises(CompileError, match="no SSE3"):
        compile_number(tmp_path / "built", found, '#ifndef __SSE3__\n#error "no SSE3"\n#endif\n')


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="flags of x86-64 on Linux")
def test_a_compiler_that_cannot_be_told_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_CXX", str(defaults(tmp_path, refused="-m[ac]*=")))
    with pytest.raises(NoCompilerError, match="compiles for more than every CPU has, and neither -mcpu=baseline nor"):
        toolchain.find_compiler()


def test_no_flag_depends_on_this_cpu_or_breaks_ieee_arithmetic() -> None:
    flags = toolchain.BASE_FLAGS
    assert "-ffp-contract=off" in flags
    assert not [flag for flag in flags if "native" in flag or "fast-math" in flag or flag.startswith("-m")]


@needs_compiler
def test_the_compiler_found_says_what_it_is() -> None:
    compiler = toolchain.find_compiler()
    assert compiler.kind in ("gcc", "clang")
    assert os.path.isabs(compiler.argv[0]) and os.access(compiler.argv[0], os.X_OK)
    assert compiler.version and compiler.kind in compiler.identity
    assert compiler.argv[0] not in compiler.identity  # the same compiler at another path builds the same


@needs_compiler
def test_arguments_of_the_compiler_are_part_of_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toolchain.find_compiler()
    monkeypatch.setenv("AWQJIT_CXX", f"{REAL} -DSOMETHING=1")
    assert toolchain.find_compiler().identity != plain.identity


@needs_compiler
def test_a_compiler_is_tried_once_per_process_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    slow = script(tmp_path / "c++", f'echo "$1" >> {shlex.quote(str(log))}\nexec "$REAL" "$@"')
    monkeypatch.setenv("AWQJIT_CXX", str(slow))
    first = toolchain.find_compiler()
    runs = log.read_text()
    assert toolchain.find_compiler() is first and log.read_text() == runs
    monkeypatch.setenv("AWQJIT_CXX", "/nowhere/c++")
    with pytest.raises(NoCompilerError):
        toolchain.find_compiler()
    monkeypatch.setenv("AWQJIT_CXX", str(slow))
    assert toolchain.find_compiler() is first and log.read_text() == runs


@needs_compiler
def test_a_broken_cxx_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert toolchain.find_compiler().argv != ("/nowhere/c++",)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 1", "exit status 1"),
        ("exit 0", "printed nothing"),
        ("echo version 1", "wrote no shared library"),
        ("echo version 1; : > probe.so", "wrote no shared library"),
        ("echo version 1; echo garbage > probe.so", "cannot be loaded"),
        ("head -c 100000 /dev/urandom; head -c 100000 /dev/urandom > probe.so", "cannot be loaded"),
        (
            '[ "$1" = --version ] && echo version 1 && exit; echo "probe.cpp:1: fatal error: bad luck" >&2; exit 1',
            "bad luck",
        ),
        ("kill -9 $$", "signal 9"),
    ],
)
def test_a_forced_compiler_that_does_not_work_is_an_error_with_its_reason_only(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_CXX", str(script(tmp_path / "my c++", body)))  # the space is part of the name
    with pytest.raises(NoCompilerError) as caught:
        toolchain.find_compiler()
    (text,) = caught.value.args[0]
    assert text.startswith("AWQJIT_CXX=") and reason in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_directory_or_a_file_that_cannot_run_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    for path in (tmp_path, tmp_path / "plain", tmp_path / "absent"):
        monkeypatch.setenv("AWQJIT_CXX", str(path))
        with pytest.raises(NoCompilerError, match="not found, or not an executable file"):
            toolchain.find_compiler()


def test_no_compiler_at_all_lists_every_name_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoCompilerError) as caught:
        toolchain.find_compiler()
    assert caught.value.args[0] == ("g++: not found", "clang++: not found")


@needs_compiler
def test_a_system_that_forbids_starting_programs_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object, **named: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(child.subprocess, "Popen", forbidden)
    with pytest.raises(NoCompilerError, match="Operation not permitted"):
        toolchain.find_compiler()


@needs_compiler
def test_no_temporary_directory_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    monkeypatch.setattr(places, "_OTHER_TEMPORARY", ())
    monkeypatch.setattr(places, "places", lambda: ())
    with pytest.raises(NoCompilerError, match="TMPDIR"):
        toolchain.find_compiler()


@needs_compiler
def test_the_same_source_gives_the_same_bytes_in_every_directory(tmp_path: Path) -> None:
    compiler = toolchain.find_compiler()
    one = compile_number(tmp_path / "one", compiler).read_bytes()
    other = compile_number(tmp_path / "a longer näme", compiler).read_bytes()
    assert one == other
    assert str(tmp_path).encode() not in one


@needs_compiler
def test_a_library_works_and_needs_no_cxx_runtime(tmp_path: Path) -> None:
    library = compile_number(tmp_path, toolchain.find_compiler())
    assert number_of(library) == 7
    assert b"libstdc++.so" not in library.read_bytes() and b"libc++.so" not in library.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel.cpp", "kernel.so"]


@needs_compiler
def test_flags_reach_the_compiler_and_warnings_come_back(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text("#warning look here\n" + number_source(7).replace("7", "SEVEN"))
    log = toolchain.compile_shared(
        toolchain.find_compiler(), source, ("-DSEVEN=8",), tmp_path / "kernel.so", timeout=60
    )
    assert "look here" in log and number_of(tmp_path / "kernel.so") == 8


@needs_compiler
def test_a_compile_error_shows_the_first_error_and_a_command_that_repeats_it(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_number(tmp_path / "mit Leerzeichen ä", toolchain.find_compiler(), "int good;\nint bad = ;\n")
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)
    assert "kernel.cpp:2" in error.first_error and "error" in error.first_error
    command = str(error).split("command: ")[1].splitlines()[0]
    again = subprocess.run(command, shell=True, cwd="/", capture_output=True, text=True, timeout=60)
    assert again.returncode != 0 and "kernel.cpp:2" in again.stderr


def test_the_neutral_command_names_nothing_of_this_machine() -> None:
    command = toolchain.neutral_command(("-mavx2",))
    assert command == ("c++", *toolchain.BASE_FLAGS, "-mavx2", "kernel.cpp", "-o", "kernel.so", "-lm")


def test_the_output_must_lie_beside_the_source(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="output"):
        toolchain.compile_shared(compiler_at(tmp_path), tmp_path / "kernel.cpp", (), tmp_path / "x" / "kernel.so", 1)


def test_a_compiler_that_hangs_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    body = "sleep 300 & echo $! > children; echo working; wait"
    start = time.monotonic()
    with pytest.raises(CompileError, match="stopped after 1 s") as caught:
        compile_number(tmp_path, compiler_at(script(tmp_path / "c++", body)), timeout=1)
    assert time.monotonic() - start < 20
    assert caught.value.args[3].startswith("working")  # what it printed before is kept
    assert ends((tmp_path / "children").read_text())


def ends(process: str) -> bool:
    """Whether a process ends within a few seconds (a zombie has ended)."""
    for _ in range(100):
        try:
            status = Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if status == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_compiler_that_prints_without_end_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="stopped after printing more than 16 MiB") as caught:
        compile_number(tmp_path, compiler_at(script(tmp_path / "c++", "yes")))
    assert len(caught.value.args[3]) < 2 * child.MAX_LOG


def test_a_compiler_runs_without_input_in_english_and_keeps_its_temporary_files_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGUAGE", "de")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/kept")
    monkeypatch.setenv("CCC_OVERRIDE_OPTIONS", "+-Ofast")
    body = f'env > environment; cat > input; : > "$TMPDIR/left"; cp {shlex.quote(__file__)} kernel.so'
    compile_number(tmp_path, compiler_at(script(tmp_path / "c++", body)))
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "environment").read_text().splitlines())
    assert seen["LC_ALL"] == "C" and Path(seen["TMPDIR"]).parent == tmp_path
    assert "LANGUAGE" not in seen and "CCC_OVERRIDE_OPTIONS" not in seen and seen["LD_LIBRARY_PATH"] == "/kept"
    assert (tmp_path / "input").read_bytes() == b""
    assert not Path(seen["TMPDIR"]).exists()


def test_output_that_is_no_text_is_shown_anyway(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_number(tmp_path, compiler_at(script(tmp_path / "c++", "printf '\\377\\376 error \\0 x'; exit 3")))
    assert "error" in caught.value.first_error and "exit status 3" in caught.value.args[3]


@needs_compiler
def test_a_file_stamp_changes_with_the_file_and_is_not_given_for_a_command(tmp_path: Path) -> None:
    path, _ = counting(tmp_path / "c++")
    before = toolchain.file_stamp((str(path),))
    assert before is not None and before == toolchain.file_stamp((str(path),))
    os.utime(path, (1, 1))
    assert toolchain.file_stamp((str(path),)) != before
    assert toolchain.file_stamp((str(path), "-pipe")) is None
    assert toolchain.file_stamp((str(tmp_path / "absent"),)) is None


@pytest.mark.parametrize("flag", ["-march=native", "-mavx2", "-Ofast", "-ffast-math", "-ffp-contract=fast"])
@pytest.mark.parametrize("variable", ["AWQJIT_CXX", "CXX"])
def test_a_compiler_with_flags_that_change_the_code_is_refused(
    variable: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared cache hands kernels to other CPUs, and -ffast-math switches subnormals off for a whole process."""
    monkeypatch.setenv(variable, f"g++ {flag}")
    if variable == "AWQJIT_CXX":
        with pytest.raises(NoCompilerError, match=re.escape(flag)):
            toolchain.find_compiler()
    else:
        assert flag not in toolchain.find_compiler().argv
