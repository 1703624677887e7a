# SPDX-License-Identifier: Apache-2.0
"""Dense layers in plain torch: what int4 has to be faster than."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.base import TorchPeer
from benchmarks.peers.data import Array, Weights


class DenseBf16(TorchPeer):
    """``F.linear`` on the dequantized weights rounded to bf16."""

    arithmetic, weight_bits = "bf16", 16

    def prepare(self, weights: Weights, dtype: str) -> Any:
        return (self.torch.from_numpy(weights.float32()).T.contiguous().to(self.dtypes[dtype]),)

    def call(self, packed: Any, x: Any) -> Any:
        return self.torch.nn.functional.linear(x, packed[0])


class DenseFp16(DenseBf16):
    """The same in fp16, where x is."""

    takes = ("fp16",)
    arithmetic = "fp32"


class DenseFp32(DenseBf16):
    """The same in fp32."""

    takes = ("fp32",)
    arithmetic, weight_bits = "fp32", 32


class _DenseInt8(TorchPeer):
    weight_bits, arithmetic, own_weights = 8, "int8", True

    def rounded(self, weights: Weights) -> tuple[Any, Any]:
        """int8 [K, N] and the fp32 scale of each column."""
        w = self.torch.from_numpy(weights.float32())
        scales = w.abs().amax(0) / 127
        return (w / scales).round_().to(self.torch.int8), scales


class DenseInt8(_DenseInt8):
    """int8 weights, a scale a column; activations rounded to int8 row by row in plain torch, ``torch._int_mm``."""

    def prepare(self, weights: Weights, dtype: str) -> Any:
        rounded, scales = self.rounded(weights)
        # [N, K] in memory, handed over as its transpose: the product then needs no copy of it.
        return (rounded.T.contiguous(), scales)

    def call(self, packed: Any, x: Any) -> Any:
        torch = self.torch
        scale = x.abs().amax(1, keepdim=True).float() / 127
        rounded = (x / scale).round_().to(torch.int8)
        return (torch._int_mm(rounded, packed[0].T) * scale * packed[1]).to(x.dtype)

    def weights_of(self, packed: Any, columns: Array) -> Array:
        w: Array = (packed[0].T[:, columns].double() * packed[1][columns]).numpy()
        return w


class DenseInt8OneDnn(_DenseInt8):
    """torch's quantized linear layer with dynamic activations: oneDNN, one scale for the whole of x."""

    takes = ("fp32",)

    def load(self) -> str:
        self.torch.backends.quantized.engine = "onednn"
        return super().load()

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        rounded, scales = self.rounded(weights)
        quantized = torch._make_per_channel_quantized_tensor(
            rounded.T.contiguous(), scales.double(), torch.zeros(weights.n, dtype=torch.int64), 0
        )
        return (torch.ops.quantized.linear_prepack(quantized, None), quantized)

    def clone(self, packed: Any) -> Any:
        return (self.torch.ops.quantized.linear_prepack(packed[1], None), packed[1])

    def size(self, packed: Any) -> int:
        return int(packed[1].numel() + 4 * packed[1].shape[0])

    def call(self, packed: Any, x: Any) -> Any:
        return self.torch.ops.quantized.linear_dynamic(x, packed[0])

    def weights_of(self, packed: Any, columns: Array) -> Array:
        quantized = packed[1]
        scales = quantized.q_per_channel_scales()[columns]
        w: Array = (quantized.int_repr()[columns].double() * scales[:, None]).T.numpy()
        return w
