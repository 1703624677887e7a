# SPDX-License-Identifier: Apache-2.0
"""``awqjit tune``: find the fastest tiles for layers on this machine, and remember them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from awqjit import tune
from awqjit.cli.common import Compute, Dtype, DtypeOption, JsonOption, print_json, table_of
from awqjit.errors import ArgumentError
from awqjit.spec import Problem

DEFAULT_SHAPE = "4096x4096"


def command(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="FOLDER | KxN...", help=f"A model, or layers (default: {DEFAULT_SHAPE})."),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale (128); -1 for K. Not for a folder.")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="No zero points. Not for a folder.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="With a bias. Not for a folder.")] = False,
    compute: Annotated[list[Compute] | None, typer.Option(help="May be repeated (default: w4a16).")] = None,
    dtype: DtypeOption = Dtype.bfloat16,
    seconds: Annotated[
        float, typer.Option(min=0, help="Of calls, for each of the last candidates and number of rows.")
    ] = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Measure the tiles of a model's kernels on this machine, and use the fastest ones from now on.

    Takes a minute or two a layer, on a machine that does nothing else. No result changes by it, only its time.
    """
    modes = [mode.value for mode in compute or [Compute.w4a16]]
    problems = find_problems(what or [DEFAULT_SHAPE], group_size, symmetric, bias, modes, dtype.value)
    effort = tune.Effort(screen=min(0.08, seconds), final=seconds)
    outcomes = tune.tune(problems, effort=effort, show_progress=not as_json)
    if as_json:
        print_json([to_dict(outcome) for outcome in outcomes])
        return
    Console().print(table(outcomes))
    for line in lines(outcomes):
        print(line)


def find_problems(
    what: Sequence[str], group_size: int | None, symmetric: bool, bias: bool, modes: Sequence[str], dtype: str
) -> tuple[Problem, ...]:
    """The layers that the arguments name: all shapes, or one folder.

    Raises:
        ArgumentError: neither; or options that describe a layer with a folder.
    """
    from awqjit.cli.info import baking_problems, shape_problem

    shapes = [re.fullmatch(r"(\d+)[xX](\d+)", one) for one in what]
    if len(what) == 1 and (shapes[0] is None or Path(what[0]).is_dir()):
        if group_size is not None or symmetric or bias:
            raise ArgumentError("--group-size, --symmetric, --bias", "a folder, which has its own", "layers as KxN")
        return baking_problems(what, modes, [dtype])
    found = []
    for text, shape in zip(what, shapes, strict=True):
        if shape is None:
            raise ArgumentError("FOLDER | KxN", repr(text), "one folder, or layers such as 4096x11008")
        size = 128 if group_size is None else group_size
        found += [shape_problem(shape[1], shape[2], size, symmetric, bias, mode, dtype) for mode in modes]
    return tuple(dict.fromkeys(found))


def to_dict(outcome: tune.Outcome) -> dict[str, Any]:
    return {
        "problem": outcome.problem.slug,
        "kernel": outcome.row,
        "threads": torch.get_num_threads(),
        "default": None if outcome.default is None else asdict(outcome.default),
        "tile": None if outcome.tile is None else asdict(outcome.tile),
        "microseconds": outcome.microseconds,
        "candidates": outcome.tried,
        "record": None if outcome.path is None else str(outcome.path),
        "reason": outcome.reason,
    }


def table(outcomes: Sequence[tune.Outcome]) -> Table:
    """A row for each layer and regime: how long a call takes with the default tile and with the one found."""
    shown = table_of(
        f"tiles on {torch.get_num_threads()} threads", "problem", "regime", "tried", "default, µs", "tuned, µs", "less"
    )
    for outcome in outcomes:
        name = f"{outcome.problem.slug} ({outcome.row})"
        for regime, (before, after) in (outcome.microseconds or {}).items():
            less = f"{1 - after / before:.0%}" if outcome.tile != outcome.default else ""
            tried = str((outcome.tried or {})[regime])
            shown.add_row(name, regime, tried, f"{before:.1f}", f"{after:.1f}" if less else "", less)
            name = ""
    for column in shown.columns[2:]:
        column.justify = "right"
    return shown


def lines(outcomes: Sequence[tune.Outcome]) -> Iterator[str]:
    """A line for each layer: what is remembered, or why nothing is."""
    for outcome in outcomes:
        if outcome.tile is None:
            yield f"{outcome.problem.slug}: {outcome.reason}"
        elif outcome.tile == outcome.default:
            yield f"{outcome.problem.slug}: the default tile is the fastest"
        else:
            yield f"{outcome.problem.slug}: {outcome.tile.slug} instead of {outcome.default.slug}"  # type: ignore[union-attr]
    kept = [outcome.path.parent for outcome in outcomes if outcome.path is not None]
    if kept:
        yield f"remembered in {kept[0]}: kernels made from now on use it"
