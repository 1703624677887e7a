# SPDX-License-Identifier: Apache-2.0
"""From a problem to SYCL kernels that can be called on tensors: rendered, compiled or found, loaded, launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from awqjit import cache, store
from awqjit.errors import ArgumentError
from awqjit.spec import Problem
from awqjit.xpu import spirv
from awqjit.xpu.device import Device
from awqjit.xpu.render import kernels
from awqjit.xpu.spec import Launch, Scratch, XpuKernel, XpuTarget, plan, scratch

DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "int32": torch.int32, "fp32": torch.float32}
SCALARS = frozenset({"m", "x_stride"})

# What is to be launched for M rows depends on M alone; a model decodes with few different M.
_plan = lru_cache(maxsize=4096)(plan)
_scratch = lru_cache(maxsize=4096)(scratch)


def request(problem: Problem, target: XpuTarget, kernel: XpuKernel) -> store.Request:
    """One kernel as the cache knows it. Problems whose kernels have the same text share it."""
    text = store.digest("\0".join((kernel.source, *kernel.options)).encode())[:8]
    slug = f"sycl-{kernel.name}-{problem.compute}-{problem.x_dtype}-{target.slug}-{text}"
    return spirv.request(slug, kernel.source, kernel.options)


@dataclass(frozen=True, eq=False)
class _Loaded:
    kernel: XpuKernel
    handle: int
    scalars: list[bool]


@dataclass(frozen=True, eq=False)
class SyclKernel:
    """The kernels of one problem on one device. Calling it is thread-safe.

    Attributes:
        problem: what it computes.
        target: what it was rendered for.
        device: where it runs.
        origin: "built" if one of its kernels was compiled now, else "baked" or "cache".
        seconds: time in the compiler.
    """

    problem: Problem
    target: XpuTarget
    device: Device
    loaded: dict[str, _Loaded]
    origin: str
    seconds: float

    @classmethod
    def load(cls, problem: Problem, row: str, device: Device) -> SyclKernel:
        """Compile what no cache holds, and load everything on the device.

        Raises:
            CompileError: the compiler refuses a kernel, crashes or takes too long.
            SyclError: the device does not take one.
            MissingDependencyError, NoCompilerError, KernelMissingError, NoCacheError: see :func:`awqjit.cache.fetch`.
        """
        target = device.target(row)
        loaded, origins, seconds = {}, [], 0.0
        for kernel in kernels(problem, target):
            artifact = cache.fetch(request(problem, target, kernel))
            handle = device.kernel(artifact.path.read_bytes(), kernel.function)
            loaded[kernel.name] = _Loaded(kernel, handle, [name in SCALARS for name in kernel.arguments])
            origins.append(artifact.origin)
            seconds += artifact.seconds
        origin = next(name for name in ("built", "cache", "baked") if name in origins)
        return cls(problem, target, device, loaded, origin, seconds)

    @property
    def name(self) -> str:
        return self.target.name

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
        """y = x W + bias, put into the queue of torch's current stream; returns before it is computed.

        Temporaries and y come from torch's allocator for that stream, which gives their memory only to what follows in
        the same stream: nothing has to outlive the call.

        Args:
            x: [M, K] of the problem's dtype, any row stride, unit column stride.
            weight, scales, zeros: a packed weight in layout 2, contiguous.
            bias: fp32 [N], contiguous; None exactly if the problem has no bias.

        Returns:
            [M, N] of x's dtype, contiguous.

        Raises:
            ArgumentError: a tensor has no memory (its storage was resized to nothing).
            SyclError: the device refuses a launch.
        """
        rows = x.shape[0]
        y = torch.empty((rows, self.problem.n), dtype=x.dtype, device=x.device)
        if rows == 0:
            return y
        x = self._aligned(x)
        tensors = {"x": x, "weight": weight, "scales": scales, "zeros": zeros, "bias": bias, "y": y}
        values = {"m": rows, "x_stride": x.stride(0) if rows > 1 else self.problem.k}
        for name, tensor in tensors.items():
            if tensor is not None:
                values[name] = tensor.data_ptr()
                if not values[name]:
                    raise ArgumentError(name, "a tensor whose storage has been freed", "one with memory")
        temporaries = [(wanted.name, self._temporary(wanted, x.device)) for wanted in self._wanted(rows)]
        values.update((name, tensor.data_ptr()) for name, tensor in temporaries)
        queue, shim = self.device.queue(), self.device.shim
        for launch in self._launches(rows):
            loaded = self.loaded[launch.kernel_name]
            arguments = [values[name] for name in loaded.kernel.arguments]
            shim.launch(queue, loaded.handle, (launch.global_range, launch.local_range), arguments, loaded.scalars)
        self.device.finish(queue)
        return y

    def _launches(self, rows: int) -> tuple[Launch, ...]:
        return _plan(self.problem, self.target, rows)

    def _wanted(self, rows: int) -> tuple[Scratch, ...]:
        return _scratch(self.problem, self.target, rows)

    @staticmethod
    def _temporary(wanted: Scratch, device: torch.device) -> Tensor:
        return torch.empty(wanted.shape, dtype=DTYPES[wanted.dtype], device=device)

    def _aligned(self, x: Tensor) -> Tensor:
        """x, copied if its rows do not begin where the kernels need them to."""
        step = max(loaded.kernel.x_alignment for loaded in self.loaded.values())
        aligned = x.data_ptr() % (step * x.element_size()) == 0 and (x.shape[0] == 1 or x.stride(0) % step == 0)
        if aligned:
            return x
        k = x.shape[1]
        copy = x.new_empty(x.shape[0], -(-k // step) * step)[:, :k]
        return copy.copy_(x)
