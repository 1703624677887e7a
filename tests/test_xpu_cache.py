# SPDX-License-Identifier: Apache-2.0
"""SPIR-V modules in the kernel cache: the same promises as for shared libraries. A stand-in compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_xpu_toolchain import ADD
from xpu_host import MAGIC, StandIn, needs_wheels

from awqjit import cache, config, store, upkeep
from awqjit.errors import CompileError, KernelMissingError
from awqjit.xpu import device, spirv


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    (tmp_path / "kernels").mkdir(mode=0o700)
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path / "kernels"))
    return StandIn(tmp_path, monkeypatch)


def fetch(text: str = "one", options: tuple[str, ...] = ()) -> cache.Artifact:
    return cache.fetch(spirv.request("sycl-number", text, options))


def test_a_module_is_compiled_once_and_found_again(stand_in: StandIn) -> None:
    built, found = fetch(), fetch()
    assert (built.origin, found.origin) == ("built", "cache") and built.path == found.path
    assert built.path.name == "kernel.spv" and built.path.read_bytes() == MAGIC + b"one"
    assert sorted(os.listdir(built.directory)) == ["build.log", "kernel.cpp", "kernel.spv", "meta.json"]
    assert (built.directory / "kernel.cpp").read_text() == "one" and built.seconds > found.seconds == 0
    assert len(stand_in.compilations) == 1


def test_text_options_and_the_wheels_version_tell_modules_apart(stand_in: StandIn) -> None:
    paths = [fetch().path, fetch("two").path, fetch(options=("-DX",)).path]
    stand_in.install("2025.3.1")
    paths.append(fetch().path)
    assert len(set(paths)) == 4
    assert stand_in.compilations == ["", "", "-DX", "-fno-sycl-device-lib=all"]
    stand_in.install("2026.2.0")
    assert fetch().path == paths[0] and len(stand_in.compilations) == 4


def change_meta(directory: Path) -> None:
    meta = json.loads((directory / "meta.json").read_text()) | {"sha256": "0" * 64}
    (directory / "meta.json").write_text(json.dumps(meta))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda directory: os.truncate(directory / "kernel.spv", 5),
    "empty": lambda directory: os.truncate(directory / "kernel.spv", 0),
    "another byte": lambda directory: (directory / "kernel.spv").write_bytes(MAGIC + b"onf"),
    "gone": lambda directory: (directory / "kernel.spv").unlink(),
    "a library instead": lambda directory: (directory / "kernel.spv").rename(directory / "kernel.so"),
    "writable by others": lambda directory: (directory / "kernel.spv").chmod(0o777),
    "another checksum": change_meta,
    "no meta.json": lambda directory: (directory / "meta.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_module_is_compiled_again(stand_in: StandIn, damage: Callable[[Path], object]) -> None:
    built = fetch()
    damage(built.directory)
    again = fetch()
    assert again.origin == "built" and again.path.read_bytes() == MAGIC + b"one"
    assert fetch().origin == "cache" and len(stand_in.compilations) == 2


def test_a_stray_module_beside_a_library_is_damage_and_not_the_library(stand_in: StandIn, tmp_path: Path) -> None:
    from test_cache import SEVEN

    library = cache.fetch(SEVEN)
    (library.directory / "kernel.spv").write_bytes(b"stray")
    again = cache.fetch(SEVEN)
    assert again.origin == "built" and again.path.name == "kernel.so"


def test_compiling_can_be_forbidden(stand_in: StandIn) -> None:
    with config.override(jit="0"), pytest.raises(KernelMissingError, match="sycl-number"):
        fetch()
    fetch()
    with config.override(jit="0"):
        assert fetch().origin == "cache"


def test_baked_modules_are_used_first_and_whatever_version_made_them(stand_in: StandIn, tmp_path: Path) -> None:
    baked = fetch().directory.parent
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    stand_in.install("2026.0.0")
    with config.override(cache_dir=str(other), cache_path=str(baked)):
        assert fetch().origin == "baked" and len(stand_in.compilations) == 1


def test_a_failed_build_is_kept_and_not_found(stand_in: StandIn) -> None:
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            fetch("a mistake")
    assert caught.value.directory.name.startswith("failed-sycl-number-") and len(stand_in.compilations) == 2


def test_upkeep_knows_modules(stand_in: StandIn, tmp_path: Path) -> None:
    built = fetch()
    place = upkeep.named_place(tmp_path / "kernels")
    assert [item.path for item in upkeep.items(place.path)] == [built.directory]
    assert [finding.reason for finding in upkeep.verify(place)] == [""]
    built.path.write_bytes(b"x")
    assert "bytes instead of" in upkeep.verify(place, remove=True)[0].reason
    assert not built.directory.exists()
    assert list(store.entries(place.path)) == []


def test_threads_and_processes_compile_once_and_all_get_the_module(stand_in: StandIn) -> None:
    found: list[cache.Artifact] = []
    threads = [threading.Thread(target=lambda: found.append(fetch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({artifact.path for artifact in found}) == 1 and len(found) == 4
    assert len(stand_in.compilations) == 1


@needs_wheels
def test_a_module_is_reloaded_at_once_in_a_new_process(kernel_cache: Path) -> None:
    cache.fetch(spirv.request("sycl-add", ADD, ()))
    code = (
        "import time\n"
        "from test_xpu_toolchain import ADD\n"
        "from awqjit import cache\n"
        "from awqjit.xpu import device, spirv\n"
        "with device.cpu_as_xpu() as cpu:\n"
        "    cpu.queue()\n"
        "    start = time.perf_counter()\n"
        "    found = cache.fetch(spirv.request('sycl-add', ADD, ()))\n"
        "    read = time.perf_counter()\n"
        "    cpu.kernel(found.path.read_bytes(), 'awqjit_add')\n"
        "    print(found.origin, read - start, time.perf_counter() - read)\n"
    )
    best = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        origin, found, loaded = done.stdout.split()
        assert origin == "cache"
        best.append(float(found))
        print(f"found {found} s, loaded {loaded} s, process {time.perf_counter() - start:.1f} s")
    assert min(best) < 0.05
    assert device.CPU == "xpu:cpu"
