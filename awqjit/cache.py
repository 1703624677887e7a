# SPDX-License-Identifier: Apache-2.0
"""From rendered source to a shared library on disk that is safe to load: found in a cache, or compiled.

Read-only places of ``AWQJIT_CACHE_PATH`` are searched first, then the writable cache. A kernel is compiled in a
private directory and becomes visible whole, by one rename. What a reader finds is checked each time and rebuilt if it
is not what was written. See docs/cache.md for what is promised and what is not.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from awqjit import config, places, slots, store, toolchain
from awqjit.errors import CompileError, KernelMissingError, NoCacheError, NoCompilerError
from awqjit.places import Place
from awqjit.store import Request

__all__ = ["Artifact", "Request", "bake", "discard", "fetch", "find", "replace"]

logger = logging.getLogger("awqjit")


@dataclass(frozen=True)
class Artifact:
    """A kernel's shared library, checked and ready to load.

    Attributes:
        path: the library.
        directory: its directory, with the source and the build log.
        seconds: time spent building it; 0 if it was found.
        origin: "built" (compiled now), "cache" (found in the writable cache) or "baked" (found in
            ``AWQJIT_CACHE_PATH``).
    """

    path: Path
    directory: Path
    seconds: float
    origin: str


def fetch(request: Request) -> Artifact:
    """Find a kernel in the caches, or compile it and keep it.

    In ``AWQJIT_CACHE_PATH`` the work of any compiler is taken: it was put there on purpose. In the writable cache
    the compiler must be the one that is installed; where none is installed, or ``AWQJIT_JIT=0``, any will do.
    Safe to call from many threads and processes at once. The library is read and checked on every call: load it now,
    and call again if it has vanished.

    Args:
        request: name, source and flags.

    Returns:
        A library that has the size and the SHA-256 it was built with. It stays at least until this process ends,
        unless someone cleans the cache.

    Raises:
        KernelMissingError: ``AWQJIT_JIT=0`` and no place has it.
        NoCompilerError: no place has it and no compiler works; or ``AWQJIT_CXX`` names one that does not.
        CompileError: the compiler refused it or took longer than ``AWQJIT_COMPILE_TIMEOUT``.
        NoCacheError: no directory can be written.
    """
    start = time.perf_counter()
    found, origin = _find_or_build(request)
    if origin == "cache":
        store.note_use(found / store.META)
    seconds = time.perf_counter() - start if origin == "built" else 0.0
    return Artifact(store.product(found), found, seconds, origin)


def find(request: Request) -> Artifact | None:
    """A kernel as it lies in a cache, whatever compiler built it; None if no place has it.

    Starts, builds and writes nothing, and does not count as a use: for telling what :func:`fetch` would find.
    """
    trusted = [place for place in places.places() if place.trusted]
    search = _Search(request, _Unusable(None))
    for origin, baked in (("baked", True), ("cache", False)):
        found = search.by_slug(place for place in trusted if place.baked is baked)
        if found is not None:
            return Artifact(store.product(found), found, 0.0, origin)
    return None


def replace(request: Request, unusable: Artifact, reason: str) -> Artifact:
    """Another library instead of one that cannot be loaded, though it is what was built: for another C library, say.

    In the writable cache it is built again and takes the other's place; what is baked is passed over.

    Args:
        request: name, source and flags.
        unusable: from :func:`fetch`. It may have vanished or been replaced meanwhile.
        reason: why it cannot be loaded, for the log.

    Returns, Raises: as :func:`fetch`.
    """
    if unusable.path.exists():
        logger.warning("the stored kernel %s cannot be loaded and is not used: %s", unusable.directory, reason)
    start = time.perf_counter()
    found, origin = _find_or_build(request, _Unusable(unusable.directory))
    return Artifact(store.product(found), found, time.perf_counter() - start if origin == "built" else 0.0, origin)


def discard(artifact: Artifact) -> None:
    """Remove a library that was built just now and cannot be loaded, so that no other process finds it."""
    if artifact.origin == "built":
        with suppress(OSError):
            store.retire(artifact.directory)


class _Unusable:
    """A directory that cannot be loaded from; one that later takes its name is another. None: no directory."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._library = self._status(directory) if directory is not None else None

    def is_(self, directory: Path) -> bool:
        return directory == self._directory and self._library is not None and self._status(directory) == self._library

    @staticmethod
    def _status(directory: Path) -> tuple[int, int] | None:
        try:
            status = os.stat(store.product(directory))
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def bake(request: Request, compiler: toolchain.Compiler, place: Path) -> Artifact:
    """Make sure that one directory holds a kernel built by this compiler. No other place is looked at or written.

    Args:
        request: name, source and flags. The kernel is not loaded: it may be for another CPU.
        compiler: from :func:`awqjit.toolchain.find_compiler`.
        place: an existing directory that can be written; symbolic links already resolved.

    Returns:
        The library; its origin is "built" or, if it was there already, "baked".

    Raises:
        CompileError: the compiler refused it or took longer than ``AWQJIT_COMPILE_TIMEOUT``.
        OSError: the directory cannot be built in.
    """
    start = time.perf_counter()
    target, wanted = place / request.directory_name(compiler), request.identity(compiler)
    if not store.check(target, wanted):
        return Artifact(store.product(target), target, 0.0, "baked")
    directory = place / store.passing_name("build")
    directory.mkdir(mode=0o755)
    try:
        with slots.slot():
            used = _build_in(directory, target, request, compiler)
        if used != target:
            store.remove(used)  # another process was first
    finally:
        store.remove(directory)
    reason = store.check(target, wanted)
    if reason:
        raise OSError(f"{target.name}: {reason}")
    return Artifact(store.product(target), target, time.perf_counter() - start, "built")


