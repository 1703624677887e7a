# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's CPU plugin: MatMul with a u4 constant that a Convert, Subtract and Multiply unpack, which it fuses."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.base import Peer, Refused, pack_pairs
from benchmarks.peers.data import Array, Weights


class _MatMul(Peer):
    takes = ("fp32",)
    prepares_batches = True
    dynamic: ClassVar[bool] = False
    precision: ClassVar[str] = "f32"
    max_copies = 48  # each compiled model has arenas of its own, and hundreds of them get in each other's way

    def setup(self) -> str:
        try:
            self.ov = importlib.import_module("openvino")
            self.ops = importlib.import_module("openvino.opset13")
        except ImportError as error:
            raise Refused(f"openvino cannot be imported: {error}") from error
        self.core = self.ov.Core()
        return f"openvino {self.ov.__version__.partition('-')[0]}"

    def _u4(self, values: Array) -> Any:
        flat = values.reshape(-1)
        if flat.size % 2:
            flat = np.append(flat, np.uint8(0))
        tensor = self.ov.Tensor(pack_pairs(flat), self.ov.Shape(list(values.shape)), self.ov.Type.u4)
        return self.ov.op.Constant(tensor, shared_memory=False)

    def prepare(self, weights: Weights, dtype: str) -> Any:
        k, n, group, ops = weights.k, weights.n, weights.group, self.ops
        q = np.ascontiguousarray(weights.q.T).reshape(n, k // group, group)
        zeros = np.ascontiguousarray(weights.zeros.T)[:, :, None]
        scales = np.ascontiguousarray(weights.scales.T)[:, :, None].astype(np.float16)
        w = ops.convert(self._u4(q), np.float16)
        w = ops.subtract(w, ops.convert(self._u4(zeros), np.float16))
        w = ops.multiply(w, ops.constant(scales))
        w = ops.reshape(w, ops.constant(np.array([n, k], np.int64)), False)
        x = ops.parameter([-1, k], np.float32, name="x")
        model = self.ov.Model([ops.matmul(x, ops.convert(w, np.float32), False, True)], [x], "layer")
        size = q.size // 2 + zeros.size // 2 + scales.nbytes
        return self._compiled(model, group, size)

    def _compiled(self, model: Any, group: int, size: int) -> dict[str, Any]:
        settings = {
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": True,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group if self.dynamic else 0,
            "INFERENCE_PRECISION_HINT": self.precision,
        }
        request = self.core.compile_model(model, "CPU", settings).create_infer_request()
        return {"model": model, "request": request, "x": None, "group": group, "size": size}

    def clone(self, packed: Any) -> Any:
        return self._compiled(packed["model"].clone(), packed["group"], packed["size"])

    def size(self, packed: Any) -> int:
        return int(packed["size"])

    def input(self, x: Array, dtype: str) -> Any:
        return self.ov.Tensor(np.ascontiguousarray(x))

    def call(self, packed: Any, x: Any) -> Any:
        if packed["x"] is not x:
            packed["request"].set_input_tensor(x)
            packed["x"] = x
        packed["request"].infer()
        return packed["request"]

    def poison(self, y: Any) -> None:
        y.get_output_tensor().data[:] = np.nan

    def output(self, y: Any) -> Array:
        return np.array(y.get_output_tensor().data, dtype=np.float32)


class DynamicQuantization(_MatMul):
    """Activations rounded to int8, a scale a group."""

    dynamic, arithmetic = True, "int8"


class Fp32(_MatMul):
    """No dynamic quantisation, fp32."""

    arithmetic = "fp32"


class Bf16(_MatMul):
    """No dynamic quantisation, bf16 inside."""

    precision, arithmetic = "bf16", "bf16"
