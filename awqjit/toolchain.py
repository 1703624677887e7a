# SPDX-License-Identifier: Apache-2.0
"""Finding a C++ compiler that works on this machine, and running it.

A compiler counts as working when it turns a ten-line file into a shared library that this process can load and
call: a cross compiler, a broken installation or a temporary directory mounted ``noexec`` is found out here, not by a
kernel.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from awqjit import child, config, places
from awqjit.errors import ArgumentError, CompileError, NoCompilerError

BASE_FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # one rounding where the source has one: all rows give the same bits
    "-fno-exceptions",
    "-fno-rtti",
    # A C++ driver names libstdc++ on its own; nothing uses it, so it must not become a dependency.
    *(("-Wl,--as-needed",) if sys.platform.startswith("linux") else ()),
)
"""Flags of every kernel. The ``flags`` of the functions below come behind them; never ``-march=native``."""

PRODUCT = "kernel.so"
"""What a kernel is built into."""

LIBRARIES: tuple[str, ...] = ("-lm",)
"""Libraries of every kernel, last on the command line."""

_PROBE = """\
extern "C" __attribute__((visibility("default"))) int awqjit_probe(int x) {
#if defined(__clang__)
    return x + 2;
#elif defined(__GNUC__)
    return x + 1;
#else
    return x;
#endif
}
extern "C" __attribute__((visibility("default"))) const char* awqjit_probe_version() { return __VERSION__; }
// Instructions that not every CPU of the architecture has, allowed without being asked for. Every Mac has them.
extern "C" __attribute__((visibility("default"))) int awqjit_probe_wide() {
#if defined(__linux__) && (defined(__SSE3__) || defined(__AVX__) || defined(__ARM_FEATURE_DOTPROD) \\
    || defined(__ARM_FEATURE_ATOMICS) || defined(__ARM_FEATURE_QRDMX))
    return 1;
#else
    return 0;
