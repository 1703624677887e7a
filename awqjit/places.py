# SPDX-License-Identifier: Apache-2.0
"""Where kernels may lie on disk, and which of these directories can be trusted with code that will be run.

A shared library runs with all rights of the process that loads it. So a directory counts only if nobody but this
user and root can put a file into it: it and all its parents belong to one of the two, and no one else may write
there. Checksums do not replace this; whoever can replace a library can replace its checksum.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shlex
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from awqjit import config
from awqjit.errors import AwqJitWarning, NoCacheError

_OTHER_TEMPORARY = ("/var/tmp", "/dev/shm")
"""Where to look when the system's own temporary directory will not do."""

_MAX_PATH = 4096 - 512
"""Bytes of a place's path that leave room for a kernel's files and the compiler's temporary ones below PATH_MAX."""


@dataclass(frozen=True)
class Place:
    """A directory that holds, or could hold, kernels.

    Attributes:
        path: the directory, symbolic links resolved.
        origin: "AWQJIT_CACHE_PATH", "AWQJIT_CACHE_DIR", "user cache" or "private" (this process's own).
        trusted: kernels found here may be loaded.
        writable: kernels may be built here, as far as permissions tell.
        reason: why it is not trusted or not writable; empty if it is both, or only read by design.
    """

    path: Path
    origin: str
    trusted: bool
    writable: bool
    reason: str = ""

    @property
    def baked(self) -> bool:
        return self.origin == "AWQJIT_CACHE_PATH"

    @property
    def use(self) -> str:
        """What is done with it: "read and written", "read only" or "not used"."""
        if not self.trusted:
            return "not used"
        return "read and written" if self.writable else "read only"


def places() -> tuple[Place, ...]:
    """All places in the order they are searched. Creates nothing and warns of nothing: also for ``awqjit info``."""
    found = [_place(path, "AWQJIT_CACHE_PATH") for path in config.CACHE_PATH.read()]
    chosen = config.CACHE_DIR.read()
    if chosen is not None:
        found.append(_place(chosen, "AWQJIT_CACHE_DIR"))
    if not any(place.trusted and place.writable for place in found):
        found.append(_user_cache())
    private = _private.current()
    if private is not None:
        found.append(Place(private, "private", trusted=True, writable=True))
    return tuple(found)


def build_directories(name: str) -> Iterator[tuple[Place, Path]]:
    """Fresh, empty directories to build in, each below a place it can be renamed in; the best first.

    Ask for the next one when the one before proved unusable (disk full, quota). The last is in a temporary directory
    of this process, with one :class:`~awqjit.errors.AwqJitWarning`.

    Args:
        name: name of the directory to make; unique.

    Raises:
        NoCacheError: not even the temporary directory can be made.
    """
    reasons = []
    refused = ""
    for place in places():
        if place.origin in ("AWQJIT_CACHE_PATH", "private"):
            continue
        reason = place.reason
        if place.trusted and place.writable:
            try:
                place.path.mkdir(mode=0o755, parents=True, exist_ok=True)
                reason = distrust(place.path)  # again: what was just made, or was made by another meanwhile
                if not reason:
                    directory = place.path / name
                    directory.mkdir(mode=0o755)
            except OSError as error:
                reason = f"cannot be written: {error.strerror}"
            if not reason:
                if refused:
                    warn_once("refused", f"{refused}; kernels go to {place.path}")
                yield place, directory
                reason = "building there failed"
        reasons.append(f"{place.path} ({place.origin}): {reason}")
        if place.origin == "AWQJIT_CACHE_DIR":
            refused = f"AWQJIT_CACHE_DIR={place.path} is not used: {reason}"
    warn_once(
        "private",
        f"no directory keeps compiled kernels, so every process compiles them again: {'; '.join(reasons)}. "
        "Set AWQJIT_CACHE_DIR to a directory that only you can write",
    )
    try:
        private = _private.make()
        directory = private / name
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise NoCacheError((*reasons, f"temporary directory: {error}")) from None
    yield Place(private, "private", trusted=True, writable=True), directory


def loadable_directory(also: Iterable[Place] = ()) -> Path:
    """Make a fresh directory that libraries can be loaded from: a temporary one if possible, else below a place.

    A temporary directory that is missing, mounted ``noexec`` or open to others is passed over.

    Args:
        also: places to use, as far as they are writable, where no temporary directory will do.

    Raises:
        OSError: there is none; with all reasons.
    """
    reasons = []
    for parent in _temporary_directories():
        try:
            path = Path(os.path.realpath(tempfile.mkdtemp(prefix="awqjit-", dir=parent)))
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        reason = distrust(path) or _unloadable(path)
        if not reason:
            return path
        path.rmdir()
        reasons.append(reason)
    for place in also:
        if place.trusted and place.writable:
            try:
                place.path.mkdir(mode=0o755, parents=True, exist_ok=True)
                path = place.path / f"build-{secrets.token_hex(8)}"  # a name that is swept if this process is killed
                path.mkdir(mode=0o700)
                return path
            except OSError as error:
                reasons.append(f"{place.path}: {error.strerror}")
    raise OSError("; ".join(reasons))


def _temporary_directories() -> Iterator[str]:
    with suppress(OSError):
        yield tempfile.gettempdir()
    yield from _OTHER_TEMPORARY


