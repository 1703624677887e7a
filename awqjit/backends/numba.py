# SPDX-License-Identifier: Apache-2.0
"""The row for machines without a C++ compiler: numba turns Python into machine code in this process.

Only serial functions are compiled; torch's own thread pool runs them, so there is no second pool. They are compiled
once per process and mode, not per shape, and kept in memory: numba's own cache on disk would be unpickled, that is,
whatever lies in it would be run.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from awqjit import launch
from awqjit.backends import numba_bodies
from awqjit.errors import ArgumentError, LaunchError, NumbaError
from awqjit.layout import BLOCK, packed_rows, padded_group_rows
from awqjit.spec import Problem

_ROW_CHUNK = 32  # a few hundred kilobytes of x: they stay in a core's cache while it walks over the blocks
_SERIAL_PREPARE = 16384  # elements of x that one thread prepares faster than a pool wakes up
_SERIAL_WORK = 1 << 17  # multiply-adds below which one thread does it all

_Arguments = ctypes.c_int64 * len(numba_bodies.FIELDS)
_ParallelFor = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
_Body = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@dataclass(frozen=True, eq=False)
class NumbaKernel:
    """A problem, run by the functions that numba compiled for its mode. Calling it is thread-safe.

    Attributes:
        problem: what it computes.
        bodies: the compiled functions.
        seconds: time spent on compiling them for this problem; 0 when they were there.
    """

    problem: Problem
    bodies: numba_bodies.Bodies
    seconds: float
    name: str = "numba"

    @classmethod
    def load(cls, problem: Problem) -> NumbaKernel:
        """Compile what the problem needs, unless this process has it already.

        Raises:
            NumbaError: numba cannot be imported, or fails.
        """
        start = time.perf_counter()
        try:
            with numba_bodies.lock:
                bodies = numba_bodies.compiled(problem.act_bits)
        except Exception as error:  # numba raises anything: of its own, of LLVM's, ImportError for a NumPy too new
            raise NumbaError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
        return cls(problem, bodies, time.perf_counter() - start)

    def __call__(self, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
        """y = x W + bias.

        Args:
            x: [M, K] of the problem's dtype, any row stride, unit column stride.
            weight, scales, zeros: a packed weight of the problem's shape (see :mod:`awqjit.layout`), contiguous.
            bias: fp32 [N], contiguous, or None.

        Returns:
            [M, N] of x's dtype, contiguous.

        Raises:
            ArgumentError: a tensor has no memory (its storage was resized to nothing).
            LaunchError: the thread pool reported an error.
        """
        problem, rows = self.problem, x.shape[0]
        if rows == 0:
            return x.new_empty((0, problem.n))
        named = {"x": x, "weight": weight, "scales": scales, "zeros": zeros, "bias": bias}
        for name, tensor in named.items():
            if tensor is not None and tensor.data_ptr() == 0:
                raise ArgumentError(name, "a tensor whose storage has been freed", "one with memory")
        blocks, packed = weight.shape[0], packed_rows(problem.k, problem.group_size)
        # Conversions are torch's: to fp32 they are exact, and from it one rounding.
        wide = x.to(torch.float32)
        if bias is not None and problem.n % BLOCK:
            bias = F.pad(bias, (0, blocks * BLOCK - problem.n))
        ready = torch.empty(rows * packed, dtype=torch.float32)
        units = torch.empty(rows * problem.groups if problem.act_bits == 8 else 0, dtype=torch.float32)
        y = torch.empty((rows, blocks * BLOCK), dtype=torch.float32)
        values = {
            "x": wide.data_ptr(),
            "x_stride": wide.stride(0),
            "rows": rows,
            "k": problem.k,
            "group": problem.group_size,
            "groups": problem.groups,
            "group_padded": padded_group_rows(problem.k, problem.group_size),
            "packed": packed,
            "weight": weight.data_ptr(),
            "scales": scales.data_ptr(),
            "scale_kind": numba_bodies.SCALE_KINDS.index(problem.scale_dtype),
            "zeros": 0 if zeros is None else zeros.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "ready": ready.data_ptr(),
            "units": units.data_ptr(),
            "y": y.data_ptr(),
            "blocks": blocks,
            "row_chunk": _ROW_CHUNK,
        }
        arguments = _Arguments(*(values[name] for name in numba_bodies.FIELDS))
        alone = rows * problem.k * problem.n < _SERIAL_WORK
        self._run(self.bodies.prepare, rows * problem.groups, arguments, rows * problem.k <= _SERIAL_PREPARE)
        self._run(self.bodies.multiply, -(-rows // _ROW_CHUNK) * blocks, arguments, alone)
        return y[:, : problem.n].to(x.dtype).contiguous()

    def _run(self, body: int, count: int, arguments: ctypes.Array[ctypes.c_int64], alone: bool) -> None:
        """Run a body over 0..count-1, on torch's thread pool unless ``alone``. Releases the GIL."""
        if alone or launch.in_forked_child() or torch.get_num_threads() == 1:
            _Body(body)(0, count, ctypes.addressof(arguments))
            return
        # torch cuts the range into one contiguous piece a thread; nested in another region it calls the body once.
        code = _ParallelFor(launch._torch_parallel_for())(0, count, 1, body, ctypes.addressof(arguments))
        if code:
            raise LaunchError(self.problem.slug, code)
