# SPDX-License-Identifier: Apache-2.0
"""Running a compiler: bounded in time and output, and never left behind."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

SCRATCH = "tmp"
"""The directory of a program's temporary files, below the one it runs in; removed when it ends."""

MAX_LOG = 1 << 20
"""Bytes of a program's output that are kept; a program that writes 16 times as much is stopped."""

# Variables that make a compiler write files of its own or change its options behind the command line, and
# libraries preloaded into this process (allocators, sanitizers) that are none of the compiler's business.
_DROPPED = (
    "LANGUAGE",
    "LD_PRELOAD",
    "CCC_OVERRIDE_OPTIONS",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "GCC_COMPARE_DEBUG",
)


def run(
    argv: tuple[str, ...], directory: Path, timeout: float, variables: Mapping[str, str] | None = None
) -> tuple[str | None, str]:
    """Run a program in a directory, without standard input, in English, its temporary files below that directory.

    Args:
        argv: the program and its arguments.
        directory: its working directory.
        timeout: seconds until it and all it started (of its process group) are killed.
        variables: environment variables to add.

    Returns:
        What went wrong, None if nothing did, and what it printed: at most :data:`MAX_LOG` bytes.

    Raises:
        OSError: ``directory`` cannot be written.
    """
    scratch = directory / SCRATCH
    scratch.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    environment |= {"LC_ALL": "C", "TMPDIR": str(scratch), **(variables or {})}
    failure: str | None = None
    with _log_file(scratch) as output:
        try:
            process = subprocess.Popen(
                argv,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"error: cannot start {argv[0]}: {error}", ""
        with _stopped_at_exit(process):
            failure = _wait(process, output.fileno(), timeout)
        output.seek(0)
        log = output.read(MAX_LOG).decode("utf-8", "replace").rstrip()
    shutil.rmtree(scratch, ignore_errors=True)
    return failure, log


def _log_file(directory: Path) -> BinaryIO:
    """Where a program's output goes, deleted when closed.

    A file, not a pipe: a background process that keeps a pipe open would keep us waiting. In memory where the system
    has that: a full disk must not swallow the message that says so.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return open(os.memfd_create("log"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile(dir=directory))


_running: dict[subprocess.Popen[bytes], int] = {}
"""Programs that a thread waits for -> the process (a forked child has a copy of the table) that started them."""
_ending = False


@contextmanager
def _stopped_at_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Do not leave a program behind when the interpreter ends: a daemon thread gets no chance to stop what it started.

    Raises:
        SystemExit: the interpreter has begun to end; in daemon threads only, whose end it is.
    """
    _running[process] = os.getpid()
    try:
        yield
    finally:
        _running.pop(process, None)
        if _ending and threading.current_thread().daemon:
            raise SystemExit


@atexit.register
def _stop_all() -> None:
    global _ending
    _ending = True
    for process, owner in tuple(_running.items()):
        if owner == os.getpid():
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], output: int, timeout: float) -> str | None:
    """Wait for a program's end; None, or why it failed. Never leaves it running, whatever is raised here."""
    deadline, pause, stopped = time.monotonic() + timeout, 0.001, None
    try:
        while process.poll() is None and stopped is None:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            if time.monotonic() > deadline:
                stopped = (
                    f"error: stopped after {timeout:g} s (AWQJIT_COMPILE_TIMEOUT limits the compilation of a kernel)"
                )
            elif os.fstat(output).st_size > 16 * MAX_LOG:
                stopped = f"error: stopped after printing more than {16 * MAX_LOG >> 20} MiB"
    finally:
        _kill(process)
    if stopped is not None:
        return stopped
    if process.returncode < 0:
        return f"error: the compiler was killed by signal {-process.returncode}; is there too little memory?"
    return None if process.returncode == 0 else f"error: exit status {process.returncode}"
