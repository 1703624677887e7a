# SPDX-License-Identifier: Apache-2.0
"""``awqjit eval``: a table of scores."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from awqjit.cli.common import table_of
from awqjit.cli.quantize import read_text
from awqjit.integrations.calibration import builtin_text
from awqjit.integrations.evaluate import Evaluation, evaluate


def run(folder: str, text: Path | None, tokens: int, dtype: str, *, quiet: bool) -> Evaluation:
    """Evaluate a folder on a file, or on the text that comes with the package."""
    chosen = builtin_text("evaluation") if text is None else read_text(text)
    return evaluate(folder, chosen, tokens=tokens, dtype=dtype, show_progress=not quiet)


def table(found: Evaluation) -> Table:
    """One row a mode."""
    title = f"{found.tokens} tokens in windows of {found.context}, activations {found.dtype}"
    shown = table_of(title, "mode", "mean NLL", "difference", "perplexity", "same likeliest token")
    for score in found.scores:
        first = score is found.scores[0]
        shown.add_row(
            score.mode,
            f"{score.nll:.4f}",
            "" if first else f"{score.nll - found.scores[0].nll:+.4f}",
            f"{score.perplexity:.3f}",
            "" if first else f"{score.agreement:.2%}",
        )
    return shown
