# SPDX-License-Identifier: Apache-2.0
"""One kernel on disk: how its directory is named, checked, published and cleaned up after.

``<slug>-<hash>/`` holds kernel.cpp, kernel.so, build.log and meta.json. A published directory is never changed, only
renamed as a whole: a process may have its library mapped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from awqjit import places, toolchain
from awqjit.errors import ArgumentError

SCHEMA = 1
"""Number of this directory form; part of every key. A kernel of another schema is never used."""

SOURCE, LIBRARY, SPIRV, LOG, META = "kernel.cpp", "kernel.so", "kernel.spv", "build.log", "meta.json"
"""Files of a kernel's directory. What was built is a shared library or, for a GPU, a SPIR-V module."""

_SLUG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,159}")
_HASH = re.compile(r"[0-9a-f]{16}")
_HOUR = 3600
_DAY = 24 * _HOUR
_KEPT_SECONDS = {"build": _DAY, "stale": _DAY, "own": 30 * _DAY, "failed": 30 * _DAY}
"""Kinds of directories that are not there to stay, and the age at which nobody can be using them any more. "build":
being built; "stale": damaged and set aside; "own": sound, but another process was first, so only its builder uses it;
"failed": the compiler refused it."""

_OTHER_KINDS = (*_KEPT_SECONDS, "tuned")
"""What the name of something that is not a kernel begins with; "tuned": a record of :mod:`awqjit.records`, a file."""
_MAX_META = 1 << 20

logger = logging.getLogger("awqjit")


class Builder(Protocol):
    """What turns source text into a kernel: :mod:`awqjit.toolchain`, or something that has these of its functions."""

    PRODUCT: str  # name of the file it builds: LIBRARY or SPIRV

    def neutral_command(self, flags: tuple[str, ...]) -> tuple[str, ...]: ...

    def relative_command(
        self, compiler: toolchain.Compiler, flags: tuple[str, ...], source: Path, output: Path
    ) -> tuple[str, ...]: ...

    def absolute_command(
        self, compiler: toolchain.Compiler, flags: tuple[str, ...], source: Path, output: Path
    ) -> tuple[str, ...]: ...

    def find_compiler(self) -> toolchain.Compiler: ...

    def likely_stamp(self) -> str | None: ...

    def file_stamp(self, argv: tuple[str, ...]) -> str | None: ...

    def compile_shared(
        self,
        compiler: toolchain.Compiler,
        source: Path,
        flags: tuple[str, ...],
        output: Path,
        timeout: float,
        name: str | None = None,
    ) -> str: ...


@dataclass(frozen=True)
class Request:
    """A kernel that is wanted.

    Attributes:
        slug: its readable name; the first part of the directory's name.
        source: the rendered C++ text, with everything it includes but the compiler's own headers.
        flags: compiler flags beyond those that the builder gives every kernel.
        builder: what builds it.
    """

    slug: str
    source: str
    flags: tuple[str, ...]
    builder: Builder = toolchain

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.slug) or self.slug.partition("-")[0] in _OTHER_KINDS:
            kinds = ", ".join(f"{kind}-" for kind in _OTHER_KINDS)
            raise ArgumentError(
                "Request.slug", repr(self.slug), f"1 to 160 letters, digits and _ . + -; not {kinds}..."
            )

    def identity(self, compiler: toolchain.Compiler | None) -> dict[str, object]:
        """What a stored kernel must agree with. Without a compiler any compiler's work for this machine will do."""
        wanted: dict[str, object] = {
            "schema": SCHEMA,
            "source_sha256": digest(self.source.encode("utf-8")),
            "command": list(self.builder.neutral_command(self.flags)),
            "machine": platform.machine(),
        }
        if compiler is not None:
            wanted["compiler"] = compiler.identity
        return wanted

    def directory_name(self, compiler: toolchain.Compiler) -> str:
        """``<slug>-<hash>``; the hash is over schema, source, command, machine and compiler."""
        return named(self.slug, self.identity(compiler))


