# SPDX-License-Identifier: Apache-2.0
"""The canonical int4 weight: what every checkpoint format is read into, free of any device or instruction set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from awqjit.errors import ArgumentError

SCALE_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that scales may have."""

SYMMETRIC_ZERO = 8
"""The zero point of every group of a weight that stores none."""

_CHUNK_ROWS = 1024  # rows dequantized at a time: bounds the temporaries of a large weight


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, for a >= 0 and b > 0."""
    return -(-a // b)


def check_tensor(name: str, value: object, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Check one tensor argument's type, dtype and shape.

    Args:
        name: the argument's name, as the message shows it.
        value: what was given.
        shape: the shape it must have.
        dtypes: the dtypes it may have.

    Raises:
        ArgumentError: it is not a tensor, or its dtype or shape is another.
    """
    if not isinstance(value, Tensor):
        raise ArgumentError(name, type(value).__name__, "a tensor")
    if value.dtype not in dtypes:
        raise ArgumentError(name, value.dtype, "dtype " + " or ".join(map(str, dtypes)))
    if tuple(value.shape) != shape:
        raise ArgumentError(name, f"shape {list(value.shape)}", f"shape {list(shape)}")


def unpack_nibbles(words: Tensor, rows: int) -> Tensor:
    """Canonical words to one value per byte.

    Args:
        words: int32 [ceil(rows / 8), N]; nibble i (bits 4i to 4i+3) of word r is row 8r + i.
        rows: rows to return; nibbles of the last word beyond them are ignored.

    Returns:
        uint8 [rows, N], values 0 to 15.

    Raises:
        ArgumentError: ``words`` is not int32 of that shape.
    """
    if not isinstance(words, Tensor) or words.dim() != 2:
        raise ArgumentError("words", getattr(words, "shape", type(words).__name__), "a 2-D tensor")
    check_tensor("words", words, (ceil_div(rows, 8), words.shape[1]), torch.int32)
    out = torch.empty(words.shape[0], 8, words.shape[1], dtype=torch.uint8, device=words.device)
    for i in range(8):
        # The shift of a negative int32 drags its sign in from the left: the mask comes after it.
        out[:, i] = (words >> (4 * i)) & 15
    return out.reshape(-1, words.shape[1])[:rows]


def pack_nibbles(values: Tensor) -> Tensor:
    """One value per byte to canonical words; the inverse of :func:`unpack_nibbles`.

    Args:
        values: uint8 [rows, N], values 0 to 15.

    Returns:
        int32 [ceil(rows / 8), N]; nibbles of the last word beyond ``rows`` are 0.

    Raises:
        ArgumentError: ``values`` is not uint8, not 2-D, or holds a value above 15.
    """
    if not isinstance(values, Tensor) or values.dim() != 2:
        raise ArgumentError("values", getattr(values, "shape", type(values).__name__), "a 2-D tensor")
    check_tensor("values", values, tuple(values.shape), torch.uint8)
    if bool((values > 15).any()):
        raise ArgumentError("values", f"a value of {int(values.max())}", "values 0 to 15")
    words = torch.zeros(ceil_div(values.shape[0], 8), values.shape[1], dtype=torch.int32, device=values.device)
    for i in range(8):
        row = values[i::8]
        words[: row.shape[0]] |= row.to(torch.int32) << (4 * i)
    return words


def clear_padding(words: Tensor, rows: int) -> Tensor:
    """Canonical words with 0 in the nibbles beyond row ``rows`` - 1: ``words`` itself if there are none.

    Args:
        words: int32 [ceil(rows / 8), N].
        rows: K.
    """
    if rows % 8 == 0:
        return words
    words = words.clone(memory_format=torch.contiguous_format)
    words[-1] &= (1 << (4 * (rows % 8))) - 1
    return words


