# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats: which one a model's ``quantization_config`` names, and how each layer's tensors are read.

:func:`find_config` finds a folder's config and :func:`parse` reads it. :meth:`FormatConfig.layer` tells how one layer
is stored: which tensors it has (:meth:`LayerFormat.shapes`), what weight they hold (:meth:`LayerFormat.read`) and how
one is stored (:meth:`LayerFormat.write`). The table of packings is in :mod:`awqjit.formats.table`; drawings of each
are at the heads of :mod:`awqjit.formats.awq`, :mod:`awqjit.formats.gemv`, :mod:`awqjit.formats.gptq` and
:mod:`awqjit.formats.pack_quantized`.
"""

from __future__ import annotations

from awqjit.formats.config import FormatConfig
from awqjit.formats.layer import LayerFormat
from awqjit.formats.producers import FORMATS, Format, parse
from awqjit.formats.rules import Rule
from awqjit.formats.shapes import Shapes
from awqjit.formats.source import find_config
from awqjit.formats.table import PACKINGS

__all__ = ("FORMATS", "MARKS", "Format", "FormatConfig", "LayerFormat", "Rule", "Shapes", "find_config", "parse")

MARKS: tuple[str, ...] = tuple(dict.fromkeys(packing.mark for packing in PACKINGS.values()))
"""Last names of the tensors that mark a layer as quantized, over all formats: "qweight" and "weight_packed"."""
