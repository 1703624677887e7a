# SPDX-License-Identifier: Apache-2.0
"""Loading a compiled kernel and calling it on torch tensors, with torch's own thread pool."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from awqjit import machine
from awqjit.errors import ArgumentError, LaunchError
from awqjit.spec import KernelSpec


class _Call(ctypes.Structure):
    """``struct Call`` of ``templates/cpu/abi.h.jinja``, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scales", "zeros", "bias", "y", "scratch")),
        *((name, ctypes.c_int64) for name in ("x_stride", "rows", "threads")),
        ("parallel_for", ctypes.c_void_p),
    )


class ForeignKernelError(OSError):
    """A shared library is not the kernel it was taken for, or not one for this machine."""


_in_forked_child = False


def _after_fork_in_child() -> None:
    # GNU OpenMP, under torch's thread pool, does not survive a fork: the child would wait for threads that are gone.
    global _in_forked_child
    _in_forked_child = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def in_forked_child() -> bool:
    """Whether this process was forked: everything then has to run on the calling thread."""
    return _in_forked_child


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's own operators run on the calling thread alone, for a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=3)
def torch_library(name: str = "torch_cpu") -> ctypes.CDLL:
    """One of the libraries of torch in this process: torch_cpu (with the stable C shim), c10 or torch_python."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.{suffix}"))


@lru_cache(maxsize=1)
def _torch_parallel_for() -> int:
    """Address of ``torch_parallel_for`` in torch's stable C shim (torch 2.10 and later)."""
    address = ctypes.cast(torch_library().torch_parallel_for, ctypes.c_void_p).value
    assert address is not None
    return address


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A loaded kernel. Calling it is thread-safe; it keeps no state between calls."""

    spec: KernelSpec
    path: Path
    library: ctypes.CDLL

    @classmethod
    def load(cls, spec: KernelSpec, path: Path) -> CompiledKernel:
        """Load the shared library at ``path``.

        Raises:
            OSError: it cannot be loaded.
            ForeignKernelError: it is another kernel than ``spec``, or one that this machine cannot run.
        """
        # Selection has asked too. This is the last chance before an illegal instruction ends the process.
        missing = machine.detect().missing(spec.target.features)
        if missing is not None:
            raise ForeignKernelError(f"{path} is not loaded: {missing}")
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        try:
            library.awqjit_slug.restype = ctypes.c_char_p
            library.awqjit_scratch_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64)
            library.awqjit_scratch_bytes.restype = ctypes.c_int64
            library.awqjit_int4_mm.argtypes = (ctypes.POINTER(_Call),)
            library.awqjit_int4_mm.restype = ctypes.c_int32
            slug = library.awqjit_slug().decode("utf-8", "replace")
            if slug != spec.slug:
                raise ForeignKernelError(f"{path} calls itself {slug}, wanted {spec.slug}")
        except (AttributeError, ForeignKernelError) as error:
            # Closed, or the next library loaded from this path would be this one again.
            _ctypes.dlclose(library._handle)
            raise ForeignKernelError(str(error)) from None
        return cls(spec, path, library)

    @property
    def name(self) -> str:
        return self.spec.target.name

    def address(self, function: str) -> int:
        """Address of one of the library's exported functions, which stays valid while the process lives."""
        address = ctypes.cast(getattr(self.library, function), ctypes.c_void_p).value
        assert address is not None
        return address

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
        """y = x W + bias.

        Args:
            x: [M, K] of the spec's dtype, any row stride, unit column stride.
            weight, scales, zeros: a packed weight of the spec's shape (see :mod:`awqjit.layout`), contiguous.
            bias: fp32 [N], contiguous; None exactly if the spec has no bias.

        Returns:
            [M, N] of x's dtype, contiguous.

        Raises:
            ArgumentError: a tensor has no memory (its storage was resized to nothing).
            LaunchError: the thread pool reported an error.
        """
        rows = x.shape[0]
        inputs = [None if tensor is None else tensor.data_ptr() for tensor in (x, weight, scales, zeros, bias)]
        if 0 in inputs and rows:
            name = ("x", "weight", "scales", "zeros", "bias")[inputs.index(0)]
            raise ArgumentError(name, "a tensor whose storage has been freed", "one with memory")
        y = torch.empty((rows, self.spec.problem.n), dtype=x.dtype, device=x.device)
        # x.stride(0) means nothing with one row, and a stride of 0 is fine.
        threads = 1 if _in_forked_child else torch.get_num_threads()
        # torch aligns what it allocates to 64 bytes, as the kernel wants it.
        scratch = torch.empty(self.library.awqjit_scratch_bytes(rows, threads), dtype=torch.uint8, device=x.device)
        call = _Call(
            *inputs,
            y.data_ptr(),
            scratch.data_ptr(),
            x.stride(0),
            rows,
            threads,
            None if threads == 1 else _torch_parallel_for(),
        )
        code = self.library.awqjit_int4_mm(call)
        if code:
            raise LaunchError(self.spec.slug, code)
        return y
