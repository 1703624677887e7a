# SPDX-License-Identifier: Apache-2.0
"""Model folders on disk: reading safetensors a few tensors at a time, writing a new folder whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from awqjit import shards
from awqjit.errors import ArgumentError, FormatError, MissingDependencyError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_CHUNK = 1 << 17  # values compared at a time


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise MissingDependencyError("safetensors", "writing model folders", "pip install safetensors") from None
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FormatError: the file is missing, is not JSON, or holds something other than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{path.parent} has no {path.name}", "Give the folder of a transformers model.") from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read ({error.strerror})", "Check the file.") from None
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8, no JSON, or JSON beyond Python's limits
        raise FormatError(f"{path} is not valid JSON ({error})", "Fetch the file again.") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds a {type(value).__name__}, not an object", "Fetch the file again.")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> the file of the same folder that holds it, as the shard index says."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name == Path(name).name and name.strip(".") and name.isprintable() and len(name) < 256
        for name in weight_map.values()
    ):
        raise FormatError(f"{index} has no usable weight_map", "Fetch it again.")
    return weight_map


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model folder, by name. Nothing is read until asked for.

    Attributes:
        folder: the folder.
        config: the contents of its config.json.
        files: tensor name -> the shard that holds it.
        shapes: tensor name -> shape.
        entries: tensor name -> where it is in its shard.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    entries: dict[str, shards.Entry]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read config.json, the shard index and the shards' headers.

        Raises:
            FormatError: there are no safetensors, a shard is missing or cut short, the index names tensors that its
                shards lack, or several files and no index.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FormatError(f"{folder} is not a folder", "Give the folder of a transformers model.")
        config = read_json(folder / "config.json")
        index = folder / INDEX
        weight_map = _weight_map(index) if index.exists() else None
        # An index that does not name the single file is left over from another model: transformers ignores it too.
        if weight_map is not None and (SINGLE in weight_map.values() or not (folder / SINGLE).exists()):
            files = {name: folder / shard for name, shard in weight_map.items()}
            headers = {path: shards.entries(path) for path in sorted(set(files.values()))}
            lost = [name for name, path in files.items() if name not in headers[path]]
            if lost:
                raise FormatError(
                    f"{index} lists tensors that its shards lack: {', '.join(lost[:10])}", "Fetch it again."
                )
        else:
            paths = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
            if not paths:
                pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt")))
                found = f" (only {', '.join(pickles)})" if pickles else ""
                raise FormatError(
                    f"{folder} has no safetensors files{found}",
                    "Pickle files can run code and are not read: convert the model to safetensors.",
                )
            if len(paths) > 1:
                names = ", ".join(path.name for path in paths)
                raise FormatError(f"{folder} has several shards ({names}) but no {INDEX}", "Fetch the index too.")
            headers = {paths[0]: shards.entries(paths[0])}
            files = dict.fromkeys(headers[paths[0]], paths[0])
        entries = {name: headers[path][name] for name, path in files.items()}
        return cls(folder, config, files, {name: entry.shape for name, entry in entries.items()}, entries)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(
        self, *names: str, dtype: torch.dtype | None = None, into: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Read tensors. Nothing of the files is kept open or mapped.

        Args:
            names: the tensors.
            dtype: convert floating tensors to it; None leaves every tensor as it is on disk.
            into: uint8, :meth:`room_for` bytes: memory that the tensors are to share. None: each gets its own.

        Raises:
            KeyError: a name that is not in the checkpoint.
            FormatError: the file is damaged.
        """
        return shards.read({name: self.entries[name] for name in names}, dtype=dtype, into=into)

    def room_for(self, *names: str) -> int:
        """Bytes that :meth:`read` needs ``into`` to have."""
        return shards.room_for(self.entries[name] for name in names)

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape and values, read a few rows at a time.

        Raises:
            KeyError: a name that is not in the checkpoint.
            FormatError: the file is damaged.
        """
        shape = self.shapes[first]
        if shape != self.shapes[second] or not shape:
            return shape == self.shapes[second] and torch.equal(self.read(first)[first], self.read(second)[second])
        one, other = self.entries[first], self.entries[second]
        rows = max(1, _CHUNK * shape[0] // max(1, math.prod(shape)))
        return all(
            torch.equal(
                *(shards.read({"": entry.rows(row, row + rows)})[""].to(torch.float64) for entry in (one, other))
            )
            for row in range(0, shape[0], rows)
        )


class FolderWriter:
    """Writes tensors into numbered safetensors shards of bounded size. Use through :func:`new_folder`."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        if shard_bytes < 1:
            raise ArgumentError("shard_bytes", shard_bytes, "at least 1")
        self.folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor; a full shard is written at once. A tensor larger than a shard gets one of its own."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"

    def _flush(self) -> None:
        safetensors, path = _safetensors(), self._part(len(self._shards))
        try:
            safetensors.torch.save_file(self._pending, str(path), metadata={"format": "pt"})
        except (OSError, safetensors.SafetensorError) as error:
            raise _unwritable(self.folder.parent, error) from error
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write one JSON file into the folder."""
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        try:
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.folder.parent, error) from error

    def finish(self) -> None:
        """Write the last shard, give the shards their final names and write the index."""
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        self.write_json(INDEX, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})


@contextmanager
def new_folder(
    destination: str | os.PathLike[str], *, shard_bytes: int = 1 << 30, force: bool = False
) -> Iterator[FolderWriter]:
    """Write a folder that appears under its name only when the block ends without an exception.

    Everything goes to a hidden folder beside the destination, which is renamed at the end (with ``force`` the old
    folder is moved aside first and deleted last). A crash leaves at most the hidden folder behind.

    Args:
        destination: must not exist, or be an empty folder, unless ``force``.
        shard_bytes: largest safetensors file in bytes.
        force: replace an existing model: a folder with a config.json and without folders in it.

    Raises:
        ArgumentError: the destination exists and is not an empty folder, nor with ``force`` a model's; or nothing can
            be written there.
    """
    destination = Path(os.path.abspath(destination))
    _check_free(destination, force)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=destination.parent))
    except OSError as error:
        raise _unwritable(destination.parent, error) from error
    try:
        # mkdtemp makes folders that only their owner can read; the final one gets the usual permissions.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        writer = FolderWriter(temporary, shard_bytes)
        yield writer
        writer.finish()
        for path in temporary.iterdir():
            path.chmod(0o666 & ~umask)  # safetensors writes files that only their owner can read
            _sync(path)
        _sync(temporary)
        _check_free(destination, force)
        if destination.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".old", dir=destination.parent))
            destination.rename(old / "folder")
            try:
                temporary.rename(destination)
            except BaseException:
                (old / "folder").rename(destination)
                old.rmdir()
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _unwritable(folder: Path, error: Exception) -> ArgumentError:
    reason = getattr(error, "strerror", None) or str(error)
    got = f"a place in {folder}, where writing fails ({reason})"
    return ArgumentError("destination", got, "one that can be written to and has space")


def _check_free(destination: Path, force: bool) -> None:
    if destination.exists() and not destination.is_dir():
        raise ArgumentError("destination", f"the file {destination}", "a folder's name")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not force:
        raise ArgumentError("destination", f"{destination}, which is not empty", "a new or empty folder (or force)")
    # What is replaced is deleted: only a folder that looks like a model's, and holds nothing but files, is.
    if not (destination / "config.json").is_file() or any(entry.is_dir() for entry in destination.iterdir()):
        raise ArgumentError(
            "destination", f"{destination}, which holds more than a model", "a model's folder to replace, or a new one"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