#endif
}
"""
_KINDS = {1: "gcc", 2: "clang"}
# Unlike gcc and clang, zig compiles for the CPU it runs on unless told not to, and builds a C++ library first.
_ZIG_FLAGS = ("-nostdlib++", "-mcpu=baseline")
_ZIG = ("-m", "ziglang", "c++", *_ZIG_FLAGS)
# What makes a compiler that allows more than every CPU has stop doing so: zig in a script, then gcc and clang.
_NARROWING = (_ZIG_FLAGS, ("-march=armv8-a" if platform.machine() in ("aarch64", "arm64") else "-march=x86-64",))
_PROBE_TIMEOUT = 120  # the first run of zig builds its runtime libraries, a minute on a slow machine
_VERSION_TIMEOUT = 20


@dataclass(frozen=True)
class Candidate:
    """A compiler that may or may not work: where its name came from, and the command (absolute where found)."""

    origin: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Compiler:
    """A compiler that passed the probe.

    Attributes:
        argv: the command without flags, for example ``("/usr/bin/g++",)``.
        kind: "gcc" or "clang"; says which dialect of inline assembly and which work-arounds a template needs.
        version: the compiler's own ``__VERSION__``.
        identity: what tells its output from another compiler's: kind, first line of ``--version``, machine, C
            library and the arguments that are part of ``argv``. Does not hold the path of the compiler.
    """

    argv: tuple[str, ...]
    kind: str
    version: str
    identity: str


def candidates() -> tuple[Candidate, ...]:
    """The compilers to try, best first: ``AWQJIT_CXX`` alone if set, else ``CXX``, g++, clang++, ziglang.

    Nothing is started. Names found on ``PATH`` are made absolute, because a compiler runs in the build directory.
    """
    forced = config.CXX.read()
    if forced:
        return (Candidate("AWQJIT_CXX", _for_any_cpu(_split(forced))),)
    found = []
    if os.environ.get("CXX", "").strip():
        found.append(Candidate("CXX", _for_any_cpu(_split(os.environ["CXX"].strip()))))
    found += [Candidate(name, _split(name)) for name in ("g++", "clang++")]
    if importlib.util.find_spec("ziglang") is not None:
        found.append(Candidate("ziglang", (sys.executable, *_ZIG)))
    return tuple(found)


def find_compiler() -> Compiler:
    """The first candidate that works. The answer, also the negative one, is kept for this process and environment.

    Raises:
        NoCompilerError: none works; one reason per candidate. A compiler named by ``AWQJIT_CXX`` is the only
            candidate: it is never replaced by another one.
    """
    key = (config.CXX.read(), os.environ.get("CXX"), os.environ.get("PATH"), os.environ.get("TMPDIR"))
    found = _found.get(key)
    if found is None:
        with _lock():
            found = _found.get(key)
            if found is None:
                found = _found[key] = _first_working(candidates())
    if isinstance(found, Compiler):
        return found
    raise NoCompilerError(found)


def survey() -> tuple[tuple[Candidate, Compiler | str], ...]:
    """Every candidate with the compiler it proves to be, or why it is not used. Tried afresh, up to a success."""
    found: list[tuple[Candidate, Compiler | str]] = []
    working: Candidate | None = None
    for candidate in candidates():
        if working is not None:
            found.append((candidate, f"not tried: {working.origin} works"))
            continue
        try:
            found.append((candidate, _probe(candidate)))
            working = candidate
        except _ProbeError as error:
            found.append((candidate, str(error)))
    return tuple(found)


def forget() -> None:
    """Forget what :func:`find_compiler` found, for example after a compiler was installed."""
    _found.clear()


def is_there(compiler: Compiler) -> bool:
    """Whether a compiler that was found can still be started: an upgrade or a purge may have taken it away."""
    return shutil.which(compiler.argv[0]) is not None


def neutral_command(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The compile command without anything of this machine: ``c++ FLAGS kernel.cpp -o kernel.so -lm``.

    Args:
        flags: what the kernel needs beyond :data:`BASE_FLAGS`, which are put before it.
    """
    return _command(("c++",), flags, "kernel.cpp", PRODUCT)


def relative_command(compiler: Compiler, flags: tuple[str, ...], source: Path, output: Path) -> tuple[str, ...]:
    """The same command as it is run: in the directory of both files."""
    return _command(compiler.argv, flags, source.name, output.name)


def absolute_command(compiler: Compiler, flags: tuple[str, ...], source: Path, output: Path) -> tuple[str, ...]:
    """The same command for a person: can be run again from any directory."""
    return _command(compiler.argv, flags, os.path.abspath(source), os.path.abspath(output))


def compile_shared(
    compiler: Compiler, source: Path, flags: tuple[str, ...], output: Path, timeout: float, name: str | None = None
) -> str:
    """Compile one C++ file into a shared library. The same source and flags give the same bytes in any directory.

    The compiler runs in the source's directory with relative file names, without standard input, with ``LC_ALL=C``
    and its temporary files below that directory. It and all it started are killed after ``timeout`` and when this
    thread is interrupted.

    Args:
        compiler: from :func:`find_compiler`.
        source: the C++ file.
        flags: what the kernel needs beyond :data:`BASE_FLAGS`.
        output: the shared library to write, in the directory of ``source``.
        timeout: seconds.
        name: what the error calls the kernel; by default the file's stem.

    Returns:
        What the compiler printed (warnings), at most the first megabyte.

    Raises:
        ArgumentError: ``output`` is in another directory.
        CompileError: the compiler could not be started, failed, took too long or wrote no library.
        OSError: the directory of ``source`` cannot be written.
    """
    if output.parent != source.parent:
        raise ArgumentError("output", output, f"a file in {source.parent}, where the compiler runs")
    command = relative_command(compiler, flags, source, output)
    failure, log = child.run(command, source.parent, timeout, _variables(compiler.argv))
    if failure is None and not (output.is_file() and output.stat().st_size > 0):
        failure = "error: the compiler reported success but wrote no shared library"
    if failure is not None:
        shown = absolute_command(compiler, flags, source, output)
        raise CompileError(name or source.stem, shown, str(source), "\n".join(part for part in (log, failure) if part))
    return log


