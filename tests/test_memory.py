# SPDX-License-Identifier: Apache-2.0
"""What stays in memory: nothing of a call or of a module that is gone, and of a kernel no more than its code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import compilers
import pytest

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc"),
    pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++"),
]

# In a process of its own: what else a test run allocates would drown a few kilobytes.
COMMON = """
import gc, json, os, sys
import torch
from awqjit import config, jit, launch, ops
from awqjit.modules import Int4Linear
from awqjit.weight import QuantizedWeight, pack_nibbles

torch.set_num_threads(2)
PAGE = os.sysconf("SC_PAGE_SIZE")
generator = torch.Generator().manual_seed(5)

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE

def growth(work, calls, windows):
    \"\"\"Bytes a call adds, in the best of several windows: a leak shows in every one of them, a page here and there
    that the allocator takes does not.\"\"\"
    work(calls // 5 + 1)
    found = []
    for _ in range(windows):
        before = resident()
        work(calls)
        found.append((resident() - before) / calls)
        if found[-1] < 50:
            break
    return min(found)

def weight(k=64, n=16, group=32):
    groups = -(-k // group)
    q = torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (groups, n), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(pack_nibbles(q), torch.rand(groups, n, generator=generator), zeros, group, k, n)

def layer(compute="w4a16"):
    return Int4Linear.from_quantized(weight(), compute=compute)
"""


def run(script: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_ten_thousand_calls_leave_nothing_behind() -> None:
    found = run(
        """
layers = [layer("w4a16"), layer("w4a8")]
inputs = [torch.randn(rows, 64, generator=generator) for rows in (1, 3, 40)]
inputs.append(torch.randn(64, 4, generator=generator).t())  # has to be copied
bad = torch.randn(2, 65)

def calls(count):
    with torch.no_grad():
        for i in range(count):
            layers[i % 2](inputs[i % 4])

def failures(count):
    for i in range(count):
        try:
            layers[0](bad)
        except ValueError:
            continue
        raise AssertionError

kept = []

def leak(count):
    for _ in range(count):
        kept.append(bytearray(150))

answers = {"call": growth(calls, 10_000, 4), "failure": growth(failures, 2_000, 4), "leak": growth(leak, 10_000, 2)}
print(json.dumps(answers))
"""
    )
    assert found["leak"] > 150  # what is measured would be seen
    assert found["call"] < 100
    assert found["failure"] < 100


def test_a_thousand_modules_made_saved_loaded_used_and_dropped_leave_nothing_behind() -> None:
    found = run(
        """
source = weight()
x = torch.randn(3, 64, generator=generator)
state = Int4Linear.from_quantized(source).state_dict()

def cycles(count):
    with torch.no_grad():
        for _ in range(count):
            module = Int4Linear.from_quantized(source)
            module.load_state_dict({name: value.clone() for name, value in state.items()})
            module(x)

print(json.dumps({"module": growth(cycles, 1_000, 4)}))
"""
    )
    assert found["module"] < 100


def test_forgetting_a_kernel_and_choosing_it_again_leaves_nothing_behind() -> None:
    """Its library stays mapped, once: a second look for the same file maps nothing more."""
    found = run(
        """
module = layer()
x = torch.randn(3, 64, generator=generator)

def mapped():
    with open("/proc/self/maps") as file:
        return sum("kernel.so" in line for line in file)

def cycles(count):
    with torch.no_grad():
        for _ in range(count):
            ops.forget()
            module(x)

cycles(1)
before = mapped()
bytes_each = growth(cycles, 300, 4)
print(json.dumps({"cycle": bytes_each, "mappings": mapped() - before}))
"""
    )
    assert found["mappings"] == 0
    assert found["cycle"] < 1000  # 300 cycles: less than the smallest piece the allocator takes from the system


def test_two_hundred_kernels_cost_their_mapped_code_and_little_else(tmp_path: Path) -> None:
    """Copies of one library under other names are as many libraries to the system, and take no compiler."""
    found = run(
        """
import shutil
from pathlib import Path

with config.override(kernel="portable"):
    module = layer()
    x = torch.randn(3, 64, generator=generator)
    wanted = module(x)
    (choice,) = jit.choices()
kernel = choice.kernel
copies = []
for i in range(201):
    folder = f"{sys.argv[1]}/{i}"
    os.mkdir(folder)
    copies.append(shutil.copy(kernel.path, folder))
kept = []

def use(paths):
    for path in paths:
        loaded = launch.CompiledKernel.load(kernel.spec, Path(path))
        y = loaded(x, module.packed_weight, module.packed_scales, module.packed_zeros, None)
        assert torch.equal(y, wanted)
        kept.append(loaded)

use(copies[:1])
before = resident()
use(copies[1:])
print(json.dumps({"each": (resident() - before) / 200, "file": os.path.getsize(kernel.path)}))
""",
        str(tmp_path),
    )
    # Each segment is rounded up to pages; the loader and ctypes keep some kilobytes of tables for each library.
    assert found["each"] < found["file"] + 32 * 1024
