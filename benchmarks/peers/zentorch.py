# SPDX-License-Identifier: Apache-2.0
"""AMD's zentorch, packed as vLLM does it on AMD CPUs."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from benchmarks.peers.base import Refused, TorchPeer
from benchmarks.peers.data import Weights


class _Zentorch(TorchPeer):
    takes = ("bf16", "fp16")  # fp16 only on CPUs with AVX512-FP16

    def load(self) -> str:
        try:
            importlib.import_module("zentorch")
        except (ImportError, OSError) as error:
            raise Refused(f"zentorch cannot be imported: {error}") from error
        self.ops = self.torch.ops.zentorch
        return f"zentorch {metadata.version('zentorch')}"


class W4A16(_Zentorch):
    """``zentorch_woq_linear``."""

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        q = torch.from_numpy(weights.q).T.contiguous().to(torch.int8)
        words = self.ops.zentorch_woq_repack_weight.default(q)
        scales = torch.from_numpy(weights.scales).to(self.dtypes[dtype])
        return (words, scales, torch.from_numpy(weights.zeros).to(torch.int8))

    def call(self, packed: Any, x: Any) -> Any:
        return self.ops.zentorch_woq_linear.default(x, packed[0].t(), packed[1], packed[2], None)


class W4A8(_Zentorch):
    """``zentorch_dynamic_qlinear`` (DA8W4): no zero points."""

    arithmetic, zero_points = "int8", False

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        q = torch.from_numpy(weights.q).T.contiguous().to(torch.int8) - 8
        words = self.ops.zentorch_woq_repack_weight.default(q).view(torch.int8)
        return (words, torch.from_numpy(weights.scales).to(self.dtypes[dtype]))

    def call(self, packed: Any, x: Any) -> Any:
        return self.ops.zentorch_dynamic_qlinear.default(x, packed[0], packed[1], None)
