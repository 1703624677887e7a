# SPDX-License-Identifier: Apache-2.0
"""A problem and a target become SYCL text, one source a kernel: the same arguments always give the same text."""

from __future__ import annotations

from dataclasses import replace

from awqjit.layout import BLOCK
from awqjit.render import _environment
from awqjit.spec import Problem
from awqjit.version import __version__
from awqjit.weight import ceil_div
from awqjit.xpu.spec import (
    DECODE,
    EXACT_ROWS,
    PREFILL,
    QUANTISE,
    XpuKernel,
    XpuTarget,
    check_served,
    rows_of,
    shape_of,
    uses_sums,
    whole_fragments,
)

OPTIONS: tuple[str, ...] = ("-ffp-contract=off", "-fno-fast-math")
"""Compiler options of every kernel: what is written is what is computed."""

_TYPES: dict[str, str] = {
    "x": "const X *",
    "weight": "const Words *",
    "scales": "const Scale *",
    "zeros": "const uint8_t *",
    "bias": "const float *",
    "m": "int64_t ",
    "x_stride": "int64_t ",
}
_WRITTEN: dict[str, str] = {"xq": "int8_t *", "xd": "float *", "xsum": "int *"}
"""Temporaries: quantise writes them, the other kernels take them as constant."""


def kernels(problem: Problem, target: XpuTarget) -> tuple[XpuKernel, ...]:
    """Every kernel of a problem: quantise (w4a8), decode, prefill.

    Raises:
        ArgumentError: the target refuses the problem, see :func:`awqjit.xpu.spec.refusal`.
    """
    check_served(problem, target)
    multiply = (_multiply(problem, target, DECODE), _multiply(problem, target, PREFILL))
    return multiply if problem.act_bits == 16 else (_quantise(problem, target), *multiply)


def _multiply(problem: Problem, target: XpuTarget, name: str) -> XpuKernel:
    tiled = target.leaf is not None and name == PREFILL
    if problem.act_bits == 16:
        activations: tuple[str, ...] = ("x", "x_stride", "m")
    else:
        activations = ("xq", "xd", *(("xsum",) if uses_sums(problem, target) else ()), "m")
    packed = ("weight", "scales", *(() if problem.symmetric else ("zeros",)), *(("bias",) if problem.bias else ()))
    if target.leaf is None:
        parts: tuple[str, ...] = ("columns.h.jinja", "group_scalar.h.jinja")
    else:
        parts = ("leaf.h.jinja", "columns.h.jinja", "operands.h.jinja", *(() if tiled else ("group_matrix.h.jinja",)))
    return _kernel(
        problem,
        target,
        name,
        parts=parts,
        body="prefill.sycl.jinja" if tiled else "split_k.sycl.jinja",
        arguments=(*activations, *packed, "y"),
        title=f"{problem.slug} on {target.slug}, {name}",
        n=problem.n,
        scale_dtype=problem.scale_dtype,
    )


def _quantise(problem: Problem, target: XpuTarget) -> XpuKernel:
    # What it does not depend on is left out, so that layers that share a width of x share its kernel.
    sums = uses_sums(problem, target)
    problem = replace(problem, n=1, scale_dtype="fp32", symmetric=not sums, bias=False)
    return _kernel(
        problem,
        target,
        QUANTISE,
        parts=("rounding.h.jinja",),
        body="quantise_rows.sycl.jinja" if target.leaf is None else "quantise_tiles.sycl.jinja",
        arguments=("x", "x_stride", "m", "xq", "xd", *(("xsum",) if sums else ())),
        title=f"{problem.x_dtype} x, k{problem.k}, g{problem.group_size} to int8 on {target.slug}",
        n=None,
        scale_dtype=None,
    )


def _kernel(
    problem: Problem,
    target: XpuTarget,
    name: str,
    *,
    parts: tuple[str, ...],
    body: str,
    arguments: tuple[str, ...],
    title: str,
    n: int | None,
    scale_dtype: str | None,
) -> XpuKernel:
    types = _TYPES | {temporary: kind if name == QUANTISE else f"const {kind}" for temporary, kind in _WRITTEN.items()}
    rows = 1 if name == QUANTISE else rows_of(problem, target, name)
    source = (
        _environment()
        .get_template("xpu/kernel.sycl.jinja")
        .render(
            version=__version__,
            title=title,
            options=OPTIONS,
            name=name,
            parts=parts,
            body=body,
            arguments=arguments,
            types=types | {"y": "X *"},
            ragged=name != PREFILL,
            shape=shape_of(problem, target),
            lanes=target.lanes,
            leaf=target.leaf,
            rows=rows,
            k=problem.k,
            n=n,
            n_padded=ceil_div(problem.n, BLOCK) * BLOCK,
            group_size=problem.group_size,
            groups=problem.groups,
            whole_fragments=whole_fragments(problem),
            exact_rows=EXACT_ROWS,
            quantise_subgroups=shape_of(problem, target).quantise_subgroups,
            x_dtype=problem.x_dtype,
            scale_dtype=scale_dtype,
            symmetric=problem.symmetric,
            bias=problem.bias,
            act_bits=problem.act_bits,
        )
    )
    return XpuKernel(name, source, OPTIONS, arguments, _alignment(problem, target, name) if "x" in arguments else 1)


def _alignment(problem: Problem, target: XpuTarget, name: str) -> int:
    """Elements that a kernel loads from x at a time."""
    if target.leaf is not None:
        return 4 if problem.k % 4 == 0 else 1
    return 8 if name != QUANTISE and problem.k % 8 == 0 else 1
