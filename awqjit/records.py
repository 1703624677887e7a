# SPDX-License-Identifier: Apache-2.0
"""Tuning records: which tile was fastest for a problem on a CPU with so many threads. They lie beside the kernels.

A record is a file ``tuned-<problem>-<row>-<hash>``; the hash is over problem, row, CPU and threads. It is believed only
where a kernel would be (see :mod:`awqjit.places`), only whole (it holds its own SHA-256), and only if its tile is one
of those that this version tries, none of which changes a result. Anything else is passed over, with a reason.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from awqjit import machine, places, store, tiles
from awqjit.errors import ArgumentError
from awqjit.spec import KernelSpec, Problem
from awqjit.target import Tile
from awqjit.version import __version__

SCHEMA = 1
"""Number of this form; part of every name. A record of another one is never used."""

_MAX_BYTES = 1 << 16

logger = logging.getLogger("awqjit")


@dataclass(frozen=True)
class Key:
    """What a record holds for.

    Attributes:
        problem: one linear layer.
        row: of the selection table.
        cpu: :func:`cpu_model`.
        threads: of torch, when it was measured.
    """

    problem: Problem
    row: str
    cpu: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "problem": self.problem.slug,
            "row": self.row,
            "cpu": self.cpu,
            "threads": self.threads,
        }

    @property
    def name(self) -> str:
        """Of the record's file."""
        return store.named(f"tuned-{self.problem.slug}-{self.row}", self.to_dict())


@dataclass(frozen=True)
class Record:
    """One winner.

    Attributes:
        key: what it holds for.
        tile: the fastest tile that was found; the row's default where none was faster.
        microseconds: regime -> time with the default tile and with this one, as :mod:`awqjit.tune` measures them.
        version: of the awqjit that measured it.
    """

    key: Key
    tile: Tile
    microseconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    version: str = __version__

    def to_json(self) -> str:
        body = self.key.to_dict() | {
            "tile": asdict(self.tile),
            "microseconds": {name: list(pair) for name, pair in self.microseconds.items()},
            "version": self.version,
        }
        return json.dumps(body | {"sha256": _digest(body)}, indent=1, sort_keys=True) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    return store.digest(json.dumps(dict(body), sort_keys=True, ensure_ascii=True).encode("ascii"))


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """The CPU's name with the numbers that tell models apart where a virtual machine hides the name."""
    numbers = ("cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        text = ""
    found = dict(re.findall(r"^([^:\n\t]+?)\s*: *(.*)$", text, re.MULTILINE))
    return ", ".join([machine.detect().cpu, *(f"{name} {found[name]}" for name in numbers if name in found)])


def key_of(spec: KernelSpec) -> Key:
    """The key of a spec on this computer, with the threads torch has now."""
    return Key(spec.problem, spec.target.name, cpu_model(), torch.get_num_threads())


def find(spec: KernelSpec) -> tuple[Record | None, tuple[str, ...]]:
    """The record for a spec, and why each that lies under its name is not used, if any.

    Args:
        spec: with the row's default tile.
    """
    key = key_of(spec)
    reasons: list[str] = []
    for place in places.places():
        path = place.path / key.name
        if place.trusted and os.path.lexists(path):
            record, reason = read(path, spec)
            if record is not None:
                return record, tuple(reasons)
            reasons.append(f"{path}: {reason}")
    return None, tuple(reasons)


def tuned(spec: KernelSpec) -> KernelSpec:
    """The spec with the tile that was found to be the fastest here, or as it is. Counts as a use of the record."""
    record, reasons = find(spec)
    for reason in reasons:
        logger.warning("a tuning record is not used: %s", reason)
    if record is None:
        return spec
    for place in places.places():
        if place.trusted and not place.baked:
            store.note_use(place.path / record.key.name)
    return replace(spec, tile=record.tile)


def read(path: Path, spec: KernelSpec) -> tuple[Record | None, str]:
    """A record's file, or why it is not to be used for this spec."""
    try:
        body = load(path)
        key = key_of(spec)
        for name, wanted in key.to_dict().items():
            if body.get(name) != wanted:
                return None, f"it is of another {name}: {body.get(name)!r}"
        if reason := foreign(body, key.cpu, key.threads):
            return None, reason
        if set(body["tile"]) != {one.name for one in fields(Tile)}:
            return None, "its tile has other fields"
        if not all(type(value) is int for value in body["tile"].values()):
            return None, "its tile is not of whole numbers"
        tile = Tile(**body["tile"])
        pairs = {str(name): (float(a), float(b)) for name, (a, b) in body["microseconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # ArgumentError too
        return None, f"{type(error).__name__}: {error}"
    refusal = tiles.refusal(tile, spec.target, spec.problem.act_bits, spec.problem.x_dtype)
    return (None, refusal) if refusal else (Record(key, tile, pairs), "")


def foreign(body: Mapping[str, Any], cpu: str, threads: int) -> str:
    """Why a whole record says nothing about this version, CPU and number of threads, or ""."""
    if body.get("version") != __version__:
        return f"awqjit {body.get('version')} measured it: tune again"
    if body.get("cpu") != cpu:
        return f"of another CPU: {body.get('cpu')}"
    return "" if body.get("threads") == threads else f"of {body.get('threads')} threads"


def audit(path: Path) -> str:
    """Why a record's file is not whole or not what its name says, or ""; whether it fits this computer is not asked."""
    try:
        body = load(path)
        identity = {name: body[name] for name in ("schema", "problem", "row", "cpu", "threads")}
    except (OSError, ValueError, KeyError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    name = store.named(f"tuned-{body['problem']}-{body['row']}", identity)
    return "" if name == path.name else f"holds another record: {name}"


def load(path: Path) -> dict[str, Any]:
    """The JSON of a trusted file whose checksum is right.

    Raises:
        OSError, ValueError, RecursionError: it is not.
    """
    reason = places.distrust(path)
    if reason:
        raise ValueError(reason)
    text = store.read_file(path, _MAX_BYTES)
    if len(text) > _MAX_BYTES:
        raise ValueError("larger than any record")
    body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError("not an object")
    if body.get("schema") != SCHEMA:
        raise ValueError(f"of form {body.get('schema')}, this version reads {SCHEMA}")
    if body.pop("sha256", None) != _digest(body):
        raise ValueError("its content does not have its sha256")
    return body


def write(record: Record) -> Path:
    """Keep a record in the first place that can be written, in one step: a reader finds the old one or the new.

    Returns:
        Its file.

    Raises:
        ArgumentError: there is no such place.
    """
    reasons = []
    for place in places.places():
        if not (place.trusted and place.writable) or place.origin == "private":
            reasons.append(f"{place.path} ({place.reason or place.use})")
            continue
        path, fresh = place.path / record.key.name, place.path / store.passing_name("build")
        try:
            place.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            if reason := places.distrust(place.path):  # again: what was just made, or was made by another meanwhile
                raise OSError(0, reason)
            store.write_file(fresh, record.to_json().encode("ascii"))
            os.replace(fresh, path)
            return path
        except OSError as error:
            reasons.append(f"{place.path} ({error.strerror})")
        finally:
            with suppress(OSError):
                os.unlink(fresh)
    raise ArgumentError("cache", "; ".join(reasons) or "no place", "a directory that can be trusted and written")


def everywhere() -> Iterator[Path]:
    """The record files of all places that are searched, readable or not."""
    for place in places.places():
        if place.trusted:
            with suppress(OSError):
                yield from sorted(
                    place.path / name for name in os.listdir(place.path) if store.kind_of(name) == "tuned"
                )
