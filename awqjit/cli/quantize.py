# SPDX-License-Identifier: Apache-2.0
"""``awqjit quantize``: options to settings, and plan and report to lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from awqjit.cli.common import Form, Method, wrapped
from awqjit.errors import ArgumentError, FormatError
from awqjit.integrations.calibration import Calibration, builtin_text
from awqjit.integrations.quantize_folder import Report, quantize_folder
from awqjit.integrations.quantize_plan import AUTOMATIC_SIZES, GROUP_SIZES, Plan


def read_text(path: Path) -> str:
    """A text file of the user's.

    Raises:
        FormatError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} cannot be read as a text: {error}", "Give a file of plain UTF-8 text.") from error


def run(
    source: Path,
    destination: Path,
    *,
    method: Method,
    form: Form | None,
    symmetric: bool,
    text: Path | None,
    **more: Any,
) -> Report:
    """Quantize a folder as the command's options say.

    Args:
        source: see :func:`awqjit.integrations.quantize_folder.quantize_folder`.
        destination: likewise.
        method: "awq" calibrates; "clip" searches over the weights alone; "round" takes the full range of each group.
        form: None is GPTQ for symmetric weights, which many readers of AWQ folders do not know, else AWQ.
        symmetric: every zero point is 8.
        text: calibration text; None is the package's own.
        more: likewise.

    Raises:
        ArgumentError: a text without a calibration, or as ``quantize_folder`` says.
    """
    if text is not None and method is not Method.awq:
        raise ArgumentError("--text", text, f"--method awq with it, not {method.value}, which uses no text")
    calibration = None
    if method is Method.awq:
        calibration = Calibration(builtin_text("calibration") if text is None else read_text(text))
    form = form or (Form.gptq if symmetric else Form.awq)
    return quantize_folder(
        source,
        destination,
        symmetric=symmetric,
        clip_search=method is not Method.round,
        calibration=calibration,
        format=form.value,
        **more,
    )


def plan_lines(plan: Plan) -> list[str]:
    """What will be done, for a person: a group size that was chosen, and layers that stay float by their reason."""
    shown = []
    if plan.automatic:
        tried = ", ".join(str(size) for size in AUTOMATIC_SIZES)
        caution = "" if plan.group_size in GROUP_SIZES else "; not all readers take it"
        why = f"the largest of {tried} that divides every layer quantized{caution}"
        shown.append(f"group size {plan.group_size} ({why})")
    by_reason: dict[str, list[str]] = {}
    for layer, reason in plan.kept.items():
        by_reason.setdefault(reason, []).append(layer)
    shown += [
        f"float: {layers[0]}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''} ({reason})"
        for reason, layers in by_reason.items()
    ]
    return [wrapped(line) for line in shown]


def lines(report: Report) -> list[str]:
    """What was done, for a person: the totals, the head left out."""
    done = f"{len(report.quantized)} of {report.plan.layers} layers quantized at group size {report.group_size}"
    size = f"{report.bytes_written / 1e6:.1f} MB in {report.seconds:.1f} s"
    return [wrapped(f"{done}: {size}, in {report.destination}")]
