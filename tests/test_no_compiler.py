# SPDX-License-Identifier: Apache-2.0
"""Machines without a C++ compiler, each a process of its own: with zig, with numba alone, with neither."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from awqjit import child, machine, toolchain
from awqjit.target import TARGETS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("ziglang", "numba")}
needs_zig = pytest.mark.skipif(not INSTALLED["ziglang"], reason="ziglang is not installed")
needs_numba = pytest.mark.skipif(not INSTALLED["numba"], reason="numba is not installed")
BEST = {
    str(bits): next(t.name for t in TARGETS if bits in t.act_bits and not machine.detect().missing(t.features))
    for bits in (8, 16)
}
TESTS = Path(__file__).parent

# Takes the place of the finder of installed packages, and does not find some.
HIDER = """
import os, sys
from importlib.machinery import PathFinder

class Hider(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = os.environ["HIDDEN"].split()
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hider
"""

# One layer in both modes, checked against the oracle; prints the rows that ran and our warnings.
LAYER = """
import json, sys, warnings
import torch
sys.path.insert(0, {tests!r})
from oracle import expected, w4a8_bits
from strategies import RawWeight, Shape
from awqjit import jit
from awqjit.errors import AwqJitWarning
from awqjit.modules import Int4Linear

torch.manual_seed(0)
shape = Shape(264, 72, 128)
q, z = (torch.randint(0, 16, size, dtype=torch.uint8) for size in ((264, 72), (3, 72)))
raw = RawWeight(shape, q, z, torch.randn(3, 72).half() / 64, "a layer")
found = {{}}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for bits in (8, 16):
        layer = Int4Linear.from_quantized(raw.quantized(), compute=f"w4a{{bits}}")
        for m in (1, 3, 40):
            x = torch.randn(m, 264).bfloat16()
            y = layer(x)
            expected(x, q, z, raw.s, 128, act_bits=bits).check(y)
            if bits == 8:
                wanted = w4a8_bits(x, q, z, raw.s, 128, fused=jit.choices()[0].kernel.name != "torch")
                assert torch.equal(y, wanted)
        choice = jit.choices()[-1]
        found[bits] = [choice.kernel.name, choice.origin]
    ours = [str(one.message) for one in caught if issubclass(one.category, AwqJitWarning)]
print(json.dumps({{"found": found, "warnings": ours, "numba": "numba" in sys.modules}}))
"""


@dataclass
class Container:
    """An environment with an empty PATH and an empty home, and some packages hidden."""

    folder: Path
    hidden: tuple[str, ...] = ()
    zig_cache: Path | None = None
    home: str = ""

    def run(self, *command: str, timeout: int = 400) -> str:
        for name in ("bin", "hider", "home", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "hider" / "sitecustomize.py").write_text(HIDER)
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "OPENBLAS_CORETYPE") if name in os.environ}
        environment = kept | {
            "PATH": str(self.folder / "bin"),
            "HOME": self.home or str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(self.folder / "hider"),
            "HIDDEN": " ".join(self.hidden),
        }
        if self.zig_cache:
            environment["ZIG_GLOBAL_CACHE_DIR"] = str(self.zig_cache)
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def layer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.run("-c", LAYER.format(tests=str(TESTS))))
        return answer


@pytest.fixture(scope="module")
def zig_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """zig's compiled run-time library: made once for all tests but the one that begins with nothing."""
    return tmp_path_factory.mktemp("zig")


# ---- zig --------------------------------------------------------------------------------------------------------


@needs_zig
def test_zig_alone_gives_the_fast_rows_from_nothing_without_a_warning(tmp_path: Path) -> None:
    machine_ = Container(tmp_path)
    first = machine_.layer()
    assert first["found"] == {bits: [row, "built"] for bits, row in BEST.items()}
    assert first["warnings"] == []
    assert not first["numba"]
    # Nothing is left anywhere but in the kernel cache, zig's own files among it.
    assert [path.name for path in (tmp_path / "home").iterdir()] == [".cache"]
    assert [path.name for path in (tmp_path / "home" / ".cache").iterdir()] == ["awqjit"]
    assert (tmp_path / "home" / ".cache" / "awqjit" / "zig").is_dir()
    assert list((tmp_path / "tmp").iterdir()) == []
    # The next process finds kernels by zig's file, and need not start it.
    shutil.rmtree(tmp_path / "home" / ".cache" / "awqjit" / "zig")
    second = machine_.layer()
    assert second["found"] == {bits: [row, "cache"] for bits, row in BEST.items()}
    assert not (tmp_path / "home" / ".cache" / "awqjit" / "zig").exists()
    assert second["warnings"] == []


@needs_zig
def test_zig_compiles_where_the_home_directory_cannot_be_written(tmp_path: Path) -> None:
    found = Container(tmp_path, home="/dev/null").layer()
    assert found["found"] == {bits: [row, "built"] for bits, row in BEST.items()}
    (warning,) = found["warnings"]
    assert "no directory keeps compiled kernels" in warning
    assert list((tmp_path / "tmp").iterdir()) == []


@needs_zig
def test_info_names_zig(tmp_path: Path, zig_cache: Path) -> None:
    pytest.importorskip("typer")
    command = "import sys; from awqjit.cli import main; sys.exit(main(['info', '--json']))"
    found = json.loads(Container(tmp_path, zig_cache=zig_cache).run("-c", command))
    compilers = {origin: text for one in found["compiler"] for origin, text in one.items()}
    assert list(compilers) == ["g++", "clang++", "ziglang"]
    assert "not found" in compilers["g++"] and "not found" in compilers["clang++"]
    assert "used: clang" in compilers["ziglang"]
    assert found["kernel"][BEST["8"]].startswith("on")


def zig(zig_cache: Path, monkeypatch: pytest.MonkeyPatch) -> toolchain.Compiler:
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(zig_cache))
    return toolchain.Compiler(toolchain.candidates()[-1].argv, "clang", "", "")


