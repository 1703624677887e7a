# SPDX-License-Identifier: Apache-2.0
"""What ``awqjit inspect`` shows: a folder's layers in groups, the checks of their numbers, and what runs them here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from awqjit.cli import kernels as choice
from awqjit.cli.common import wrapped
from awqjit.inspect_folder import FolderReport, LayerReport
from awqjit.integrations.transformers import resolve_dtype
from awqjit.jit import DTYPE_NAMES
from awqjit.machine import Machine
from awqjit.spec import COMPUTE, Problem


def kernels(layer: LayerReport, computer: Machine, x_dtype: torch.dtype) -> dict[str, str]:
    """For each compute mode the row that runs a layer: its name, or why the layer runs as float or not at all."""
    if layer.refused is not None:
        return {}
    if layer.order == "uneven act-order":
        return dict.fromkeys(COMPUTE, "float")
    chosen = {}
    for compute, act_bits in COMPUTE.items():
        problem = Problem(
            k=layer.in_features,
            n=layer.out_features,
            group_size=layer.group_size,
            x_dtype=DTYPE_NAMES[x_dtype],
            scale_dtype=DTYPE_NAMES[getattr(torch, layer.scale_dtype)],
            symmetric=layer.symmetric,
            bias=layer.bias,
            act_bits=act_bits,
        )
        verdicts = choice.explain(problem, computer)
        chosen[compute] = next((verdict.row.name for verdict in verdicts if verdict.chosen), "none")
    return chosen


def to_dict(report: FolderReport, computer: Machine, dtype: str) -> dict[str, Any]:
    """Everything that is known, for JSON.

    Args:
        report: what the folder holds.
        computer: where its layers are to run.
        dtype: of the activations, or "auto" for the model's own.
    """
    x_dtype = resolve_dtype(report.dtype if dtype == "auto" else dtype, None)
    layers = [
        asdict(layer) | {"doubts": layer.doubts, "kernels": kernels(layer, computer, x_dtype)}
        for layer in report.layers
    ]
    return {"folder": str(report.folder), "config": report.format.to_dict(), "layers": layers, "float": report.kept}


def lines(report: FolderReport, computer: Machine, dtype: str) -> Iterator[str]:
    """The report for a person: identical layers in one entry, then what is odd about which of them.

    Args:
        report: what the folder holds.
        computer: where its layers are to run.
        dtype: of the activations, or "auto" for the model's own.
    """
    x_dtype = resolve_dtype(report.dtype if dtype == "auto" else dtype, None)
    config = report.format
    zeros = "symmetric" if config.sym else "asymmetric"
    yield f"config: {config.method} ({config.version}), {config.bits} bits, group size {config.group_size}, {zeros}"
    for layers in _alike(report.layers, computer, x_dtype):
        first = layers[0]
        yield wrapped(f"{len(layers):4} x {', '.join(_patterns(layer.name for layer in layers))}")
        yield f"       {first.packing}, {_what(first)}"
        run = kernels(first, computer, x_dtype)
        if first.as_float:
            yield f"       runs as a float layer ({first.bits} bits)"
        elif first.refused is not None:
            yield wrapped(f"       not int4: {first.refused}")
        else:
            yield f"       runs on {', '.join(f'{row} ({compute})' for compute, row in run.items())}"
    if report.kept:
        yield wrapped(f"{len(report.kept):4} x float: {', '.join(_patterns(report.kept))}")
    yield from _checks(report.layers)


def _what(layer: LayerReport) -> str:
    size = f"{layer.in_features} -> {layer.out_features}" if layer.in_features else "of unknown size"
    zeros = "symmetric" if layer.symmetric else "asymmetric"
    parts = [size, f"{layer.bits} bits, g {layer.group_size}", zeros]
    parts += [layer.scale_dtype] if layer.scale_dtype else []
    parts += [layer.order] if layer.order != "no" else []
    parts += ["bias"] if layer.bias else []
    return ", ".join(parts)


def _alike(layers: Iterable[LayerReport], computer: Machine, x_dtype: torch.dtype) -> list[list[LayerReport]]:
    groups: dict[Any, list[LayerReport]] = {}
    for layer in layers:
        key = (
            layer.packing,
            _what(layer),
            layer.refused,
            layer.as_float,
            tuple(kernels(layer, computer, x_dtype).items()),
        )
        groups.setdefault(key, []).append(layer)
    return list(groups.values())


def _patterns(names: Iterable[str]) -> list[str]:
    """Names with their numbers replaced by stars, each once."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))


def _checks(layers: tuple[LayerReport, ...]) -> Iterator[str]:
    means = [layer.mean for layer in layers if layer.mean is not None]
    if means:
        told = sum(layer.columns is not None for layer in layers)
        columns = f"; columns checked in {told} layers" if told else ""
        yield f"mean of q - z: {min(means):+.2f} to {max(means):+.2f} (0 is expected){columns}"
    found: dict[str, list[str]] = {}
    for layer in layers:
        for note in layer.notes:
            found.setdefault(note, []).append(layer.name)
        if layer.centred is False:
            found.setdefault("zero points may be off by one (mean of q - z)", []).append(layer.name)
        if layer.columns is False:
            found.setdefault("zero points fit better in another order of columns", []).append(layer.name)
    for sentence, names in found.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield wrapped(f"look at: {sentence}: {', '.join(names[:3])}{more}")
    if means and not found:
        yield f"nothing odd was found{'' if told else ' in them; the order of columns cannot be told here'}"
