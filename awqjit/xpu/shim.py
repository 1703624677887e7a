# SPDX-License-Identifier: Apache-2.0
"""The C++ library between Python and SYCL's run time: built on the user's machine, kept in the kernel cache."""

from __future__ import annotations

import ctypes
import os
import shlex
from functools import lru_cache
from pathlib import Path

from awqjit import cache, store, toolchain
from awqjit.errors import NoCompilerError, SyclError
from awqjit.render import render_shim
from awqjit.toolchain import Compiler
from awqjit.xpu import wheels
from awqjit.xpu.wheels import Wheels

FLAGS: tuple[str, ...] = ("-fexceptions", "-frtti", "-O1")
"""SYCL's headers need what kernels are built without, and take long to optimize; nothing here is worth that."""


Flags = tuple[str, ...]


class _Builder:
    """The project's C++ toolchain, which finds SYCL's headers too; where these are is no part of a cache key."""

    PRODUCT = toolchain.PRODUCT

    def __init__(self, include: Path) -> None:
        self._include = include

    def _with_headers(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        return (*flags, "-isystem", str(self._include))

    def neutral_command(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        return toolchain.neutral_command(flags)

    def relative_command(self, compiler: Compiler, flags: Flags, source: Path, output: Path) -> Flags:
        return toolchain.relative_command(compiler, self._with_headers(flags), source, output)

    def absolute_command(self, compiler: Compiler, flags: Flags, source: Path, output: Path) -> Flags:
        return toolchain.absolute_command(compiler, self._with_headers(flags), source, output)

    def find_compiler(self) -> Compiler:
        compiler = toolchain.find_compiler()
        if "ziglang" in compiler.argv:
            reason = "zig: its C++ library is another than the one that SYCL's run time was built with"
            raise NoCompilerError((reason,))
        return compiler

    def likely_stamp(self) -> str | None:
        return toolchain.likely_stamp()

    def file_stamp(self, argv: tuple[str, ...]) -> str | None:
        return toolchain.file_stamp(argv)

    def compile_shared(
        self,
        compiler: Compiler,
        source: Path,
        flags: tuple[str, ...],
        output: Path,
        timeout: float,
        name: str | None = None,
    ) -> str:
        return toolchain.compile_shared(compiler, source, self._with_headers(flags), output, timeout, name)


def request(found: Wheels) -> store.Request:
    """The shim as the cache knows it: its text names the wheel's version, for the C++ interfaces of two may differ."""
    source = render_shim(found.version, shlex.join(toolchain.neutral_command(FLAGS)))
    return store.Request("sycl-shim", source, FLAGS, _Builder(found.include))


def path() -> Path:
    """The shim's library, built now if no cache has it.

    Raises:
        MissingDependencyError, SyclError: see :func:`awqjit.xpu.wheels.find`.
        NoCompilerError, CompileError, KernelMissingError, NoCacheError: see :func:`awqjit.cache.fetch`.
    """
    return cache.fetch(request(wheels.find())).path


class _Argument(ctypes.Structure):
    """``struct Argument`` of the template."""

    _fields_ = (("value", ctypes.c_void_p), ("size", ctypes.c_size_t), ("is_pointer", ctypes.c_size_t))


class Shim:
    """The loaded library. Queues, bundles and kernels are addresses of SYCL's objects."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        void, size = ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in (
            ("error", ctypes.c_char_p, ()),
            ("cpu_queue", void, ()),
            ("free_queue", None, (void,)),
            ("device_name", ctypes.c_int, (void, ctypes.c_char_p, size)),
            ("load", void, (void, ctypes.c_char_p, size)),
            ("kernel", void, (void, ctypes.c_char_p)),
            ("launch", ctypes.c_int, (void, void, void, void, void, size)),
            ("wait", ctypes.c_int, (void,)),
        ):
            function = getattr(library, f"awqjit_sycl_{name}")
            function.restype, function.argtypes = result, arguments

    def cpu_queue(self) -> int:
        """A new in-order queue on the CPU as a SYCL device.

        Raises:
            SyclError: there is no such device.
        """
        queue: int | None = self._library.awqjit_sycl_cpu_queue()
        if not queue:
            raise self._failure("no CPU device")
        return queue

    def device_name(self, queue: int) -> str:
        text = ctypes.create_string_buffer(256)
        if self._library.awqjit_sycl_device_name(queue, text, len(text)):
            raise self._failure("the queue's device has no name")
        return text.value.decode("utf-8", "replace")

    def load(self, queue: int, module: bytes, function: str) -> int:
        """A SPIR-V module's kernel, compiled for the queue's device and good for all of its queues in this process.

        Raises:
            SyclError: the device's compiler refuses the module, or it has no such kernel.
        """
        bundle = self._library.awqjit_sycl_load(queue, module, len(module))
        kernel: int | None = bundle and self._library.awqjit_sycl_kernel(bundle, function.encode())
        if not kernel:
            raise self._failure(f"the device does not take the kernel {function}")
        return kernel

    def launch(
        self,
        queue: int,
        kernel: int,
        ranges: tuple[tuple[int, int], tuple[int, int]],
        arguments: list[int],
        scalars: list[bool],
    ) -> None:
        """Put a kernel into a queue; returns at once.

        Args:
            queue, kernel: from the device.
            ranges: (global, local), in work-items.
            arguments: pointers and int64 scalars, in the kernel's order.
            scalars: which of them are scalars.

        Raises:
            SyclError: the device refuses the launch.
        """
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        first = ctypes.addressof(values)
        packed = (_Argument * len(arguments))(
            *(_Argument(first + 8 * place, 8, not scalar) for place, scalar in enumerate(scalars))
        )
        sizes = ctypes.c_size_t * 2
        over = (sizes(*size) for size in ranges)
        if self._library.awqjit_sycl_launch(queue, kernel, *over, packed, len(arguments)):
            raise self._failure("a kernel cannot be launched")

    def wait(self, queue: int) -> None:
        """Wait until a queue is empty.

        Raises:
            SyclError: something in it failed.
        """
        if self._library.awqjit_sycl_wait(queue):
            raise self._failure("a kernel failed")

    def _failure(self, what: str) -> SyclError:
        return SyclError(what, self._library.awqjit_sycl_error().decode("utf-8", "replace").strip())


@lru_cache(maxsize=1)
def load() -> Shim:
    """The shim, loaded into this process behind SYCL's run time.

    Raises:
        SyclError: another version of the run time is loaded already, or it cannot be loaded.
        MissingDependencyError, NoCompilerError, CompileError, KernelMissingError, NoCacheError: as :func:`path`.
    """
    found = wheels.find()
    foreign = _loaded_from_elsewhere(found.sycl)
    if foreign is not None:
        raise SyclError(f"two versions of SYCL's run time: {foreign} is loaded", f"intel-sycl-rt has {found.sycl}")
    artifact = cache.fetch(request(found))
    try:
        # The shim names no library that it needs: what it lacks is found here, whatever folder that is in.
        ctypes.CDLL(str(found.sycl), mode=ctypes.RTLD_GLOBAL)
        return Shim(ctypes.CDLL(str(artifact.path), mode=os.RTLD_NOW | os.RTLD_LOCAL))
    except (OSError, AttributeError) as error:
        cache.discard(artifact)
        raise SyclError(f"SYCL's run time {found.version} cannot be loaded", str(error)) from error


def _loaded_from_elsewhere(sycl: Path) -> str | None:
    """The file of a SYCL run time that this process has mapped and that is not ``sycl``, or None."""
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libsycl.so." in line}
    except OSError:
        return None
    return next((file for file in sorted(mapped) if os.path.realpath(file) != str(sycl)), None)