MACROS = {"-mfma": "__FMA__", "-mf16c": "__F16C__", "-mavx2": "__AVX2__", "-mavxvnni": "__AVXVNNI__"}


@needs_zig
@pytest.mark.skipif(machine.detect().architecture != "x86_64", reason="needs x86-64")
def test_zig_allows_exactly_the_instructions_that_a_rows_flags_name(
    tmp_path: Path, zig_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the CPU it runs on: a cache may be shared, and a narrow row runs where a wide one cannot."""
    compiler = zig(zig_cache, monkeypatch)
    (tmp_path / "empty.cpp").write_text("")
    names = {"-mfma", "-mf16c", "-mavx2", "-mavxvnni", "-mavx512f", "-mavx512bw", "-mavx512vnni", "-mavx512bf16"}
    names |= {"-mamx-int8", "-mavxvnniint8", "-mavx512fp16"}
    implied = {"-mavx512f": {"-mavx2", "-mfma", "-mf16c"}, "-mavxvnni": {"-mavx2"}, "-mavx512vnni": {"-mavx512f"}}
    rows = [target for target in TARGETS if not target.machines or "x86_64" in target.machines]
    assert "portable" in {row.name for row in rows}
    for row in rows:
        command = (*compiler.argv, *toolchain.BASE_FLAGS, *row.flags, "-E", "-dM", "empty.cpp")
        failure, text = child.run(command, tmp_path, 120, toolchain._variables(compiler.argv))
        assert failure is None, text
        defined = {line.split()[1] for line in text.splitlines() if line.startswith("#define")}
        assert "__clang__" in defined and "__SSE2__" in defined
        for name in names:
            macro = MACROS.get(name, f"__{name[2:].upper().replace('-', '_')}__")
            wanted = name in row.flags or any(name in implied.get(flag, ()) for flag in row.flags)
            assert (macro in defined) == wanted, f"{row.name}: {macro}"
        assert ("__AVX__" in defined) == any(flag.startswith("-mavx") for flag in row.flags), row.name


@needs_zig
def test_zig_gives_the_same_bytes_in_every_directory(
    tmp_path: Path, zig_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, results = zig(zig_cache, monkeypatch), []
    for name in ("one", "a longer näme"):
        (tmp_path / name).mkdir()
        source = tmp_path / name / "kernel.cpp"
        source.write_text('extern "C" __attribute__((visibility("default"))) int number() { return 7; }\n')
        toolchain.compile_shared(compiler, source, (), source.with_name("kernel.so"), timeout=120)
        results.append(source.with_name("kernel.so").read_bytes())
        assert sorted(path.name for path in source.parent.iterdir()) == ["kernel.cpp", "kernel.so"]
    assert results[0] == results[1]
    assert str(tmp_path).encode() not in results[0]


@needs_zig
def test_the_stamp_of_zig_is_that_of_its_program() -> None:
    """So that a kernel in the cache is found without starting zig, and not taken for that of another version."""
    stamp = toolchain.file_stamp(toolchain.candidates()[-1].argv)
    assert stamp is not None and stamp.split("|")[0].endswith("ziglang/zig")
    assert toolchain.file_stamp((sys.executable, "-m", "ziglang", "c++")) is None


# ---- no zig -----------------------------------------------------------------------------------------------------


@needs_numba
def test_without_zig_numba_computes_it_after_one_warning_that_says_what_to_install(tmp_path: Path) -> None:
    found = Container(tmp_path, hidden=("ziglang",)).layer()
    assert found["found"] == {"8": ["numba", "numba"], "16": ["numba", "numba"]}
    (warning,) = found["warnings"]
    assert "with numba, slower" in warning
    assert "no working C++ compiler" in warning and "g++" in warning and "clang++" in warning
    assert "pip install ziglang" in warning
    assert list((tmp_path / "home").rglob("*.nb?")) == []  # what numba would store would be unpickled, that is, run


def test_with_neither_plain_torch_computes_it_after_one_warning_that_says_what_to_install(tmp_path: Path) -> None:
    found = Container(tmp_path, hidden=("ziglang", "numba")).layer()
    assert found["found"] == {"8": ["torch", "torch"], "16": ["torch", "torch"]}
    (warning,) = found["warnings"]
    assert "slowly in plain torch" in warning
    assert "no working C++ compiler" in warning and "numba is not installed" in warning
    assert "pip install ziglang" in warning
    assert not found["numba"]
