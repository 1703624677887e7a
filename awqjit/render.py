# SPDX-License-Identifier: Apache-2.0
"""A KernelSpec becomes C++ text: the same spec always gives the same text."""

from __future__ import annotations

import shlex
import struct
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from awqjit.layout import BLOCK, NIBBLE_ROWS, packed_rows, padded_group_rows
from awqjit.spec import KernelSpec
from awqjit.target import Tile
from awqjit.toolchain import neutral_command
from awqjit.version import __version__

if TYPE_CHECKING:
    import jinja2

_JOB_BYTES = 16384  # weight bytes of one decode job: long enough to hide the shared counter, short enough to balance
_MIN_JOBS = 16  # but never so few jobs that threads stand idle


def _load(name: str) -> str | None:
    resource = files("awqjit.templates").joinpath(*name.split("/"))
    return resource.read_text(encoding="utf-8") if resource.is_file() else None


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2  # a tenth of a second that only those who compile should pay

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals["bf16_bits"] = _bf16_bits
    return environment


def _bf16_bits(value: int) -> str:
    """A small integer as the bits of a bf16, for example 1 -> 0x3f80. Exact for |value| <= 256."""
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0] >> 16:04x}"


def _cut(m: int, most: int) -> set[int]:
    """Sizes of the pieces when m rows are cut into as few nearly equal pieces of at most ``most`` rows as possible."""
    pieces = -(-m // most)
    return {m // pieces, -(-m // pieces)}


def _prefill_heights(tile: Tile) -> list[int]:
    """Every height of a register tile, when more rows than decode takes are cut into chunks and these into tiles."""
    first = tile.decode_limit + 1  # beyond two chunks more, the pieces are sizes that have occurred before
    chunks = {chunk for m in range(first, first + 2 * tile.row_chunk) for chunk in _cut(m, tile.row_chunk)}
    return sorted({height for chunk in chunks for height in _cut(chunk, tile.rows)})


def render(spec: KernelSpec) -> str:
    """The kernel's whole C++ source. Its head names the spec, the version and the command that compiles it."""
    problem, tile = spec.problem, spec.tile
    vocabulary = spec.target.vocabulary(problem.act_bits, problem.x_dtype)
    k, n, g = problem.k, problem.n, problem.group_size
    padded = padded_group_rows(k, g)
    last = k - (problem.groups - 1) * g
    rows = packed_rows(k, g)
    blocks = -(-n // BLOCK)
    # Of a matrix tile of 16 rows: the words of a column it holds, and how many of them a group takes.
    depth_words = min(16 // vocabulary.steps, padded // 8)
    last_padded = rows - (problem.groups - 1) * padded
    return (
        _environment()
        .get_template("cpu/kernel.cpp.jinja")
        .render(
            version=__version__,
            slug=spec.slug,
            command=shlex.join(neutral_command(spec.target.flags)),
            compute=problem.compute,
            target=spec.target.name,
            vocabulary=vocabulary.name,
            steps=vocabulary.steps,
            decode_chains=vocabulary.chains_for,
            narrow_words=vocabulary.narrow_words,
            tiled=vocabulary.tiled,
            depth_words=depth_words,
            depths=-(-padded // 8 // depth_words),
            last_depths=-(-last_padded // 8 // depth_words),
            tile=tile,
            prefill_heights=_prefill_heights(tile),
            k=k,
            n=n,
            groups=problem.groups,
            group_size=g,
            last_group=last,
            group_padded=padded,
            last_padded=last_padded,
            packed_rows=rows,
            column_blocks=blocks,
            decode_job=max(1, min(_JOB_BYTES // (rows * BLOCK // 2), blocks // _MIN_JOBS)),
            x_dtype=problem.x_dtype,
            scale_dtype=problem.scale_dtype,
            symmetric=problem.symmetric,
            bias=problem.bias,
            act_bits=problem.act_bits,
            # 127 * 15 is the largest product of an int8 activation and q - z.
            exact_fp32_sums=padded * 127 * 15 < 1 << 24,
        )
    )


def render_dispatcher() -> tuple[str, tuple[str, ...]]:
    """The C++ source of the operator's dispatcher, and the compiler flags it needs."""
    flags = ("-fexceptions",)  # Python's exceptions pass through it
    text = (
        _environment()
        .get_template("cpu/dispatcher.cpp.jinja")
        .render(version=__version__, command=shlex.join(neutral_command(flags)), tensor_impl_bytes=184)
    )
    return text, flags


def render_packer() -> str:
    """The C++ source that packs weights of every shape."""
    return (
        _environment()
        .get_template("cpu/pack.cpp.jinja")
        .render(version=__version__, command=shlex.join(neutral_command(())), block=BLOCK, order=NIBBLE_ROWS)
    )


def render_shim(wheel: str, command: str) -> str:
    """The C++ source of the library that lets Python call SYCL's run time, for one version of its wheel."""
    template = _environment().get_template("xpu/shim.cpp.jinja")
    return template.render(version=__version__, wheel=wheel, command=command)
