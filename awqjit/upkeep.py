# SPDX-License-Identifier: Apache-2.0
"""Looking after a kernel cache: what lies in it, whether it is sound, and removing what is not wanted any more.

All of it is safe while other processes use the cache: a kernel goes by one rename, a library that is mapped stays
mapped (on local file systems), and a directory in which something is being built is left alone.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from awqjit import places, records, store
from awqjit.errors import ArgumentError
from awqjit.places import Place

_FILES = (store.META, store.LIBRARY, store.SPIRV, store.SOURCE, store.LOG)
_IDENTITY = ("schema", "source_sha256", "command", "machine", "compiler")
_MAX_SOURCE = 1 << 26
_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_AGES = {"m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


@dataclass(frozen=True)
class Item:
    """One thing in a cache.

    Attributes:
        path: its directory.
        kind: "kernel"; "tuned" (a tuning record); "failed" (the last failed build of a kernel); "build", "own", "stale"
            (in passing).
        bytes: size of its files.
        built: when its library was built, in seconds since 1970 by the file system's clock.
        used: when it was last fetched, to the hour; never before ``built``. Fetching from a read-only place leaves
            no trace.
    """

    path: Path
    kind: str
    bytes: int
    built: float
    used: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.path.name,
            "kind": self.kind,
            "bytes": self.bytes,
            "built": _iso(self.built),
            "used": _iso(self.used),
        }


@dataclass(frozen=True)
class Finding:
    """What :func:`verify` says of one kernel: ``reason`` is why it will not be used, or "" if it is sound."""

    item: Item
    reason: str
    removed: bool = False


@dataclass(frozen=True)
class Removal:
    """What :func:`prune` or :func:`clear` did.

    Attributes:
        removed: what is gone (or, in a dry run, would be).
        kept: what is still there.
        failed: what could not be removed, and why.
    """

    removed: tuple[Item, ...]
    kept: tuple[Item, ...]
    failed: tuple[str, ...]


def all_places() -> tuple[Place, ...]:
    """The places that are searched for kernels, without this process's temporary one."""
    return tuple(place for place in places.places() if place.origin != "private")


def named_place(directory: Path | None) -> Place:
    """The place to look after: the directory, or else the writable cache.

    Raises:
        ArgumentError: there is none, it does not exist, or is not trusted.
    """
    if directory is None:
        found = [place for place in all_places() if not place.baked]
        usable = next((place for place in found if place.trusted and place.writable), None)
        if usable is None:
            reasons = "; ".join(f"{place.path} ({place.reason})" for place in found)
            raise ArgumentError("cache", reasons, "a directory that can be trusted and written: name one with --dir")
        return usable
    real = Path(os.path.realpath(directory))
    if not real.is_dir():
        raise ArgumentError("directory", directory, "an existing directory")
    reason = places.distrust(real)
    if reason:
        raise ArgumentError("directory", f"{directory} ({reason})", "a directory that only you or root can write")
    writable = os.access(real, os.W_OK | os.X_OK)
    return Place(real, "named", True, writable, "" if writable else f"{real} cannot be written")


def items(place: Path) -> tuple[Item, ...]:
    """What lies in a place, sorted by name; nothing is checked. Empty if the place cannot be read."""
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return ()
    found = []
    for name in names:
        kind = store.kind_of(name)
        if kind is not None and _is_ours(place / name):
            with suppress(OSError):  # another process has just removed it
                found.append(_item(place / name, kind))
    return tuple(found)


def find(directories: tuple[Path, ...], name: str) -> tuple[Item, ...]:
    """The items whose name is, or else starts with, ``name``; several places may hold the same kernel.

    Raises:
        ArgumentError: none does.
    """
    everything = tuple(item for directory in directories for item in items(directory))
    found = tuple(item for item in everything if item.path.name == name)
    found = found or tuple(item for item in everything if item.path.name.startswith(name))
    if not found:
        where = ", ".join(map(str, directories)) or "no place at all"
        raise ArgumentError("name", repr(name), f"the beginning of a name that `awqjit cache list` shows ({where})")
    return found