def named(slug: str, identity: dict[str, object]) -> str:
    """Name of the directory of a kernel with this slug and :meth:`Request.identity`."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=True)
    return f"{slug}-{digest(text.encode('ascii'))[:16]}"


def kind_of(name: str) -> str | None:
    """What a name in a place stands for: "kernel", "tuned", one of those in passing, or None: not of the cache."""
    if name[-17:-16] != "-" or not _HASH.fullmatch(name[-16:]):
        return None
    first = name.partition("-")[0]
    return first if first in _OTHER_KINDS else "kernel"


def passing_name(kind: str) -> str:
    """A unique name for a directory that is not there to stay: "build", "stale" or "own"."""
    return f"{kind}-{secrets.token_hex(8)}"


def is_other(directory: Path, wanted: dict[str, object]) -> bool:
    """Whether a directory says of itself that it holds another kernel than the wanted one. False if it says nothing."""
    try:
        meta = read_meta(directory)
    except (OSError, ValueError, RecursionError):
        return False
    return any(meta.get(name, value) != value for name, value in wanted.items())


def same_slug(place: Path, slug: str) -> list[str]:
    """Names of the directories in a place that hold this kernel built by any compiler, sorted; nothing is checked."""
    try:
        names = os.listdir(place)
    except OSError:
        return []
    return sorted(name for name in names if name[:-16] == f"{slug}-" and _HASH.fullmatch(name[-16:]))


def product(directory: Path) -> Path:
    """What was built, of the kernel in a directory. There is just one, or the checks below find something amiss."""
    spirv = directory / SPIRV
    return spirv if os.path.lexists(spirv) else directory / LIBRARY


def check(directory: Path, wanted: dict[str, object]) -> str:
    """Why a directory does not hold the wanted kernel whole, or "" if it does. Reads all of the library.

    Args:
        directory: the kernel's directory; symbolic links already resolved.
        wanted: from :meth:`Request.identity`.
    """
    library = product(directory)
    reason = places.distrust(library)
    if reason:
        return reason
    try:
        meta = read_meta(directory)
        for name, value in wanted.items():
            if meta.get(name) != value:
                return f"{META} has another {name}"
        command = meta.get("command")
        if isinstance(command, list) and library.name not in command:
            return f"{META} is not of {library.name}"
        size, wanted_digest = meta.get("size"), meta.get("sha256")
        if not isinstance(size, int) or not isinstance(wanted_digest, str):
            return f"{META} has no size and sha256"
        content = read_file(library, size)
    except (OSError, ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    if len(content) != size:
        return f"{library.name} has {len(content)} bytes instead of {size}"
    return "" if digest(content) == wanted_digest else f"{library.name} does not have the sha256 of {META}"


def seal(directory: Path, request: Request, compiler: toolchain.Compiler, log: str, seconds: float) -> None:
    """Complete a directory whose library has been built: log, meta.json, permissions, everything on the disk.

    Raises:
        OSError: the disk is full or fails.
    """
    library = directory / request.builder.PRODUCT
    content = library.read_bytes()
    meta = {
        **request.identity(compiler),
        "slug": request.slug,
        "compiler_file": request.builder.file_stamp(compiler.argv),
        "size": len(content),
        "sha256": digest(content),
        "seconds": round(seconds, 3),
    }
    write_log(directory, request.builder.relative_command(compiler, request.flags, directory / SOURCE, library), log)
    (directory / META).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for path in (directory / SOURCE, library, directory / LOG, directory / META):
        # Linkers make files as open as the umask lets them; a library others can write would not be trusted.
        path.chmod(path.stat().st_mode & 0o755)
        _sync(path)
    _sync(directory)


def write_log(directory: Path, command: tuple[str, ...], log: str) -> None:
    """Write build.log: the command, then what the compiler printed."""
    text = f"$ {shlex.join(command)}\n{log}\n"
    (directory / LOG).write_text(text, encoding="utf-8", errors="backslashreplace")


def publish(built: Path, target: Path, wanted: dict[str, object]) -> Path:
    """Give a sealed directory its final name, and return the directory to load from.

    What lies under the name already is left alone if it is sound: then the caller's own build is used from where
    it is. If it is not, it is renamed aside first, as a whole.

    Raises:
        OSError: the file system has lost the build.
    """
    renamed = False
    for _ in range(3):
        try:
            os.rename(built, target)
            renamed = True
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
                logger.warning("cannot rename %s to %s: %s", built, target, error)
                break
        if not check(target, wanted):
            break
        _set_aside(target, wanted)
    # On a network a rename can fail although it was done (the answer was lost) or be done and not be seen yet: look.
    if (renamed or not _is_there(built)) and _appears(target, wanted):
        with suppress(OSError):
            _sync(target.parent)
        return target
    own = target.with_name(passing_name("own"))
    with suppress(OSError):
        os.rename(built, own)
    for used in (own, built):
        if _is_there(used):
            return used
    raise OSError(errno.ESTALE, "neither there after a rename nor where it was", str(target))


def _is_there(directory: Path) -> bool:
    return os.path.lexists(product(directory))


def _appears(directory: Path, wanted: dict[str, object]) -> bool:
    """Whether a kernel that was just renamed is to be seen, at the latest after a second."""
    for pause in (0.0, 0.01, 0.05, 0.2, 0.74):
        time.sleep(pause)
        if not check(directory, wanted):
            return True
    return False


def keep_failed(built: Path, target: Path) -> Path:
    """Rename a failed build to ``failed-<slug>-<hash>`` beside the kernels; the latest failure is kept."""
    kept = target.with_name(f"failed-{target.name}")
    for _ in range(3):
        try:
            os.rename(built, kept)
            return kept
        except OSError:
            aside = target.with_name(passing_name("stale"))
            with suppress(OSError):
                os.rename(kept, aside)
                remove(aside)
    return built


def sweep(place: Path, now: float) -> None:
    """Remove what killed processes left behind, once it is so old that nobody can be using it.

    Args:
        place: a writable, trusted place.
        now: the time by the file system's clock, which may not be this machine's.
    """
    for name in os.listdir(place):
        age = _KEPT_SECONDS.get(name.partition("-")[0])
        if age is not None and _HASH.fullmatch(name[-16:]):
            with suppress(OSError):
                if now - os.lstat(place / name).st_mtime > age:
                    logger.debug("removing %s, left behind by a process that ended", place / name)
                    remove(place / name)


@dataclass(frozen=True)
class Entry:
    """One stored kernel, as ``awqjit info`` counts it: its directory and the bytes of its files. Not checked."""

    path: Path
    bytes: int


def entries(place: Path) -> Iterator[Entry]:
    """The kernels in a place, sorted by name; none if it cannot be read."""
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return
    for name in names:
        passing = name.partition("-")[0] in _KEPT_SECONDS
        if not passing and _HASH.fullmatch(name[-16:]) and (place / name / META).is_file():
            with suppress(OSError):
                yield Entry(place / name, sum(file.stat().st_size for file in (place / name).iterdir()))


def _set_aside(target: Path, wanted: dict[str, object]) -> None:
    aside = target.with_name(passing_name("stale"))
    with suppress(OSError):
        os.rename(target, aside)
        if check(aside, wanted):
            remove(aside)
        else:
            # Another process published a sound one between our check and our rename: it goes back.
            os.rename(aside, target)


def remove(path: Path) -> None:
    """Remove a file or a directory with all that is in it, as far as permissions allow."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def retire(directory: Path) -> None:
    """Remove a published kernel: out of sight by one rename, so that nobody finds half of it. It may be mapped.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = directory.with_name(passing_name("stale"))
    os.rename(directory, aside)
    remove(aside)


def note_use(file: Path) -> None:
    """Record that a kernel or a tuning record is used now, as the time of change of its meta.json or of itself.

    Their bytes stay, and nobody maps them. Once an hour is enough. Where it is not possible (read-only, another
    user's), nothing is recorded.
    """
    with suppress(OSError):
        if abs(time.time() - os.stat(file).st_mtime) > _HOUR:
            os.utime(file)


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_meta(directory: Path) -> dict[str, object]:
    """meta.json of a kernel's directory.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or is not a JSON object.
    """
    meta = json.loads(read_file(directory / META, _MAX_META))
    if not isinstance(meta, dict):
        raise ValueError(f"{META} is not an object")
    return meta


def write_file(path: Path, content: bytes) -> None:
    """Make a file that only its owner can write, and see to it that it is on the disk.

    Raises:
        OSError: it exists already, or the disk is full or fails.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(descriptor, 0o644)  # whatever the umask
        os.fsync(descriptor)


def read_file(path: Path, limit: int) -> bytes:
    """Up to ``limit`` + 1 bytes of a regular file. Never waits at a FIFO or follows a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems do not sync directories. The checksum finds what a crash then loses.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