def file_stamp(argv: tuple[str, ...]) -> str | None:
    """Tells one compiler's file from another's without starting it: path, size, time of change, C library.

    Args:
        argv: the compiler's command.

    Returns:
        None for a command with arguments, zig's excepted: its first word need not be what compiles.
    """
    zig = argv == (sys.executable, *_ZIG)
    if len(argv) != 1 and not zig:
        return None
    try:
        real = os.path.realpath(_zig_executable() if zig else argv[0])
        status = os.stat(real)
    except OSError:
        return None
    arguments = f"|{shlex.join(argv[1:])}" if zig else ""
    return f"{real}|{status.st_size}|{status.st_mtime_ns}|{_libc()}{arguments}"


def likely_stamp() -> str | None:
    """The :func:`file_stamp` of the compiler that :func:`find_compiler` tries first. Starts nothing."""
    for candidate in candidates():
        if shutil.which(candidate.argv[0]) is not None:
            return file_stamp(candidate.argv)
    return None


_found: dict[tuple[str | None, ...], Compiler | tuple[str, ...]] = {}
_locks: dict[int, threading.Lock] = {}


def _zig_executable() -> str:
    """The program of the ziglang package, which imports nothing.

    Raises:
        OSError: there is no such package.
    """
    found = importlib.util.find_spec("ziglang")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("ziglang")
    return os.path.join(found.submodule_search_locations[0], "zig")


def _variables(argv: tuple[str, ...]) -> dict[str, str]:
    """Environment variables a compiler needs.

    zig compiles its run-time library once, for seconds, and keeps it below the home directory, which may be read-only
    or another user's. Kernels need it too, so it is kept where they are.
    """
    if argv[1:] != _ZIG:
        return {}
    kept = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(_zig_cache())
    return {"ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": os.path.join(child.SCRATCH, "zig")}


def _zig_cache() -> Path:
    for place in places.places():
        if place.baked or not (place.trusted and place.writable):
            continue
        path = place.path / "zig"
        try:
            place.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue  # places tell only what permissions tell
        if not places.distrust(path):
            return path
    path = places.private_directory() / "zig"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _command(argv: tuple[str, ...], flags: tuple[str, ...], source: str, output: str) -> tuple[str, ...]:
    return (*argv, *BASE_FLAGS, *flags, source, "-o", output, *LIBRARIES)


def _lock() -> threading.Lock:
    """A lock of this process: one taken in a parent would stay locked in a forked child for ever."""
    return _locks.setdefault(os.getpid(), threading.Lock())


def _split(text: str) -> tuple[str, ...]:
    """A compiler's setting as a command: one existing file (its path may hold spaces), or a shell-like line."""
    whole = os.path.expanduser(text)
    if os.path.isfile(whole):
        return (os.path.abspath(whole),)
    try:
        name, *arguments = shlex.split(text)
    except ValueError:
        return (text,)
    name = os.path.expanduser(name)
    return (os.path.abspath(shutil.which(name) or name) if os.sep in name else shutil.which(name) or name, *arguments)


