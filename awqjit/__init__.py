# SPDX-License-Identifier: Apache-2.0
"""int4 inference in PyTorch on CPUs: kernels generated, compiled and cached for exactly your shapes.

Importing this package registers the operators ``torch.ops.awqjit.*`` and does nothing else.
"""

from __future__ import annotations

from typing import Any

from awqjit.errors import AwqJitError, AwqJitWarning
from awqjit.formats.awq import awq_to_standard
from awqjit.fusion import Fusion, fuse
from awqjit.jit import warm
from awqjit.modules import Int4Linear
from awqjit.version import __version__
from awqjit.weight import QuantizedWeight

__all__ = (
    "AwqJitError",
    "AwqJitWarning",
    "Fusion",
    "Int4Linear",
    "QuantizedWeight",
    "__version__",
    "awq_to_standard",
    "from_pretrained",
    "fuse",
    "quantize_head",
    "warm",
)


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import: only those who load a model pay for it.
    if name == "from_pretrained":
        from awqjit.integrations.transformers import from_pretrained

        return from_pretrained
    if name == "quantize_head":
        from awqjit.integrations.head import quantize_head

        return quantize_head
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
