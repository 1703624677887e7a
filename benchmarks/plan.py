# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark measures: layers, batch sizes, rounds. Each section is a part of the result."""

from __future__ import annotations

from dataclasses import dataclass

SHAPES = ((3584, 18944), (18944, 3584), (4096, 4096), (896, 4864), (4864, 896), (1536, 8960))
"""(K, N): up and down projections of Qwen2 7B, 0.5B and 1.5B, and a square one."""

LARGE_SHAPES = SHAPES[:3]
BATCHES = (1, 2, 4, 5, 8, 12, 16, 32, 64, 128, 256, 1024)
FEW_BATCHES = (1, 4, 16, 64, 256, 1024)
EVERY_BATCH = (*range(1, 33), *range(36, 129, 4))
ONE_THREAD = ", 1 thread"
"""Behind a contender's name where it runs on one thread beside itself on all."""

ROTATE_BYTES = 300_000_000
"""Copies of one contender's weights together: no cache keeps a part of that from one use to the next."""


@dataclass(frozen=True)
class Section:
    """Cells that are measured alike.

    Attributes:
        name: ``peers``: everybody; ``sweep``: awqjit alone at many batch sizes; ``threads``: awqjit on all threads and
            on one.
        group: group size.
        dtype: of x: bf16, fp16 or fp32.
        shapes: (K, N) of each layer.
        batches: rows of x.
        rounds: that count, see :func:`benchmarks.rounds.time_cell`.
        seconds: of calls, for each contender in each round.
    """

    name: str
    group: int
    dtype: str
    shapes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    rounds: int
    seconds: float

    def __post_init__(self) -> None:
        if self.name not in ("peers", "sweep", "threads"):
            raise ValueError(f"Section.name is {self.name!r}: peers, sweep or threads")
        if self.rounds < 2 or self.seconds < 0:
            raise ValueError(f"{self.rounds} rounds of {self.seconds} s: at least 2, of at least 0 s")


# The result is written after each section, so what matters most comes first.
FULL: tuple[Section, ...] = (
    Section("peers", 128, "bf16", SHAPES, BATCHES, 11, 0.025),
    Section("threads", 128, "bf16", LARGE_SHAPES, (64, 256, 1024), 11, 0.05),
    Section("sweep", 128, "bf16", SHAPES, EVERY_BATCH, 5, 0.02),
    Section("peers", 64, "bf16", SHAPES, FEW_BATCHES, 9, 0.02),
    Section("peers", 32, "bf16", SHAPES, FEW_BATCHES, 9, 0.02),
    Section("peers", 128, "fp16", SHAPES, FEW_BATCHES, 9, 0.02),
    Section("peers", 128, "fp32", SHAPES, FEW_BATCHES, 9, 0.02),
)

QUICK: tuple[Section, ...] = (
    Section("peers", 128, "bf16", ((4096, 4096), (896, 4864)), (1, 4, 16, 256), 9, 0.012),
    Section("threads", 128, "bf16", ((4096, 4096),), (64,), 9, 0.02),
)
