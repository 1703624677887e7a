# SPDX-License-Identifier: Apache-2.0
"""Memory on huge pages for tensors that are read from end to end at every call.

A kernel that reads weights as fast as memory gives them crosses 256 pages of 4 KiB each MiB; with pages of 2 MiB it
takes up to a third less time. Linux gives them to memory that asks (``madvise``, where its setting is not "never").
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a huge page on x86-64 and, mostly, on ARM64


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialized contiguous tensor; on huge pages where it is large enough for some and the system has them.

    Args:
        shape: its shape.
        dtype: its dtype.
        device: its device; memory of devices other than the CPU is left to torch.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE or device.type != "cpu" or not sys.platform.startswith("linux"):
        return torch.empty(shape, dtype=dtype, device=device)
    # Not torch.empty with an offset: whatever copies or saves a tensor does so with its whole storage.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
