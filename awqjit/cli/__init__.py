# SPDX-License-Identifier: Apache-2.0
"""The ``awqjit`` command. Its packages (typer, rich) are optional: without them it says what to install."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from awqjit.errors import AwqJitError, MissingDependencyError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit code: 0, 1 after an error of awqjit (one red line on stderr, no traceback), 2 for a wrong command line.
    """
    try:
        try:
            from awqjit.cli.app import app
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package not in ("typer", "rich", "click"):
                raise
            raise MissingDependencyError(package, "the awqjit command", "pip install typer rich") from None
        app(args=None if argv is None else list(argv), prog_name="awqjit")
    except AwqJitError as error:
        red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
        print(f"{red}error: {error}{plain}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
