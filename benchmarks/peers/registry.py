# SPDX-License-Identifier: Apache-2.0
"""The ordered table of contenders: which adapter, in which environment, compared as what. Imports none of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.base import Peer


@dataclass(frozen=True)
class Contender:
    """One row of the tables.

    Attributes:
        name: as results and tables show it.
        adapter: ``module.Class`` below ``benchmarks.peers``.
        environment: name in :data:`benchmarks.peers.environments.ENVIRONMENTS`.
        bits: of the activations in its products: 8, or 16 for anything that does not round them to int8.
        zero_points: whether its weights can have them.
        ours: awqjit's own.
    """

    name: str
    adapter: str
    environment: str
    bits: int
    zero_points: bool = True
    ours: bool = False

    def load(self) -> type[Peer]:
        module, _, name = self.adapter.partition(".")
        found: type[Peer] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)
        return found


CONTENDERS: tuple[Contender, ...] = (
    Contender("awqjit w4a8", "awqjit_rows.W4A8", "torch", 8, ours=True),
    Contender("awqjit w4a16", "awqjit_rows.W4A16", "torch", 16, ours=True),
    Contender("vLLM int4_scaled_mm_cpu", "vllm_cpu.W4A8", "torch", 8),
    Contender("vLLM cpu_gemm_wna16", "vllm_cpu.W4A16", "torch", 16),
    Contender("zentorch DA8W4", "zentorch.W4A8", "torch", 8, zero_points=False),
    Contender("zentorch WOQ", "zentorch.W4A16", "torch", 16),
    Contender("torch int4pack", "torch_int4pack.Int4Pack", "torch", 16),
    Contender("dense bf16", "torch_dense.DenseBf16", "torch", 16),
    Contender("dense fp16", "torch_dense.DenseFp16", "torch", 16),
    Contender("dense fp32", "torch_dense.DenseFp32", "torch", 16),
    Contender("dense int8, _int_mm", "torch_dense.DenseInt8", "torch", 8),
    Contender("dense int8, oneDNN", "torch_dense.DenseInt8OneDnn", "torch", 8),
    Contender("GPTQModel AVX512-BF16", "gptqmodel.W4A16", "gptqmodel", 16),
    Contender("OpenVINO u4, dynamic", "openvino.DynamicQuantization", "openvino", 8),
    Contender("OpenVINO u4, fp32", "openvino.Fp32", "openvino", 16),
    Contender("OpenVINO u4, bf16", "openvino.Bf16", "openvino", 16),
    Contender("onnxruntime accuracy 4", "onnxruntime.Accuracy4", "onnxruntime", 8),
    Contender("onnxruntime accuracy 1", "onnxruntime.Accuracy1", "onnxruntime", 16),
    Contender("ggml Q4_0", "ggml.Q40", "ggml", 8, zero_points=False),
    Contender("ggml Q4_1", "ggml.Q41", "ggml", 8),
    Contender("ggml Q4_K", "ggml.Q4K", "ggml", 8),
)

BY_NAME = {contender.name: contender for contender in CONTENDERS}

LEFT_OUT: dict[str, str] = {
    "torchao DA8W4": "torchao 0.18 declares the operator, but its wheel has no CPU kernel for it",
    "IPEX 2.8": "the last release, bound to torch 2.8; without AMX its int4 layers are far slower than dense ones",
    "torch _dyn_quant_matmul_4bit": "on x86 only a reference in plain C++, without vector code",
}
"""Known int4 linear layers that are no contenders, and why."""


def comparisons(bits: int) -> dict[str, tuple[str, ...]]:
    """Whom awqjit's mode is compared with: the name of the comparison -> its contenders.

    Args:
        bits: 8 for w4a8: every peer, and those that take zero points; 16 for w4a16: every peer that leaves activations
            at 16 bits or more.
    """
    peers = [contender for contender in CONTENDERS if not contender.ours]
    if bits == 16:
        return {"16-bit peers": tuple(peer.name for peer in peers if peer.bits == 16)}
    return {
        "every peer": tuple(peer.name for peer in peers),
        "peers with zero points": tuple(peer.name for peer in peers if peer.zero_points),
    }
