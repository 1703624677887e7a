# SPDX-License-Identifier: Apache-2.0
"""How many compilers run at once: no more than cores, quotas, memory and AWQJIT_JOBS allow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compilers
import pytest

from awqjit import jit, slots
from awqjit.errors import ConfigError
from awqjit.slots import COMPILER_BYTES, Limits, limits
from awqjit.spec import Problem

needs_compiler = pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
PATIENCE = 100.0

COMMON = """
import atexit, os, sys, threading, time
from awqjit import jit
from awqjit.spec import Problem

def problem(n=16):
    return Problem(64, n, 32, "fp32", "fp32", symmetric=False, bias=False, act_bits=16)

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

started = sys.argv[1]
"""


def problem(n: int = 16) -> Problem:
    return Problem(64, n, 32, "fp32", "fp32", symmetric=False, bias=False, act_bits=16)


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "cold"))
    return tmp_path / "cold"


def storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Eight threads want a kernel each, at once; how many compilers ran at each start of one."""
    log = tmp_path / "log"
    body = f'echo + >> "{log}"; sleep 0.2; "$REAL" "$@" -O0; code=$?; echo - >> "{log}"; exit $code'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    start = threading.Barrier(8)

    def one(n: int) -> str:
        start.wait()
        return jit.choose(problem(16 * n)).origin

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(1, 9))) == {"built"}
    running, seen = 0, []
    for event in log.read_text().split():
        running += 1 if event == "+" else -1
        seen.append(running)
    return seen


@needs_compiler
def test_a_storm_of_threads_starts_no_more_compilers_than_there_are_cores(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(storm(tmp_path, monkeypatch)) <= slots.usable_cores()


@needs_compiler
def test_the_variable_bounds_a_storm(cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_JOBS", "1")
    assert max(storm(tmp_path, monkeypatch)) == 1


@needs_compiler
def test_too_little_memory_for_two_compilers_is_enough_for_one(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "limits", lambda: Limits(cores=8, quota=None, memory=COMPILER_BYTES // 2))
    assert max(storm(tmp_path, monkeypatch)) == 1


def test_the_variable_overrides_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "limits", lambda: Limits(cores=8, quota=2.5, memory=3 * COMPILER_BYTES))
    assert slots.most() == 2
    monkeypatch.setattr(slots, "limits", lambda: Limits(cores=8, quota=None, memory=3 * COMPILER_BYTES + 1))
    assert slots.most() == 3
    monkeypatch.setattr(slots, "limits", lambda: Limits(cores=8, quota=0.2, memory=0))
    assert slots.most() == 1
    monkeypatch.setattr(slots, "limits", lambda: Limits(cores=8, quota=None, memory=None))
    assert slots.most() == 8
    monkeypatch.setenv("AWQJIT_JOBS", "30")
    assert slots.most() == 30
    monkeypatch.setenv("AWQJIT_JOBS", "none")
    with pytest.raises(ConfigError, match="AWQJIT_JOBS"):
        slots.most()


MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_limits_of_cgroups_count_those_above_included(tmp_path: Path) -> None:
    second = tree(
        tmp_path / "2",
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user/job/memory.max": "max\n",
            "sys/fs/cgroup/user/job/memory.current": "1\n",
            "sys/fs/cgroup/user/memory.max": "1000000000\n",
            "sys/fs/cgroup/user/memory.current": "900000000\n",
            "sys/fs/cgroup/user/memory.stat": "anon 5\ninactive_file 300000000\nactive_file 7\n",
        },
    )
    assert limits(second) == Limits(slots.usable_cores(), 1.5, 400_000_000)
    first = tree(
        tmp_path / "1",
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
            # In a container the files are those of the container, whose path on the host is not there.
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1500000000\n",
            "sys/fs/cgroup/memory/memory.stat": "cache 9\ntotal_inactive_file 1000\n",
        },
    )
    assert limits(first) == Limits(slots.usable_cores(), 0.5, 500_001_000)
    free = tree(
        tmp_path / "free",
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert limits(free) == Limits(slots.usable_cores(), None, 8_000_000 * 1024)
    assert limits(tmp_path / "no linux") == Limits(slots.usable_cores(), None, None)


def test_unreadable_limits_are_no_limits(tmp_path: Path) -> None:
    odd = tree(
        tmp_path,
        {
            "proc/meminfo": "nothing\n",
            "proc/self/cgroup": "garbage\n\n0::/../..\n::\n",
            "sys/fs/cgroup/cpu.max": "much\n",
            "sys/fs/cgroup/memory.max": "1e9\n",
            "sys/fs/cgroup/memory.stat": "one two three\n",
        },
    )
    assert limits(odd) == Limits(slots.usable_cores(), None, None)


def test_this_machine_has_limits() -> None:
    here = limits()
    assert here.cores >= 1
    if Path("/proc/meminfo").exists():
        assert here.memory is not None
        assert here.memory > 0


ONE_CORE = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from awqjit import slots
sys.path.insert(0, sys.argv[2])
from test_fork_threads import X, layer

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
layer()(X)
print(slots.usable_cores(), slots.most(), torch.get_num_threads(), threads() - before)
"""


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_a_process_that_may_run_on_one_core_takes_one_thread_and_one_compiler() -> None:
    """The affinity is set before torch starts, as taskset, cpusets and batch systems do."""
    script = "import os, sys\n" + ONE_CORE
    done = subprocess.run(
        [sys.executable, "-c", script, "", str(Path(__file__).parent)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "1", "0"]


@needs_compiler
def test_an_interrupted_warm_up_starts_no_more_compilers(
    cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.touch()
    body = f'echo + >> "{log}"; sleep 1'
    monkeypatch.setenv("AWQJIT_CXX", str(compilers.kernel_script(tmp_path / "g++", body)))
    script = (
        "import awqjit, signal\n"
        # A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "threading.Thread(target=lambda: (wait_for(started + '2'), os.kill(os.getpid(), 2)), daemon=True).start()\n"
        "awqjit.warm([problem(16 * n) for n in range(1, 30)], jobs=1, show_progress=False)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", COMMON + script, str(log)], stderr=subprocess.PIPE, text=True)
    until(lambda: log.read_text(), "no compiler was started")
    Path(f"{log}2").touch()
    _, errors = child.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in errors
    assert len(log.read_text().split()) < 10
