# SPDX-License-Identifier: Apache-2.0
"""Shapes that one tensor of a quantized layer may have, as a checkpoint's headers show them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shapes:
    """What the header of one tensor must say.

    Attributes:
        allowed: the shapes it may have; the first is the one that is written.
        required: whether the layer is incomplete without it.
    """

    allowed: tuple[tuple[int, ...], ...]
    required: bool
