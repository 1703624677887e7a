# SPDX-License-Identifier: Apache-2.0
"""Bugs to seed into the text of rendered SYCL kernels, the kinds that kernels have had elsewhere among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xpu_device import CASES, Case

from awqjit.xpu.spec import XpuKernel


@dataclass(frozen=True)
class Mutant:
    """One edit of one kernel.

    Attributes:
        name: what is wrong.
        case: the kernels it is seeded into.
        act_bits: their mode.
        kernel: the one that is edited.
        old, new: text that must occur exactly once, and what replaces it.
    """

    name: str
    case: Case
    act_bits: int
    kernel: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    def apply(self, kernel: XpuKernel) -> XpuKernel:
        if kernel.name != self.kernel:
            return kernel
        assert kernel.source.count(self.old) == 1, f"{self.old!r} occurs {kernel.source.count(self.old)} times"
        return replace(kernel, source=kernel.source.replace(self.old, self.new))


def _case(k: int, group: int, matrix: bool = True) -> Case:
    return next(case for case in CASES if (case.shape.k, case.shape.group, case.matrix) == (k, group, matrix))


SHORT, MANY, ONE = _case(264, 128), _case(1156, 128), _case(130, 130)  # a short last group; many groups; one group
WIDE = _case(576, 32, matrix=False)  # fp32, whose last bits no rounding hides
STRADDLING = _case(300, 100, matrix=False)  # groups that end inside a word, no matrix unit

TWICE = "fma(1.0f, (float)sum * (rows.xd[at] * column.scale), y)"

MUTANTS = (
    Mutant("dropped barrier", MANY, 8, "decode", "  sycl::group_barrier(item.get_group());\n", ""),
    Mutant("swapped lanes", SHORT, 16, "decode", "+ 4 * (lane % 8);", "+ 4 * ((lane ^ 1) % 8);"),
    Mutant("zero point of the neighbour", SHORT, 8, "decode", "zeros[at]}", "zeros[at ^ 1]}"),
    Mutant("scale of the first group", MANY, 8, "prefill", "return {widen(scales[at])", "return {widen(scales[n])"),
    Mutant("short tail", SHORT, 16, "decode", "? FRAGMENTS - first :", "? FRAGMENTS - first - 1 :"),
    Mutant("swapped halves of a word", MANY, 16, "prefill", "(16 * (i % 2) +", "(16 * (1 - i % 2) +"),
    Mutant("rows past the end stored", SHORT, 8, "prefill", "if (at < m && stored)", "if (stored)"),
    Mutant("columns past the end stored", SHORT, 16, "decode", "if (n < N) store", "store"),
    Mutant(
        "quotient not corrected",
        SHORT,
        8,
        "quantise",
        "return float_of(bits_of(quotient) + ((uint32_t)exponent << 23));",
        "return a * (1.0f / b);",
    ),
    Mutant("halves rounded away from zero", SHORT, 8, "quantise", "sycl::rint(", "sycl::round("),
    Mutant("NaN lost", SHORT, 8, "quantise", "if (amax >= INFINITE)", "if (amax == INFINITE)"),
    Mutant("group of subnormals used", SHORT, 8, "quantise", "if (amax < TINY)", "if (amax == 0)"),
    Mutant("neighbouring group's row", STRADDLING, 16, "decode", "k + i < high ?", "k + i <= high ?"),
    Mutant("read past the end of x", ONE, 16, "decode", "k + i < K ? at[i] : 0", "at[i]"),
    Mutant("a part of the group left out", ONE, 8, "decode", "of < SLICES; of++", "of < SLICES - 1; of++"),
    Mutant("sum rounded twice", WIDE, 8, "prefill", "fma((float)sum, rows.xd[at] * column.scale, y)", TWICE),
)
"""Sixteen. Each is right C++ and changes what is computed."""
