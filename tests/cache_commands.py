# SPDX-License-Identifier: Apache-2.0
"""What the tests of `awqjit cache` and `awqjit info` share: a cache of their own, and commands run in this process."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

for package in ("typer", "rich", "transformers"):
    pytest.importorskip(package)

from compilers import number_source  # noqa: E402
from models import write_float  # noqa: E402

from awqjit import machine, places, store, toolchain  # noqa: E402
from awqjit.cache import Artifact, Request, fetch  # noqa: E402
from awqjit.cli import main  # noqa: E402

ROOT = Path(__file__).parents[1]
DAY = 24 * 3600
needs_x86 = pytest.mark.skipif(machine.detect().architecture != "x86_64", reason="compiles AVX-512 code")


@pytest.fixture(name="folder")
def folder_for_everyone() -> Iterator[Path]:
    """A directory that every user can enter, as pytest's own cannot."""
    with tempfile.TemporaryDirectory(prefix="awqjit-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(os.path.realpath(name))


@pytest.fixture(name="place")
def place_of_everyone(folder: Path) -> Path:
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


@pytest.fixture(name="model", scope="module")
def one_shape_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
