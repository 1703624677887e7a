# SPDX-License-Identifier: Apache-2.0
"""The tests of SYCL kernels find bugs: each of these is seeded into a kernel's text, built, run and caught."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from test_xpu_kernels import drawn
from xpu_device import Bench, check_everything
from xpu_host import needs_wheels
from xpu_mutants import MUTANTS, Mutant

from awqjit.xpu import device

EXAMPLES = 12


def examine(bench: Bench) -> None:
    """What the kernel tests do with a case."""

    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None)
    @given(**drawn(bench.case))
    def check(weight, x, bias) -> None:
        check_everything(bench, x, weight, bias)

    check()


@needs_wheels
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_seeded_bug_is_caught(mutant: Mutant) -> None:
    with device.cpu_as_xpu() as cpu:
        bench = Bench(cpu, mutant.case, mutant.act_bits, mutant.apply)
        with pytest.raises(AssertionError):
            examine(bench)


def test_at_least_ten_bugs_are_seeded_into_every_kernel_of_both_modes() -> None:
    assert len({mutant.name for mutant in MUTANTS}) >= 10
    assert {(mutant.kernel, mutant.act_bits) for mutant in MUTANTS} == {
        ("quantise", 8),
        *((kernel, bits) for kernel in ("decode", "prefill") for bits in (8, 16)),
    }