def audit(directory: Path) -> str:
    """Why a kernel would not be used or is not what its name says, or "". Reads all of its library and source."""
    reason = store.check(directory, {})
    if reason:
        return reason
    try:
        meta = store.read_meta(directory)
        with (directory / store.SOURCE).open("rb") as file:
            source = file.read(_MAX_SOURCE)
    except (OSError, ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    name = store.named(str(meta.get("slug")), {key: meta.get(key) for key in _IDENTITY})
    if name != directory.name:
        return f"holds another kernel: {name}"
    if store.digest(source) != meta.get("source_sha256"):
        return f"{store.SOURCE} is not what the library was built from"
    return ""


def described(item: Item) -> tuple[str, dict[str, Any]]:
    """Why an item would not be used, or "", and what it says of itself as far as that can be read."""
    reason, meta = f"not a kernel: {item.kind}", dict[str, Any]()
    with suppress(OSError, ValueError, RecursionError):
        if item.kind == "tuned":
            reason = records.audit(item.path)
            meta = records.load(item.path)
        else:
            reason = audit(item.path) if item.kind == "kernel" else reason
            meta = store.read_meta(item.path)
    return reason, meta


def verify(place: Place, remove: bool = False) -> tuple[Finding, ...]:
    """Check every kernel and every tuning record of a place by its checksums.

    Args:
        place: where.
        remove: remove what is not sound. It is built again when it is needed.

    Raises:
        ArgumentError: ``remove``, and the place cannot be written.
    """
    if remove:
        _require_writable(place)
    findings = []
    for item in items(place.path):
        if item.kind not in ("kernel", "tuned"):
            continue
        reason, gone = audit(item.path) if item.kind == "kernel" else records.audit(item.path), False
        if reason and not os.path.lexists(item.path):
            continue  # another process removed it meanwhile
        if reason and remove:
            try:
                store.retire(item.path)
                gone = True
            except OSError as error:
                reason = f"{reason}; cannot be removed: {error.strerror}"
        findings.append(Finding(item, reason, gone))
    return tuple(findings)


def prune(
    place: Place, max_bytes: int | None = None, older_than: float | None = None, dry_run: bool = False
) -> Removal:
    """Remove kernels, tuning records and failed builds that have not been used for long.

    Args:
        place: where.
        max_bytes: the least recently used go until the rest is no larger.
        older_than: those not used for more than this many seconds go.
        dry_run: only say what would go.

    Raises:
        ArgumentError: no limit is given, or the place cannot be written.
    """
    if max_bytes is None and older_than is None:
        raise ArgumentError("--max-size, --older-than", "neither", "a largest size, a largest age or both")
    _require_writable(place)
    now = _clock(place.path)
    found = sorted(
        (item for item in items(place.path) if item.kind in ("kernel", "tuned", "failed")), key=lambda item: item.used
    )
    doomed = []
    total = sum(item.bytes for item in found)
    for item in found:
        too_old = older_than is not None and now - item.used > older_than
        too_much = max_bytes is not None and total > max_bytes
        if too_old or too_much:
            doomed.append(item)
            total -= item.bytes
    return _remove(place.path, doomed, now, dry_run)


def clear(place: Place, dry_run: bool = False) -> Removal:
    """Remove everything but what another process may be building just now.

    Raises:
        ArgumentError: the place cannot be written.
    """
    _require_writable(place)
    doomed = [item for item in items(place.path) if item.kind != "build"]
    return _remove(place.path, doomed, _clock(place.path), dry_run)


def parse_size(text: str) -> int:
    """Bytes of a size such as "200MB" (10**6) or "1.5GiB" (2**30).

    Raises:
        ArgumentError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    factor = _SIZES.get(found[2].upper()) if found else None
    if found is None or factor is None:
        raise ArgumentError("--max-size", repr(text), "a number with B, kB, MB, GB, KiB, MiB or GiB, for example 200MB")
    return int(float(found[1]) * factor)


def parse_age(text: str) -> float:
    """Seconds of an age such as "30d", "12h", "90m" or "2w".

    Raises:
        ArgumentError: it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([mhdw])\s*", text)
    if found is None:
        raise ArgumentError("--older-than", repr(text), "a number with m, h, d or w, for example 30d")
    return float(found[1]) * _AGES[found[2]]


def _require_writable(place: Place) -> None:
    if not (place.trusted and place.writable):
        raise ArgumentError("directory", f"{place.path} ({place.reason or 'only read'})", "a directory you can write")


def _remove(place: Path, doomed: list[Item], now: float, dry_run: bool) -> Removal:
    removed, failed = [], []
    for item in doomed:
        try:
            if not dry_run:
                if _item(item.path, item.kind).used != item.used:
                    continue  # used by another process since it was listed
                store.retire(item.path)
            removed.append(item)
        except FileNotFoundError:
            removed.append(item)  # another process was faster
        except OSError as error:
            failed.append(f"{item.path}: {error.strerror}")
    if not dry_run:
        with suppress(OSError):
            store.sweep(place, now)
    gone = {item.path for item in removed} if dry_run else set()
    return Removal(tuple(removed), tuple(item for item in items(place) if item.path not in gone), tuple(failed))


def _is_ours(path: Path) -> bool:
    """Whether what has a kernel's name is one, or the remains of one, and not a directory of somebody else's."""
    if path.is_symlink() or not path.is_dir():
        return True
    try:
        names = os.listdir(path)
    except OSError:
        return True  # says why when it is checked
    return not names or any(name in names for name in _FILES)


def _item(path: Path, kind: str) -> Item:
    """Sizes and times of an item. Of a kernel, the library is never changed and meta.json is touched at each use."""
    changed = os.lstat(path).st_mtime
    if not path.is_dir():
        return Item(path, kind, os.lstat(path).st_size, changed, changed)
    times = {}
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                size += status.st_size
                times[name] = status.st_mtime
    built = times.get(store.product(path).name, changed)
    return Item(path, kind, size, built, max(built, times.get(store.META, built)))


def _clock(place: Path) -> float:
    """The time by the file system's clock, which need not be this machine's."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
