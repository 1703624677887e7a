# SPDX-License-Identifier: Apache-2.0
"""Zero points that a checkpoint stores one by one, as integers or as floats that are whole."""

from __future__ import annotations

import torch
from torch import Tensor

from awqjit.errors import FormatError
from awqjit.weight import check_tensor

DTYPES: tuple[torch.dtype, ...] = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)
"""Dtypes of zero points that are not packed."""


def whole_numbers(name: str, stored: Tensor, shape: tuple[int, ...], low: int, high: int) -> Tensor:
    """int16 of the same shape: the numbers, once they are found to be whole and in range.

    Raises:
        ArgumentError: another dtype or shape.
        FormatError: a number is not whole (zero points of that kind cannot be subtracted from integers), or out of
            ``low`` to ``high``.
    """
    check_tensor(name, stored, shape, *DTYPES)
    numbers = stored.to(torch.float32)
    if not bool((numbers == numbers.round()).all()):
        raise FormatError(
            f"{name} holds zero points that are not whole numbers", "Quantize the model with integer zero points."
        )
    if bool(((numbers < low) | (numbers > high)).any()):
        raise FormatError(
            f"{name} holds zero points from {numbers.min():g} to {numbers.max():g}, beyond {low} to {high}",
            "The checkpoint is damaged, or its label names another format.",
        )
    return numbers.to(torch.int16)