def _find_or_build(request: Request, unusable: _Unusable | None = None) -> tuple[Path, str]:
    unusable = unusable or _Unusable(None)
    searched = places.places()
    places.warn_of_refused(searched)
    trusted = [place for place in searched if place.trusted]
    writable = [place for place in trusted if not place.baked]
    search = _Search(request, unusable)
    found = search.by_slug(place for place in trusted if place.baked)
    if found is not None:
        return found, "baked"
    if not config.JIT.read():
        named = (str(place.path) + (f" ({place.reason})" if place.reason else "") for place in searched)
        return _or_raise(search.by_slug(writable), KernelMissingError(request.slug, tuple(named))), "cache"
    # Most processes find all they need by the compiler's file, and never spend the time to start and try it.
    stamp = request.builder.likely_stamp()
    if stamp is not None:
        found = search.by_slug(writable, {"compiler_file": stamp})
        if found is not None:
            return found, "cache"
    while True:
        try:
            compiler = request.builder.find_compiler()
        except NoCompilerError as error:
            if config.CXX.read():
                raise
            return _or_raise(search.by_slug(writable), error), "cache"
        found = search.by_compiler(writable, compiler)
        if found is not None:
            return found, "cache"
        try:
            return _build(request, compiler, unusable)
        except CompileError:
            if toolchain.is_there(compiler):
                raise
            logger.warning("the compiler %s has vanished; looking for another", shlex.join(compiler.argv))
            toolchain.forget()


def _or_raise(found: Path | None, error: Exception) -> Path:
    if found is None:
        raise error
    return found


class _Search:
    """One fetch's search; reports a damaged directory once, however often it comes across it."""

    def __init__(self, request: Request, unusable: _Unusable) -> None:
        self._request = request
        self._unusable = unusable
        self._reported: set[Path] = set()

    def by_slug(self, where: Iterable[Place], also: dict[str, object] | None = None) -> Path | None:
        """The kernel built by any compiler, or by one that left ``also`` in meta.json."""
        wanted = self._request.identity(None) | (also or {})
        for place in where:
            for name in store.same_slug(place.path, self._request.slug):
                directory = place.path / name
                if not store.is_other(directory, wanted) and self._sound(directory, wanted):
                    return directory
        return None

    def by_compiler(self, where: Iterable[Place], compiler: toolchain.Compiler) -> Path | None:
        """The kernel built by just this compiler."""
        name, wanted = self._request.directory_name(compiler), self._request.identity(compiler)
        for place in where:
            if os.path.lexists(place.path / name) and self._sound(place.path / name, wanted):
                return place.path / name
        return None

    def _sound(self, directory: Path, wanted: dict[str, object]) -> bool:
        if self._unusable.is_(directory):
            return False
        reason = store.check(directory, wanted)
        if reason and directory not in self._reported and os.path.lexists(directory):  # else: removed just now
            self._reported.add(directory)
            logger.warning("the stored kernel %s is damaged and not used: %s", directory, reason)
        return not reason


