# SPDX-License-Identifier: Apache-2.0
"""awqjit's two modes, on the row that it chooses here."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.base import Refused, TorchPeer, pack_columns
from benchmarks.peers.data import Weights


class _Awqjit(TorchPeer):
    takes = ("bf16", "fp16", "fp32")
    act_bits: ClassVar[int]

    def load(self) -> str:
        try:
            import awqjit
        except ImportError as error:
            raise Refused(f"awqjit cannot be imported: {error}") from error
        return f"awqjit {awqjit.__version__}"

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        # Eight k in a word, transposed twice: pack_columns puts neighbours of the last dimension together.
        q = torch.from_numpy(np.ascontiguousarray(pack_columns(np.ascontiguousarray(weights.q.T)).T))
        scales, zeros = torch.from_numpy(weights.scales).to(torch.float16), torch.from_numpy(weights.zeros)
        return self._pack((q, scales, zeros, weights.group, weights.k, weights.n))

    def _pack(self, source: tuple[Any, ...]) -> Any:
        q, scales, zeros, group, k, n = source
        words, packed_scales, packed_zeros, _ = self.torch.ops.awqjit.pack(q, scales, zeros, None, group, k)
        return (words, packed_scales, packed_zeros, k, n, group, source)

    def clone(self, packed: Any) -> Any:
        return self._pack(packed[-1])  # not tensor.clone(): where packed weights lie is a part of packing them

    def call(self, packed: Any, x: Any) -> Any:
        words, scales, zeros, k, n, group, _ = packed
        return self.torch.ops.awqjit.int4_mm(x, words, scales, zeros, None, k, n, group, self.act_bits)


class W4A8(_Awqjit):
    """``compute="w4a8"``."""

    act_bits, arithmetic = 8, "int8"


class W4A16(_Awqjit):
    """``compute="w4a16"``; fp32 multiply-adds where x is not bf16."""

    act_bits = 16

    @classmethod
    def arithmetic_for(cls, dtype: str) -> str:
        return "bf16" if dtype == "bf16" else "fp32"
