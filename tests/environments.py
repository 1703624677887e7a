# SPDX-License-Identifier: Apache-2.0
"""Which test file runs in which tox environment. Each belongs to exactly one; ``pytest --environment NAME`` runs one.

Imports nothing but the standard library: tests/conftest.py reads it before anything is collected.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

FOLDER = Path(__file__).parent

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    # what every change has to pass: data, layout, selection, operators, cache, command line, documents
    "core": (
        "test_architecture.py",
        "test_benchmark*.py",
        "test_cache.py",
        "test_cache_bake.py",
        "test_cache_commands.py",
        "test_cli*.py",
        "test_config.py",
        "test_dispatcher*.py",
        "test_docs.py",
        "test_environments.py",
        "test_fragments*.py",
        "test_fuzz_ops.py",
        "test_info.py",
        "test_jit*.py",
        "test_layout*.py",
        "test_machine.py",
        "test_modules*.py",
        "test_no_compiler.py",
        "test_ops*.py",
        "test_packaging.py",
        "test_packer*.py",
        "test_pages.py",
        "test_reference.py",
        "test_render.py",
        "test_select.py",
        "test_slots.py",
        "test_toolchain*.py",
        "test_records*.py",
        "test_tiles*.py",
        "test_tun*.py",
        "test_warm_start.py",
        "test_weight.py",
    ),
    # every kernel row that this machine can run or emulate, built by gcc and by clang
    "rows": (
        "test_aarch64*.py",
        "test_kernels*.py",
        "test_machine_code.py",
        "test_numba*.py",
        "test_rows_x86.py",
        "test_sanitizers.py",
    ),
    # the AMX rows, in an emulator of the tile instructions
    "amx": ("test_amx*.py",),
    # killed builders, broken disks and compilers, forks, exits, leaks: many processes, little computing
    "faults": (
        "test_cache_damage.py",
        "test_cache_faults.py",
        "test_cache_processes.py",
        "test_compiler_faults.py",
        "test_exit*.py",
        "test_fork_threads.py",
        "test_memory.py",
        "test_places_faults*.py",
    ),
    # checkpoints, quantization, whole models in other libraries
    "integrations": (
        "test_evaluate.py",
        "test_fixtures.py",
        "test_compiled*.py",
        "test_folder_faults.py",
        "test_format*.py",
        "test_fusion*.py",
        "test_fuzz_formats.py",
        "test_loader*.py",
        "test_quantize*.py",
        "test_smollm2*.py",
        "test_torch_compile*.py",
        "test_transformers*.py",
    ),
    # LoRA, with the packages it needs
    "peft": ("test_peft*.py",),
    # Intel GPUs' kernels, run on the CPU: Intel's SYCL device for CPUs, Triton's interpreter
    "xpu": ("test_triton*.py", "test_xpu*.py"),
    # the plugin in vLLM, which brings its own torch
    "vllm": ("test_vllm*.py",),
}
"""Environment -> patterns of file names, one line a group of files."""


def environments_of(name: str) -> list[str]:
    """The environments that claim a test file, by its name: one, or the table is wrong."""
    return [
        environment
        for environment, patterns in ENVIRONMENTS.items()
        if any(fnmatch(name, pattern) for pattern in patterns)
    ]