def _for_any_cpu(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command with what zig has to be told; other compilers' commands as they are."""
    zig = "zig" in os.path.basename(argv[0]) or "ziglang" in argv
    if not (zig and "c++" in argv[1:]):
        return argv
    return (*argv, *(flag for flag in _ZIG_FLAGS if flag not in argv))


def _first_working(tried: tuple[Candidate, ...]) -> Compiler | tuple[str, ...]:
    reasons = []
    for candidate in tried:
        try:
            return _probe(candidate)
        except _ProbeError as error:
            reasons.append(f"{_described(candidate)}: {error}")
    return tuple(reasons)


def _described(candidate: Candidate) -> str:
    if candidate.origin in (config.CXX.name, "CXX"):
        return f"{candidate.origin}={shlex.join(candidate.argv)}"
    if candidate.argv == (candidate.origin,):
        return candidate.origin
    return f"{candidate.origin} ({shlex.join(candidate.argv)})"


class _ProbeError(Exception):
    pass


# Caches are shared between CPUs, and all rows owe the same bits: only a row's own flags say what its code may use.
_FORBIDDEN = re.compile(
    r"-(march|mcpu|mtune)=(?!baseline$)|-m(avx|sse|fma|f16c|amx|bmi)|-Ofast"
    r"|-f(fast-math|unsafe-math|associative-math|reciprocal-math|finite-math|fp-contract=(?!off))"
)


def _probe(candidate: Candidate) -> Compiler:
    if candidate.origin in ("AWQJIT_CXX", "CXX"):
        refused = [argument for argument in candidate.argv[1:] if _FORBIDDEN.match(argument)]
        if refused:
            raise _ProbeError(
                f"{' '.join(refused)} would change which CPUs a kernel runs on, or its sums: leave it out"
            )
    if shutil.which(candidate.argv[0]) is None:
        named = candidate.origin in (config.CXX.name, "CXX")
        raise _ProbeError("not found, or not an executable file" if named else "not found")
    try:
        scratch = places.loadable_directory(places.places())
    except OSError as error:
        raise _ProbeError(f"no temporary directory to try it in ({error}); set TMPDIR") from None
    try:
        return _probe_in(scratch, candidate)
    except OSError as error:
        raise _ProbeError(f"cannot be tried in {scratch}: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _probe_in(scratch: Path, candidate: Candidate) -> Compiler:
    compiler, wide = _tried(scratch, candidate.argv)
    for flags in _NARROWING if wide else ():
        try:
            compiler, wide = _tried(scratch, (*candidate.argv, *flags))
        except _ProbeError:
            continue  # it does not know the flag
        if not wide:
            break
    if wide:
        told = " nor ".join(flags[-1] for flags in _NARROWING)
        raise _ProbeError(f"compiles for more than every CPU has, and neither {told} makes it stop")
    return compiler


def _tried(scratch: Path, argv: tuple[str, ...]) -> tuple[Compiler, bool]:
    """The compiler, and whether it allows instructions that it was not told to allow."""
    failure, text = child.run((*argv, "--version"), scratch, _VERSION_TIMEOUT, _variables(argv))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if failure is not None or not lines:
        raise _ProbeError(f"--version: {failure or 'printed nothing'}")
    # A library is loaded once under one name.
    work = Path(tempfile.mkdtemp(dir=scratch))
    source, library = work / "probe.cpp", work / "probe.so"
    source.write_text(_PROBE, encoding="utf-8")
    trial = Compiler(argv, "", "", "")
    try:
        compile_shared(trial, source, (), library, _PROBE_TIMEOUT)
    except CompileError as error:
        raise _ProbeError(error.first_error) from None
    try:
        loaded = ctypes.CDLL(str(library))
        loaded.awqjit_probe_version.restype = ctypes.c_char_p
        kind = _KINDS.get(loaded.awqjit_probe(41) - 41)
        version = loaded.awqjit_probe_version().decode("utf-8", "replace")
        wide = bool(loaded.awqjit_probe_wide())
    except (OSError, AttributeError) as error:
        raise _ProbeError(f"what it builds in {scratch.parent} cannot be loaded: {error}") from None
    if kind is None:
        raise _ProbeError("neither gcc nor clang")
    identity = "|".join((kind, lines[0], platform.machine(), _libc(), shlex.join(argv[1:])))
    return Compiler(argv, kind, version, identity), wide


def _libc() -> str:
    """For example "glibc 2.36". A library built against a newer one may need symbols an older one lacks."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""
