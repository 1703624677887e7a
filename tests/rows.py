# SPDX-License-Identifier: Apache-2.0
"""The kernel rows this machine can run, and a bounded pool of problems: each costs a row one compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from strategies import SHAPES, RawWeight, Shape
from torch import Tensor

from awqjit import config, machine, ops, select
from awqjit.layout import PackedWeight, pack
from awqjit.ops import matmul
from awqjit.target import TARGETS, Target, target

AVX_VNNI_EVEX = replace(
    target("avx_vnni"),
    name="avx_vnni_evex",
    features=frozenset({"avx2", "fma", "f16c", "avx512vl", "avx512_vnni"}),
    flags=("-mavx2", "-mfma", "-mf16c", "-mavx512vl", "-mavx512vnni"),
)
"""The row avx_vnni in another encoding of the same instructions, for the tests alone: CPUs with AVX512-VNNI but without
AVX-VNNI run its source, word for word, this way. tests/test_machine_code.py looks at the row as it is."""

TESTED = (*TARGETS, AVX_VNNI_EVEX)
_TABLE = (*select.ROWS[:-1], select._compiled(AVX_VNNI_EVEX), select.ROWS[-1])

COMPILED = tuple(
    (row.name, bits) for row in TESTED if machine.detect().missing(row.features) is None for bits in row.act_bits
)
"""(row, act_bits) of every compiled row whose features this machine has."""

COMPILERS = ("gcc", "clang")
"""Every compiled row is built by both, whichever of them a user's machine would find first."""

BUILT = tuple((row, bits, kind) for row, bits in COMPILED for kind in COMPILERS)
"""(row, act_bits, compiler) of every kernel to test."""

NUMBA = tuple(("numba", bits, "none") for bits in (16, 8) if machine.detect().no_numba is None)

ALL = (*BUILT, *NUMBA, ("torch", 16, "none"), ("torch", 8, "none"))
"""The same with the rows that no C++ compiler builds."""


@dataclass(frozen=True)
class Case:
    """What a kernel is compiled for, beside its row and mode."""

    shape: Shape
    x_dtype: torch.dtype
    scale_dtype: torch.dtype
    symmetric: bool
    bias: bool

    def __str__(self) -> str:
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        flags = f"{'sym' if self.symmetric else 'asym'}{'-bias' if self.bias else ''}"
        return (
            f"{self.shape.k}x{self.shape.n}g{self.shape.group}-{names[self.x_dtype]}-s{names[self.scale_dtype]}-{flags}"
        )


_DTYPES = (torch.bfloat16, torch.float32, torch.float16)

# Every shape with two of the three dtypes of x, every pair of dtypes, and symmetric, asymmetric, with and without bias.
CASES = tuple(
    Case(
        shape=shape,
        x_dtype=_DTYPES[(i + j) % 3],
        scale_dtype=_DTYPES[(i // 3 + 2 * j) % 3],
        symmetric=(i + j) % 3 == 2,
        bias=(i + 3 * j) % 2 == 0,
    )
    for i, shape in enumerate(SHAPES)
    for j in range(2)
)

OTHER_COMPILER_CASES = CASES[8], CASES[11], CASES[15]
"""Groups shorter than a word, one long group, a short last group; one dtype of x each."""


def target_of(row: str) -> Target:
    """The target of a compiled row, those that exist for the tests alone among them."""
    return next(one for one in TESTED if one.name == row)


@contextmanager
def forced(row: str, compiler: str | None = None) -> Iterator[None]:
    """Let nothing but ``row`` run, as ``AWQJIT_KERNEL`` does for a user, built by ``compiler`` (``AWQJIT_CXX``)."""
    with mock.patch.object(select, "ROWS", _TABLE), config.override(kernel=row, cxx=compiler):
        ops.forget()
        try:
            yield
        finally:
            ops.forget()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch.empty give NaN and all-ones bytes: an output or scratch byte that is never written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mm(x: Tensor, packed: PackedWeight, bias: Tensor | None, act_bits: int) -> Tensor:
    """The operator on a packed weight, in Python: torch.empty then gives what a kernel writes (see poisoned_memory)."""
    return matmul.int4_mm(
        x,
        packed.weight,
        packed.scales,
        packed.zeros,
        bias,
        packed.in_features,
        packed.out_features,
        packed.group_size,
        act_bits,
        packed.perm,
        packed.layout,
    )


def packed(weight: RawWeight) -> PackedWeight:
    return pack(weight.quantized())