def distrust(path: Path) -> str:
    """Why a file or directory cannot be trusted, or "" if it can.

    It and all its parents must be owned by this user or root and not be writable by others. A parent may be writable
    by all if it is sticky, as ``/tmp`` is. A group may write if it is this user's own group or root's. What does not
    exist yet is judged by its nearest existing parent.

    Args:
        path: absolute; symbolic links must already be resolved.
    """
    for part in (path, *path.parents):
        try:
            status = os.lstat(part)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"cannot be examined: {error.strerror}"
        reason = _distrust_one(part, status, target=part == path)
        if reason:
            return reason
    return ""


def _distrust_one(part: Path, status: os.stat_result, target: bool) -> str:
    if stat.S_ISLNK(status.st_mode):
        return f"{part} is a symbolic link"
    if not target and not stat.S_ISDIR(status.st_mode):
        return f"{part} is not a directory"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{part} belongs to another user (uid {status.st_uid}): name a directory that belongs to you or root"
    sticky = bool(status.st_mode & stat.S_ISVTX) and not target
    if status.st_mode & stat.S_IWOTH and not sticky:
        return f"{part} can be written by everyone: chmod o-w {shlex.quote(str(part))}"
    if status.st_mode & stat.S_IWGRP and not sticky and status.st_gid not in (os.getegid(), os.getgid(), 0):
        return (
            f"{part} can be written by a group (gid {status.st_gid}) that is not this user's own: "
            f"chmod g-w {shlex.quote(str(part))}"
        )
    return ""


def warn_once(about: str, text: str) -> None:
    """Give one :class:`~awqjit.errors.AwqJitWarning` per process and subject, whatever the warning filters say."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, AwqJitWarning, stacklevel=3)


def warn_of_refused(searched: Iterable[Place]) -> None:
    """Warn of the places that were named in a variable and are not trusted; once each."""
    searched = tuple(searched)
    instead = [place.path for place in searched if place.origin == "user cache" and place.trusted and place.writable]
    for place in searched:
        if place.trusted:
            continue
        if place.baked:
            warn_once(f"baked {place.path}", f"AWQJIT_CACHE_PATH: {place.path} is not used: {place.reason}")
        elif place.origin == "AWQJIT_CACHE_DIR" and instead:  # else the warning of a temporary directory says it
            text = f"AWQJIT_CACHE_DIR={place.path} is not used: {place.reason}; kernels go to {instead[0]}"
            warn_once("refused", text)


def private_directory() -> Path:
    """The temporary directory of this process, made if need be; removed at its end.

    Raises:
        OSError: it cannot be made.
    """
    return _private.make()


def remove_at_exit(path: Path) -> None:
    """Remove a directory when this process (not a forked child) ends. Libraries loaded from it stay mapped."""
    atexit.register(_remove, os.getpid(), path)


def _user_cache() -> Place:
    try:
        import platformdirs  # only when nobody has named a place

        path = Path(platformdirs.user_cache_dir("awqjit", appauthor=False))
    except RuntimeError:
        path = Path("~")
    if not path.is_absolute():  # what older versions of platformdirs return
        return Place(Path("~/.cache/awqjit"), "user cache", False, False, "this user has no home directory")
    return _place(path, "user cache")


def _place(path: Path, origin: str) -> Place:
    baked = origin == "AWQJIT_CACHE_PATH"
    real = Path(os.path.realpath(path))
    try:
        if not stat.S_ISDIR(os.stat(real).st_mode):
            return Place(real, origin, False, False, "is not a directory")
    except FileNotFoundError:
        if baked:
            return Place(real, origin, False, False, "does not exist")
    except OSError as error:
        return Place(real, origin, False, False, f"cannot be examined: {error.strerror}")
    reason = distrust(real) or _unloadable(real)
    if reason or baked:
        return Place(real, origin, not reason, False, reason)
    nearest = next(part for part in (real, *real.parents) if part.exists())
    writable = os.access(nearest, os.W_OK | os.X_OK)
    return Place(real, origin, True, writable, "" if writable else f"{nearest} cannot be written")


def _unloadable(path: Path) -> str:
    """Why no library can be loaded from files below a directory, which need not exist, or "" if one may."""
    if len(os.fsencode(path)) > _MAX_PATH:
        return f"its path is longer than {_MAX_PATH} bytes"
    nearest = next(part for part in (path, *path.parents) if part.exists())
    try:
        noexec = bool(os.statvfs(nearest).f_flag & getattr(os, "ST_NOEXEC", 0))
    except OSError:
        return ""
    return f"{nearest} is on a file system mounted noexec, from which no library can be loaded" if noexec else ""


class _Private:
    """The temporary directory of this process, removed at its end: loaded libraries stay mapped without their files.

    A forked child uses its parent's directory as long as that exists, and does not remove it.
    """

    def __init__(self) -> None:
        self._made: tuple[int, Path] | None = None
        self._locks: dict[int, threading.Lock] = {}

    def current(self) -> Path | None:
        made = self._made
        return made[1] if made is not None and made[1].is_dir() else None

    def make(self) -> Path:
        # One lock per process: a lock held by another thread at a fork would stay locked in the child.
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            path = self.current()
            if path is None:
                path = loadable_directory()
                self._made = (os.getpid(), path)
                remove_at_exit(path)
            return path


def _remove(owner: int, path: Path) -> None:
    """Remove all but failed builds: their errors point to them."""
    if os.getpid() != owner:
        return
    with suppress(OSError):
        for entry in path.iterdir():
            if not entry.name.startswith("failed-"):
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
        path.rmdir()  # fails where something is kept


_private = _Private()
_warned: set[str] = set()