def resolve_group_size(group_size: int, in_features: int) -> int:
    """A checkpoint's group_size for one layer: -1, or one longer than the layer, is in_features (a single group).

    Raises:
        ArgumentError: it is neither -1 nor at least 1.
    """
    if group_size != -1 and group_size < 1:
        raise ArgumentError("group_size", group_size, "-1 or at least 1")
    return in_features if group_size == -1 else min(group_size, in_features)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """An int4 weight W [K, N] of a linear y = x W: ``W[k, n] = (q[k, n] - z[g(k), n]) * s[g(k), n]``.

    This is the orientation that GPTQ checkpoints use. K is in_features, N out_features, G = ceil(K / group_size)
    the number of groups.

    Attributes:
        qweight: int32 [ceil(K / 8), N]; nibble i of word r is q of row 8r + i. When K is not a multiple of 8, the
            nibbles of the last word beyond row K - 1 may hold anything.
        scales: fp16, bf16 or fp32 [G, N]; of any sign, zero or subnormal.
        zeros: uint8 [G, N], 0 to 15; None when every zero point is 8 (symmetric).
        group_size: rows that share a scale, 1 to K (a checkpoint's -1 is replaced by K before).
        in_features: K.
        out_features: N.
        g_idx: int32 [K], the group of each row (act-order); None for k // group_size.

    Raises:
        ArgumentError: any of that does not hold.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    in_features: int
    out_features: int
    g_idx: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "at least 1")
        if not 1 <= self.group_size <= self.in_features:
            raise ArgumentError("group_size", self.group_size, f"1 to in_features={self.in_features}")
        check_tensor("qweight", self.qweight, (ceil_div(self.in_features, 8), self.out_features), torch.int32)
        check_tensor("scales", self.scales, (self.groups, self.out_features), *SCALE_DTYPES)
        if self.zeros is not None:
            check_tensor("zeros", self.zeros, (self.groups, self.out_features), torch.uint8)
        if self.g_idx is not None:
            check_tensor("g_idx", self.g_idx, (self.in_features,), torch.int32)
        for name in ("scales", "zeros", "g_idx"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.qweight.device:
                raise ArgumentError(name, f"device {tensor.device}", f"qweight's device {self.qweight.device}")
        if not self.qweight.is_meta:
            self._check_values()

    def _check_values(self) -> None:
        if self.zeros is not None and bool((self.zeros > 15).any()):
            raise ArgumentError("zeros", f"a zero point of {int(self.zeros.max())}", "0 to 15")
        if self.g_idx is not None:
            low, high = int(self.g_idx.min()), int(self.g_idx.max())
            if low < 0 or high >= self.groups:
                raise ArgumentError("g_idx", f"groups {low} to {high}", f"0 to {self.groups - 1}")

    @property
    def groups(self) -> int:
        """G, the number of groups."""
        return ceil_div(self.in_features, self.group_size)

    @property
    def device(self) -> torch.device:
        """The device that holds all of its tensors."""
        return self.qweight.device

    def in_group_order(self) -> bool:
        """Whether row k belongs to group k // group_size: no g_idx, or one that says just that."""
        if self.g_idx is None:
            return True
        return torch.equal(self.g_idx.long(), torch.arange(self.in_features, device=self.device) // self.group_size)

    def row_groups(self) -> Tensor:
        """int64 [K]: the group of each row."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.in_features, device=self.device) // self.group_size

    def values(self) -> Tensor:
        """uint8 [K, N]: q, 0 to 15."""
        return unpack_nibbles(self.qweight, self.in_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that all kernels are held to: ``(q - z) * s``.

        q - z is exact and the product is formed in fp32 (in fp64 if that is asked for), then rounded to ``dtype``.

        Args:
            dtype: a floating dtype.

        Returns:
            ``dtype`` [K, N], contiguous.

        Raises:
            ArgumentError: ``dtype`` is not a floating dtype.
        """
        if not dtype.is_floating_point:
            raise ArgumentError("dtype", dtype, "a floating dtype")
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty(self.in_features, self.out_features, dtype=dtype, device=self.device)
        groups = self.row_groups()
        for start in range(0, self.in_features, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, self.in_features)
            rows = unpack_nibbles(self.qweight[start // 8 : ceil_div(stop, 8)], stop - start).to(exact)
            group = groups[start:stop]
            rows -= SYMMETRIC_ZERO if self.zeros is None else self.zeros[group].to(exact)
            rows *= self.scales[group].to(exact)
            out[start:stop] = rows
        return out

    def symmetric_if_possible(self) -> QuantizedWeight:
        """This weight without stored zero points if each of them is 8, else this weight itself."""
        if self.zeros is None or not bool((self.zeros == SYMMETRIC_ZERO).all()):
            return self
        return dataclasses.replace(self, zeros=None)
