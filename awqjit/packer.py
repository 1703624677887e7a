# SPDX-License-Identifier: Apache-2.0
"""Packing weights in C++: one library for every shape, compiled at first use and cached like a kernel.

:func:`awqjit.layout.pack` does the same in plain torch, some ten times more slowly: it is what runs where there is no
compiler, and what the compiled packer is tested against.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from awqjit import cache, layout, pages
from awqjit.errors import CompileError, KernelMissingError, LostScaleError, NoCacheError, NoCompilerError
from awqjit.formats.awq import AwqWeight
from awqjit.layout import BLOCK, PackedWeight
from awqjit.render import render_packer
from awqjit.weight import QuantizedWeight, ceil_div

_log = logging.getLogger("awqjit")

Weight: TypeAlias = QuantizedWeight | AwqWeight

WORTH_COMPILING = 1 << 24
"""Weights below which torch packs all of them in less time than compiling takes."""

_ROWS, _COLUMNS, _BYTES, _NO_ZEROS = range(4)
_LOST_SCALE, _ZERO_NOT_8, _ZERO_ABOVE_15 = 1, 2, 4
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


class _Pack(ctypes.Structure):
    """``struct Pack`` of ``templates/cpu/pack.cpp.jinja``, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("words", "rows", "scales", "zeros", "packed", "packed_scales", "packed_zeros")
        ),
        *((name, ctypes.c_int64 * 2) for name in ("word_stride", "scale_stride", "zero_stride")),
        *((name, ctypes.c_int64) for name in ("out_features", "groups", "packed_words")),
        *((name, ctypes.c_int32) for name in ("word_form", "zero_form", "scale_bytes")),
        ("exponent", ctypes.c_uint32),
    )


def in_torch(weight: Weight) -> PackedWeight:
    """Pack a weight with :func:`awqjit.layout.pack`; otherwise as :meth:`CompiledPacker.__call__`."""
    standard = weight.standard() if isinstance(weight, AwqWeight) else weight
    if not bool(torch.isfinite(standard.scales).all()):
        raise LostScaleError
    return layout.pack(standard.symmetric_if_possible())


@dataclass(frozen=True, eq=False)
class CompiledPacker:
    """The packer's library, loaded. Calls may run at the same time in many threads; each runs on its own."""

    path: Path
    library: ctypes.CDLL = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> CompiledPacker:
        """Load the shared library at ``path``.

        Raises:
            OSError: it cannot be loaded, or is something else.
        """
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        try:
            library.awqjit_pack.argtypes = (ctypes.POINTER(_Pack),)
            library.awqjit_pack.restype = ctypes.c_int32
        except AttributeError as error:
            raise OSError(f"{path} is not the packer: {error}") from None
        return cls(path, library)

    def __call__(self, weight: Weight) -> PackedWeight:
        """Rearrange a weight for CPU kernels. No value changes.

        Args:
            weight: on the CPU, of any strides; it is not modified.

        Returns:
            The packed weight, in memory of its own; without zero points where each of them is 8.

        Raises:
            LostScaleError: a scale is NaN or infinite.
            FormatError: an act-order weight whose groups do not have group_size rows each.
        """
        k, n, g = weight.in_features, weight.out_features, weight.group_size
        perm = layout.act_order(weight) if isinstance(weight, QuantizedWeight) else None
        rows = layout.source_rows(k, g, perm, torch.device("cpu"))
        rows = None if rows is None else rows.to(torch.int32)
        blocks, words = ceil_div(n, BLOCK), layout.packed_rows(k, g) // 8
        packed = pages.empty((blocks, words, BLOCK), torch.int32, torch.device("cpu"))
        scales = torch.empty(blocks, weight.groups, BLOCK, dtype=weight.scales.dtype)
        if isinstance(weight, AwqWeight):
            word_form, stored, zero_form = _COLUMNS, weight.qzeros, _COLUMNS
        else:
            word_form, stored, zero_form = _ROWS, weight.zeros, _BYTES
        zeros = None if stored is None else torch.empty(blocks, weight.groups, BLOCK, dtype=torch.uint8)
        pair = ctypes.c_int64 * 2
        found = self.library.awqjit_pack(
            _Pack(
                words=weight.qweight.data_ptr(),
                rows=_address(rows),
                scales=weight.scales.data_ptr(),
                zeros=_address(stored),
                packed=packed.data_ptr(),
                packed_scales=scales.data_ptr(),
                packed_zeros=_address(zeros),
                word_stride=pair(*weight.qweight.stride()),
                scale_stride=pair(*weight.scales.stride()),
                zero_stride=pair(*(stored.stride() if stored is not None else (0, 0))),
                out_features=n,
                groups=weight.groups,
                packed_words=words,
                word_form=word_form,
                zero_form=_NO_ZEROS if stored is None else zero_form,
                scale_bytes=scales.element_size(),
                exponent=_EXPONENTS[scales.dtype],
            )
        )
        if found & _LOST_SCALE:
            raise LostScaleError
        assert not found & _ZERO_ABOVE_15, "QuantizedWeight refuses such zero points"
        return PackedWeight(
            weight=packed,
            scales=scales,
            zeros=zeros if found & _ZERO_NOT_8 else None,
            perm=None if perm is None else perm.to(torch.int32),
            in_features=k,
            out_features=n,
            group_size=g,
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def request() -> cache.Request:
    """The packer as the cache knows it."""
    return cache.Request("packer", render_packer(), ())


def packer_for(weights: int) -> Callable[[Weight], PackedWeight]:
    """What packs weights of a model on the CPU: the compiled packer where it is to be had and worth its compilation.

    Args:
        weights: how many 4-bit values there are to pack.
    """
    if weights < WORTH_COMPILING:
        return in_torch
    wanted = request()
    try:
        artifact = cache.fetch(wanted)
        try:
            return CompiledPacker.load(artifact.path)
        except OSError as error:
            artifact = cache.replace(wanted, artifact, str(error))
            return CompiledPacker.load(artifact.path)
    except (NoCompilerError, KernelMissingError, CompileError, NoCacheError, OSError) as error:
        # Both give the same bits, so this costs time alone; why no kernel can be compiled, choosing kernels says.
        _log.info("weights are packed in torch: %s", error)
        return in_torch
