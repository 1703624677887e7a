# SPDX-License-Identifier: Apache-2.0
"""onnxruntime's MatMulNBits: a model of one node for each copy of the weights, fp32 in and out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.base import Peer, Refused, pack_pairs
from benchmarks.peers.data import Array, Weights

_pool_threads: list[int] = []  # the library's thread pool is one for the process, and made once


class _MatMulNBits(Peer):
    takes = ("fp32",)
    prepares_batches = True
    level: ClassVar[int]

    def setup(self) -> str:
        try:
            import onnx  # noqa: F401
            import onnxruntime
        except ImportError as error:
            raise Refused(f"onnxruntime or onnx cannot be imported: {error}") from error
        self.runtime = onnxruntime
        if not _pool_threads:
            # One pool for all sessions: each would keep threads of its own spinning.
            onnxruntime.set_global_thread_pool_sizes(self.threads, 1)
            _pool_threads.append(self.threads)
        self.pinned = False
        return f"onnxruntime {onnxruntime.__version__}"

    def prepare(self, weights: Weights, dtype: str) -> Any:
        from onnx import TensorProto, helper, numpy_helper

        k, n, group = weights.k, weights.n, weights.group
        words = pack_pairs(np.ascontiguousarray(weights.q.T)).reshape(n, k // group, group // 2)
        zeros = np.ascontiguousarray(weights.zeros.T)
        if zeros.shape[1] % 2:
            zeros = np.pad(zeros, ((0, 0), (0, 1)))
        tensors = {"B": words, "scales": np.ascontiguousarray(weights.scales.T), "zeros": pack_pairs(zeros)}
        node = helper.make_node(
            "MatMulNBits",
            ["x", *tensors],
            ["y"],
            domain="com.microsoft",
            K=k,
            N=n,
            bits=4,
            block_size=group,
            accuracy_level=self.level,
        )
        graph = helper.make_graph(
            [node],
            "layer",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
            initializer=[numpy_helper.from_array(tensor, name) for name, tensor in tensors.items()],
        )
        domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=domains, ir_version=9).SerializeToString()
        size = sum(tensor.nbytes for tensor in tensors.values())
        return {"model": model, "session": self._session(model), "size": size, "n": n, "bound": None}

    def _session(self, model: bytes) -> Any:
        options = self.runtime.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3
        session = self.runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        if not self.pinned:
            _pin_threads()
            self.pinned = True
        return session

    def clone(self, packed: Any) -> Any:
        return packed | {"session": self._session(packed["model"]), "bound": None}

    def size(self, packed: Any) -> int:
        return int(packed["size"])

    def input(self, x: Array, dtype: str) -> Any:
        return self.runtime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x))

    def call(self, packed: Any, x: Any) -> Any:
        if packed["bound"] is None or packed["bound"][0] is not x:
            binding = packed["session"].io_binding()
            binding.bind_ortvalue_input("x", x)
            y = self.runtime.OrtValue.ortvalue_from_numpy(np.empty((x.shape()[0], packed["n"]), np.float32))
            binding.bind_ortvalue_output("y", y)
            packed["bound"] = (x, binding, y)
        packed["session"].run_with_iobinding(packed["bound"][1])
        return packed["bound"][2]

    def poison(self, y: Any) -> None:
        y.update_inplace(np.full(y.shape(), np.nan, np.float32))

    def output(self, y: Any) -> Array:
        result: Array = y.numpy().copy()
        return result


def _pin_threads() -> None:
    """The calling thread to the first CPU and each thread of the pool to one of the others, as OpenMP's are."""
    if not hasattr(os, "sched_setaffinity"):
        return
    first, *others = sorted(os.sched_getaffinity(0))
    set_affinity: Callable[[int, set[int]], None] = os.sched_setaffinity
    threads = sorted(int(task) for task in os.listdir("/proc/self/task"))
    for index, thread in enumerate(thread for thread in threads if thread != os.getpid()):
        if others:
            set_affinity(thread, {others[index % len(others)]})
    set_affinity(os.getpid(), {first})


class Accuracy4(_MatMulNBits):
    """``accuracy_level=4``: activations rounded to int8."""

    level, arithmetic = 4, "int8"


class Accuracy1(_MatMulNBits):
    """``accuracy_level=1``: fp32."""

    level, arithmetic = 1, "fp32"
