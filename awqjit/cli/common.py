# SPDX-License-Identifier: Apache-2.0
"""What the commands share: options, tables, JSON."""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, Any, TextIO

import typer
from rich.table import Table

from awqjit.errors import AwqJitWarning


class Compute(str, Enum):
    """Compute modes."""

    w4a16 = "w4a16"
    w4a8 = "w4a8"


class Dtype(str, Enum):
    """Dtypes of activations."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    auto = "auto"


class Method(str, Enum):
    """How ``awqjit quantize`` finds int4 values."""

    awq = "awq"
    clip = "clip"
    round = "round"


class Form(str, Enum):
    """Forms of the folder that it writes."""

    awq = "awq"
    gptq = "gptq"


Folder = Annotated[
    str, typer.Argument(help="Folder of an AWQ, GPTQ, AutoRound or pack-quantized model, or its hub id.")
]
ComputeOption = Annotated[Compute, typer.Option(help="w4a16: activations as they are; w4a8: rounded to int8.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Of activations and float layers; auto: the model's own.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def table_of(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def wrapped(line: str) -> str:
    """A line of at most 80 columns, continued under its text; names and paths are not broken."""
    return textwrap.fill(line, 80, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show this package's warnings as text for the length of a command, without the line of source they come from."""
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, AwqJitWarning):
            print(wrapped(f"warning: {message}"), file=file or sys.stderr, flush=True)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def size(count: float) -> str:
    """Bytes for a person: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def age(seconds: float) -> str:
    """A span of time for a person, in its largest whole unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"
