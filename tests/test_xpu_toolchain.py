# SPDX-License-Identifier: Apache-2.0
"""What compiles for Intel GPUs: finding the wheels, building the library between, a compiler that fails or crashes."""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from xpu_host import MAGIC, StandIn, needs_wheels

from awqjit import cache, config, toolchain
from awqjit.errors import CompileError, MissingDependencyError, NoCompilerError, SyclError
from awqjit.toolchain import Compiler
from awqjit.xpu import device, shim, spirv, wheels

ADD = """\
#include <sycl/sycl.hpp>
namespace experimental = sycl::ext::oneapi::experimental;
extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((experimental::nd_range_kernel<2>))
void awqjit_add(float *y, int64_t n) {
  const int64_t i = sycl::ext::oneapi::this_work_item::get_nd_item<2>().get_global_id(1);
  if (i < n) y[i] += i;
}
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, monkeypatch)


class Wheel:
    """An installed distribution as importlib.metadata describes it."""

    def __init__(self, folder: Path, name: str, version: str, files: list[str]) -> None:
        self.version, self.metadata, self._folder, self._files = version, {"Name": name}, folder, files
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()

    def read_text(self, name: str) -> str:
        assert name == "RECORD"
        return "".join(f"{file},sha256=x,1\n" for file in self._files)

    def locate_file(self, file: str) -> Path:
        return self._folder / file


SYCL_FILES = [
    "lib/libsycl.so", "lib/libsycl.so.9.0.0-gdb.py", "lib/libsycl-preview.so.9", "lib/libsycl.so.9",
    "lib/libsycl-jit.so", "include/CL/sycl.hpp", "include/sycl/sycl.hpp",
]  # fmt: skip
OPENCL_FILES = ["lib/libintelocl.so-gdb.py", "lib/libintelocl.so"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Wheel]]:
    """A dictionary of invented wheels; what is not in it is not installed."""
    found: dict[str, Wheel] = {}
    monkeypatch.setattr(wheels, "_distribution", found.get)
    wheels.forget()
    found["intel-sycl-rt"] = Wheel(tmp_path, "intel-sycl-rt", "2026.2.0", SYCL_FILES)
    found["intel-opencl-rt"] = Wheel(tmp_path, "intel-opencl-rt", "2026.2.0", OPENCL_FILES)
    yield found
    wheels.forget()


def test_the_wheels_files_are_found_by_their_whole_names(installed: dict[str, Wheel], tmp_path: Path) -> None:
    found = wheels.find()
    assert (found.version, found.sycl.name, found.compiler.name) == ("2026.2.0", "libsycl.so.9", "libsycl-jit.so")
    assert found.include == tmp_path / "include" and found.opencl.name == "libintelocl.so"
    assert wheels.lacking() is None


@pytest.mark.parametrize("gone", [["intel-sycl-rt"], ["intel-opencl-rt"], ["intel-sycl-rt", "intel-opencl-rt"]])
def test_a_missing_wheel_is_one_error_that_names_the_extra(installed: dict[str, Wheel], gone: list[str]) -> None:
    for name in gone:
        del installed[name]
    with pytest.raises(MissingDependencyError) as caught:
        wheels.find()
    assert all(name in str(caught.value) for name in (*gone, "pip install awqjit[xpu]", "xpu"))
    assert wheels.lacking() == str(caught.value)


@pytest.mark.parametrize("version", ["2024.2.1", "2025.0.5", "2025.2.2"])
def test_an_old_wheel_is_refused_with_its_version(installed: dict[str, Wheel], version: str) -> None:
    installed["intel-sycl-rt"].version = version
    with pytest.raises(SyclError, match=rf"{version} cannot be used: 2025\.3 or later .*awqjit\[xpu\]"):
        wheels.find()


@pytest.mark.parametrize(
    "version, flag", [("2025.3.0", True), ("2025.3.3", True), ("2026.0.0", False), ("2026.2.0", False)]
)
def test_each_release_gets_the_options_it_needs(installed: dict[str, Wheel], version: str, flag: bool) -> None:
    installed["intel-sycl-rt"].version = version
    assert wheels.find().options == (("-fno-sycl-device-lib=all",) if flag else ())


@pytest.mark.parametrize("file", ["lib/libsycl.so.9", "lib/libsycl-jit.so", "include/sycl/sycl.hpp"])
def test_a_wheel_that_lost_a_file_is_an_error(installed: dict[str, Wheel], tmp_path: Path, file: str) -> None:
    (tmp_path / file).unlink()
    with pytest.raises(SyclError, match=r"intel-sycl-rt 2026\.2\.0: has no file that ends with .*install it again"):
        wheels.find()


def test_the_libraries_text_names_the_wheel_and_its_key_no_path(tmp_path: Path) -> None:
    def found(version: str, include: Path) -> wheels.Wheels:
        return wheels.Wheels(version, *(tmp_path / name for name in ("sycl", "jit")), include, tmp_path / "opencl")

    one, same, newer = (
        shim.request(found(version, tmp_path / folder)) for version, folder in (("1", "a"), ("1", "b"), ("2", "a"))
    )
    assert one.identity(None) == same.identity(None) != newer.identity(None)
    command = one.builder.absolute_command(
        Compiler(("c++",), "gcc", "", ""), one.flags, tmp_path / "k.cpp", tmp_path / "k.so"
    )
    assert command[command.index("-isystem") + 1] == str(tmp_path / "a")


def test_a_compiler_with_another_cxx_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    zig = Compiler(("python", "-m", "ziglang", "c++"), "clang", "", "")
    monkeypatch.setattr(toolchain, "find_compiler", lambda: zig)
    found = wheels.Wheels("1", tmp_path, tmp_path, tmp_path, tmp_path)
    with pytest.raises(NoCompilerError, match="its C\\+\\+ library is another"):
        shim.request(found).builder.find_compiler()


def build(text: str) -> cache.Artifact:
    return cache.fetch(spirv.request("sycl-test", text, ("-DX=1",)))


def test_what_the_compiler_refuses_is_an_error_with_log_and_command(stand_in: StandIn) -> None:
    with pytest.raises(CompileError) as caught:
        build("a mistake")
    error = caught.value
    assert (
        "kernel.cpp:1:9: error: a mistake" in str(error)
        and error.first_error in (error.directory / "build.log").read_text()
    )
    again = subprocess.run(command_in(str(error)), capture_output=True, text=True, timeout=60)
    assert again.returncode == 1 and "error: a mistake" in again.stdout


def command_in(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("command: ")]
    return shlex.split(line.removeprefix("command: "))


def test_a_crash_of_the_compiler_is_an_error_of_this_process(stand_in: StandIn) -> None:
    with pytest.raises(CompileError, match="killed by signal 11") as caught:
        build("crash")
    again = subprocess.run(command_in(str(caught.value)), capture_output=True, timeout=60)
    assert again.returncode == -11
    assert build("no harm").origin == "built"


def test_a_compiler_that_hangs_is_ended(stand_in: StandIn) -> None:
    start = time.monotonic()
    with (
        config.override(compile_timeout="1"),
        pytest.raises(CompileError, match=r"stopped after 1 s .*COMPILE_TIMEOUT"),
    ):
        build("hang")
    assert time.monotonic() - start < 30


def test_success_without_a_module_is_none(stand_in: StandIn) -> None:
    with pytest.raises(CompileError, match="wrote no module"):
        build("silent")


def test_importing_and_the_cpu_need_no_wheel() -> None:
    code = (
        "import importlib.metadata as metadata, sys\n"
        "real = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name.startswith('intel'): raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.distribution = distribution\n"
        "import torch, awqjit\n"
        "from awqjit.layout import pack\n"
        "w = awqjit.QuantizedWeight(torch.zeros(8, 16, dtype=torch.int32), torch.ones(2, 16), None, 32, 64, 16)\n"
        "y = awqjit.Int4Linear.from_quantized(w)(torch.ones(1, 64))\n"
        "assert y.eq(-512).all(), y\n"
        "from awqjit import jit, machine\n"
        "from awqjit.xpu import device\n"
        "assert device.describe(machine.detect()).xpu is None\n"
        "try: jit.prepare('xpu:0')\n"
        "except awqjit.AwqJitError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "pip install awqjit[xpu]" in done.stdout and done.stdout.count("\n") == 1


@needs_wheels
def test_the_real_wheels_are_of_a_release_that_is_known() -> None:
    found = wheels.find()
    assert (2025, 3) <= tuple(int(part) for part in found.version.split(".")[:2]) <= (2026, 2)
    assert importlib.metadata.version("intel-sycl-rt") == found.version
    assert all(path.exists() for path in (found.sycl, found.compiler, found.include / "sycl/sycl.hpp", found.opencl))


@needs_wheels
def test_the_library_between_is_built_once_and_finds_the_cpu() -> None:
    first = cache.fetch(shim.request(wheels.find()))
    again = cache.fetch(shim.request(wheels.find()))
    assert again.path == first.path and again.origin == "cache"
    with device.cpu_as_xpu() as cpu:
        assert cpu.facts.name and cpu.queue()


@needs_wheels
def test_source_becomes_spirv_that_runs() -> None:
    import torch

    built = cache.fetch(spirv.request("sycl-add", ADD, ()))
    assert built.path.name == "kernel.spv" and built.path.read_bytes().startswith(MAGIC)
    with device.cpu_as_xpu() as cpu:
        kernel, y = cpu.kernel(built.path.read_bytes(), "awqjit_add"), torch.zeros(100)
        cpu.shim.launch(cpu.queue(), kernel, ((1, 112), (1, 16)), [y.data_ptr(), 90], [False, True])
        cpu.shim.wait(cpu.queue())
        assert y.tolist() == [*range(90), *[0] * 10]
        with pytest.raises(SyclError, match=r"does not take the kernel awqjit_subtract: .*no kernel"):
            cpu.kernel(built.path.read_bytes(), "awqjit_subtract")
        size = (1, 1 << 20)  # no device has work-groups that large
        with pytest.raises(SyclError, match="cannot be launched"):
            cpu.shim.launch(cpu.queue(), kernel, (size, size), [y.data_ptr(), 90], [False, True])


@needs_wheels
def test_a_real_mistake_is_shown_with_its_line_and_a_command_that_shows_it_again() -> None:
    with pytest.raises(CompileError) as caught:
        cache.fetch(spirv.request("sycl-mistake", ADD.replace("float *y", "flaot *y"), ()))
    assert "kernel.cpp:4:17: error: unknown type name 'flaot'" in str(caught.value)
    again = subprocess.run(command_in(str(caught.value)), capture_output=True, text=True, timeout=120)
    assert again.returncode == 1 and "unknown type name 'flaot'" in again.stdout
