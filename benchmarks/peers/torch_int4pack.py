# SPDX-License-Identifier: Apache-2.0
"""torch's own int4 kernel."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.base import Refused, TorchPeer
from benchmarks.peers.data import Weights


class Int4Pack(TorchPeer):
    """``torch._weight_int4pack_mm_for_cpu`` computes (q - 8) * s + b, so b is (8 - z) * s."""

    takes = ("bf16", "fp16", "fp32")
    arithmetic = "bf16"

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        scales = torch.from_numpy(weights.scales)
        offsets = (8 - torch.from_numpy(weights.zeros).float()) * scales
        pairs = torch.stack((scales, offsets), dim=2).to(self.dtypes[dtype]).contiguous()
        q = torch.from_numpy(weights.q).T.contiguous().to(torch.int32)
        try:
            words = torch._convert_weight_to_int4pack_for_cpu(q, 1)
            self.call((words, pairs, weights.group), torch.zeros(1, weights.k, dtype=self.dtypes[dtype]))
        except RuntimeError as error:
            raise Refused(str(error).partition("\n")[0]) from error
        return (words, pairs, weights.group)

    def call(self, packed: Any, x: Any) -> Any:
        return self.torch._weight_int4pack_mm_for_cpu(x, packed[0], packed[2], packed[1])
