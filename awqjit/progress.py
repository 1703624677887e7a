# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr for everything that takes more than a second; only on a terminal, and with rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Step = Callable[[], None]
"""Called once per finished step of a bar."""


@contextmanager
def bar(description: str, total: int, enabled: bool = True) -> Iterator[Step]:
    """Show a bar of ``total`` steps for a block; the value yielded is called once per finished step.

    The bar goes to stderr and disappears at the end, so that stdout carries results only.

    Args:
        description: what is being done, for example "packing layers".
        total: number of steps.
        enabled: False shows nothing.
    """
    if not enabled:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:  # a bar that cannot be wiped off would leave its lines in a log
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
