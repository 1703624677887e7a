# SPDX-License-Identifier: Apache-2.0
"""GPTQModel's AVX512-BF16 kernel, what transformers runs AWQ models on where GPTQModel is installed."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from benchmarks.peers.base import AWQ_ORDER, Refused, TorchPeer, pack_columns
from benchmarks.peers.data import Weights


class W4A16(TorchPeer):
    """``gemm_int4_qzero_group_scaled_cpu_forward``; GPTQModel compiles it at first use."""

    def load(self) -> str:
        try:
            operator = importlib.import_module("gptqmodel.extension").op
        except ImportError as error:
            raise Refused(f"gptqmodel cannot be imported: {error}") from error
        try:
            self.pack = operator("int4_qzero_group_scaled_cpu", "pack_awq_int4")
            self.multiply = operator("int4_qzero_group_scaled_cpu", "gemm_int4_qzero_group_scaled_cpu_forward")
        except Exception as error:  # no compiler, no AVX512-BF16, a failed build: each has a class of its own there
            raise Refused(str(error).partition("\n")[0]) from error
        self.torch.set_num_threads(self.threads)  # importing it may have changed that
        return f"gptqmodel {metadata.version('gptqmodel')}"

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        q, zeros = (torch.from_numpy(pack_columns(v, AWQ_ORDER)) for v in (weights.q, weights.zeros))
        words, points = self.pack(q, zeros, weights.n, weights.k)
        return (words, points, torch.from_numpy(weights.scales), weights.group)

    def call(self, packed: Any, x: Any) -> Any:
        return self.multiply(x, packed[0], packed[1], packed[2], packed[3], None)