def _build(request: Request, compiler: toolchain.Compiler, unusable: _Unusable) -> tuple[Path, str]:
    name, wanted = request.directory_name(compiler), request.identity(compiler)
    reasons = []
    for place, directory in places.build_directories(store.passing_name("build")):
        target = place.path / name
        used = target
        try:
            with slots.slot(), _lock(place.path, name):
                if not unusable.is_(target) and not store.check(target, wanted):
                    return target, "cache"  # built by another process while this one waited
                used = _build_in(directory, target, request, compiler, unusable)
                return used, "built"
        except CompileError:
            used = directory  # already renamed, unless that failed: then it must last as long as the error's path
            raise
        except OSError as error:
            logger.warning("building %s in %s failed: %s", name, place.path, error)
            reasons.append(f"{place.path}: {error}")
        finally:
            if used == target:
                store.remove(directory)
            else:
                places.remove_at_exit(used)
    raise NoCacheError(tuple(reasons))


def _build_in(
    directory: Path,
    target: Path,
    request: Request,
    compiler: toolchain.Compiler,
    unusable: _Unusable | None = None,
) -> Path:
    """Compile in ``directory``, publish as ``target``; the directory to load from, which may be either.

    Raises:
        CompileError: with the paths of the failed build, which is kept.
        OSError: this place cannot be built in; another one may.
    """
    start = time.perf_counter()
    store.sweep(target.parent, now=directory.stat().st_mtime)
    source, library = directory / store.SOURCE, directory / request.builder.PRODUCT
    source.write_text(request.source, encoding="utf-8", newline="\n")
    try:
        log = request.builder.compile_shared(
            compiler, source, request.flags, library, config.COMPILE_TIMEOUT.read(), request.slug
        )
    except CompileError as error:
        output = error.args[3]
        for text, code in (("No space left on device", errno.ENOSPC), ("Disk quota exceeded", errno.EDQUOT)):
            if text in output:
                raise OSError(code, text, str(directory)) from error
        kept = store.keep_failed(directory, target)
        source = kept / store.SOURCE
        command = request.builder.absolute_command(compiler, request.flags, source, kept / library.name)
        store.write_log(kept, command, output)
        raise CompileError(request.slug, command, str(source), output) from None
    store.seal(directory, request, compiler, log, time.perf_counter() - start)
    logger.info("compiled %s in %.2f s", request.slug, time.perf_counter() - start)
    if unusable is not None and unusable.is_(target):
        with suppress(OSError):  # then the new one is used from elsewhere
            store.retire(target)
    return store.publish(directory, target, request.identity(compiler))


@contextmanager
def _lock(place: Path, name: str) -> Iterator[None]:
    """Let one process at a time build a kernel, if the file system can and for no longer than a build may take.

    Only spares work: without the lock two processes compile the same and each loads its own. The operating system
    frees it when its holder dies. Its file is never deleted: another may be waiting for the very same file.
    """
    import filelock  # only when something is built

    lock: filelock.BaseFileLock | None = None
    try:
        (place / "locks").mkdir(mode=0o755, exist_ok=True)
        path = place / "locks" / f"{name}.lock"
        lock = filelock.FileLock(path, timeout=config.COMPILE_TIMEOUT.read(), mode=0o644)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # a Timeout is an OSError
        logger.warning("building %s without its lock: %s", name, error)
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
