# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors files: what their headers say, and tensors straight into the memory they are wanted in.

A file is 8 bytes with the header's length, the header (JSON: name -> dtype, shape and place), then the tensors one
after the other. Tensors are read, not mapped: a file that is cut short or replaced later cannot take the process or its
weights with it, and no page of it counts as the process's memory.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from awqjit import pages
from awqjit.errors import FormatError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

_ALIGNMENT = 64  # of tensors that share memory

# Converted at a time: torch does not split so small an operation over threads, so that several can be read at once.
_CHUNK = 32_767


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        path: the file.
        dtype: its dtype as the header spells it.
        shape: its shape.
        start: its first byte in the file.
        size: its length in bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype.

        Raises:
            FormatError: torch has no such dtype.
        """
        if self.dtype not in DTYPES:
            raise FormatError(f"{self.path} holds a tensor of dtype {self.dtype}, which is not read", "")
        return DTYPES[self.dtype]

    def rows(self, first: int, last: int) -> Entry:
        """Rows ``first`` to ``last`` - 1 (fewer at the end) of a tensor of one dimension or more."""
        last = min(last, self.shape[0])
        row = self.size // max(1, self.shape[0])
        return replace(
            self, shape=(last - first, *self.shape[1:]), start=self.start + first * row, size=(last - first) * row
        )


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name.

    Raises:
        FormatError: it is missing, or no complete safetensors file: tensors overlap, leave gaps or end beyond it.
    """
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            (size,) = struct.unpack("<Q", file.read(8))
            if size > total - 8:
                raise ValueError("it is shorter than its header says")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            found = {name: _entry(path, 8 + size, name, entry) for name, entry in header.items()}
            _check_places(found, 8 + size, total)
    except FileNotFoundError:
        raise FormatError(f"the shard {path} is missing", "Fetch it again.") from None
    except IsADirectoryError:
        raise FormatError(f"the shard {path} is a folder", "Fetch it again.") from None
    except OSError as error:
        raise FormatError(f"the shard {path} cannot be read ({error.strerror})", "Check the file.") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, struct.error) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(f"{path} is not a complete safetensors file ({reason})", "Fetch it again.") from None
    return found


def _entry(path: Path, data: int, name: str, entry: Mapping[str, Any]) -> Entry:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or any(type(size) is not int or size < 0 for size in (*shape, *offsets)):
        raise ValueError(f"{name} has no dtype, shape or place")
    start, end = offsets
    if start > end:
        raise ValueError(f"{name} ends before it starts")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is not None and end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {end - start} bytes, which is not what its shape takes")
    return Entry(path, entry["dtype"], tuple(shape), data + start, end - start)


def _check_places(found: Mapping[str, Entry], start: int, total: int) -> None:
    if start + sum(entry.size for entry in found.values()) > total:
        raise ValueError("it is shorter than its header says")
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != start:
            raise ValueError(f"{name} does not start where the tensor before it ends")
        start += entry.size
    if start != total:
        raise ValueError("it is longer than its header says")


def room_for(wanted: Iterable[Entry]) -> int:
    """Bytes that :func:`read` needs to put tensors side by side."""
    return sum(_aligned(entry.size) for entry in wanted)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def read(
    wanted: Mapping[str, Entry], *, dtype: torch.dtype | None = None, into: Tensor | None = None
) -> dict[str, Tensor]:
    """Read tensors.

    Args:
        wanted: name -> where it is.
        dtype: convert floating tensors to it; None leaves every tensor as it is on disk.
        into: uint8, contiguous, at least :func:`room_for` long: the tensors become views of it, in their own dtypes.
            None: each gets memory of its own.

    Raises:
        FormatError: a file has been cut short, cannot be read, or holds a dtype that torch lacks.
    """
    found: dict[str, Tensor] = {}
    used = 0
    for path in dict.fromkeys(entry.path for entry in wanted.values()):
        try:
            with path.open("rb", buffering=0) as file:
                for name, entry in wanted.items():
                    if entry.path != path:
                        continue
                    stored = entry.torch_dtype
                    file.seek(entry.start)
                    if into is not None:
                        place = into[used : used + entry.size]
                        used += _aligned(entry.size)
                        _fill(file, place, path)
                        found[name] = _little_endian(place.view(stored).view(entry.shape))
                    elif dtype in (None, stored) or not stored.is_floating_point:
                        out = pages.empty(entry.shape, stored, torch.device("cpu"))
                        _fill(file, out, path)
                        found[name] = _little_endian(out)
                    else:
                        assert dtype is not None
                        found[name] = _converted(file, entry, stored, dtype)
        except OSError as error:
            raise FormatError(f"{path} cannot be read ({error.strerror})", "Check the file.") from None
    return found


def _converted(file: IO[bytes], entry: Entry, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    out = pages.empty(entry.shape, dtype, torch.device("cpu"))
    flat, piece = out.view(-1), torch.empty(min(_CHUNK, out.numel()), dtype=stored)
    for start in range(0, flat.shape[0], _CHUNK):
        part = flat[start : start + _CHUNK]
        _fill(file, piece[: part.shape[0]], entry.path)
        part.copy_(_little_endian(piece[: part.shape[0]]))
    return out


def _fill(file: IO[bytes], tensor: Tensor, path: Path) -> None:
    """Read a contiguous tensor's bytes."""
    if tensor.numel() == 0:
        return
    left = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"{path} has become shorter while it was read", "Fetch it again.")
        left = left[count:]


def _little_endian(tensor: Tensor) -> Tensor:
    """A tensor of bytes in a file's order, in this machine's order, in place."""
    if sys.byteorder != "little" and tensor.element_size() > 1 and tensor.numel():
        raw = tensor.view(-1).view(torch.uint8).view(-1, tensor.element_size())
        raw.copy_(raw.flip(1))
    return tensor
