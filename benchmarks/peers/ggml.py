# SPDX-License-Identifier: Apache-2.0
"""ggml (llama.cpp): one matrix product on its CPU backend, called through its C interface; fp32 in and out.

Weights lie in ggml's "repack" buffer where its CPU backend has a kernel for them there, as llama.cpp places them. Its
types have blocks of 32: a larger group repeats its scale. Q4_0 has no zero points, Q4_1 has a minimum instead, which
holds them exactly, and Q4_K rounds the weights once more.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.base import Peer, Refused
from benchmarks.peers.data import Array, Weights

BLOCK = 32
_ROWS_AT_ONCE = 1024  # quantized by ggml together


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Traits(ctypes.Structure):
    """``ggml_type_traits``, as far as it is used."""

    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (c_void_p, (_InitParams,)),
    "ggml_free": (None, (c_void_p,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead": (c_size_t, ()),
    "ggml_new_tensor_2d": (c_void_p, (c_void_p, c_int, c_int64, c_int64)),
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    "ggml_get_data": (c_void_p, (c_void_p,)),
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ggml_new_graph": (c_void_p, (c_void_p,)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_quantize_chunk": (c_size_t, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "ggml_get_type_traits": (POINTER(_Traits), (c_int,)),
    "ggml_backend_cpu_init": (c_void_p, ()),
    "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
    "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    "ggml_backend_get_device": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_backend_reg": (c_void_p, (c_void_p,)),
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "ggml_backend_supports_op": (c_bool, (c_void_p, c_void_p)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
}


def _load() -> Any:
    """The library with its signatures.

    Raises:
        Refused: it is not installed, or lacks a function.
    """
    found = importlib.util.find_spec("libggml")
    if found is None or not found.submodule_search_locations:
        raise Refused("libggml-python is not installed")
    folder = Path(found.submodule_search_locations[0])
    try:
        paths = [next(folder.glob(f"lib*/lib{name}.so")) for name in ("ggml-base", "ggml-cpu", "ggml")]
        *_, library = (ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in paths)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (StopIteration, OSError, AttributeError) as error:
        raise Refused(f"libggml cannot be loaded: {error!r}") from error
    return library


class _MulMat(Peer):
    takes = ("fp32",)
    prepares_batches = True
    arithmetic = "int8"  # it rounds x to blocks of int8 itself
    code: ClassVar[int]  # enum ggml_type

    def setup(self) -> str:
        self.lib = _load()
        self.backend = self.lib.ggml_backend_cpu_init()
        self.lib.ggml_backend_cpu_set_n_threads(self.backend, self.threads)
        self.buffers = [*self._repack_buffers(), self.lib.ggml_backend_cpu_buffer_type()]
        return f"libggml-python {metadata.version('libggml-python')}"

    def _repack_buffers(self) -> list[int]:
        register = self.lib.ggml_backend_dev_backend_reg(self.lib.ggml_backend_get_device(self.backend))
        address = self.lib.ggml_backend_reg_get_proc_address(register, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        extra = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)
        listed = extra(self.lib.ggml_backend_get_device(self.backend))
        found: list[int] = []
        while listed and listed[len(found)]:
            found.append(listed[len(found)])
        return found

    def _context(self, tensors: int) -> int:
        size = tensors * self.lib.ggml_tensor_overhead() + self.lib.ggml_graph_overhead()
        context: int = self.lib.ggml_init(_InitParams(size, None, True))
        return context

    def rows(self, weights: Weights) -> Array:
        """The weights in ggml's own format, uint8 [N, bytes of a row]."""
        raise NotImplementedError

    def prepare(self, weights: Weights, dtype: str) -> Any:
        if weights.group % BLOCK:
            raise Refused(f"group size {weights.group} is not a multiple of its block, {BLOCK}")
        return self._place(self.rows(weights), weights.k, weights.n)

    def _place(self, raw: Array, k: int, n: int) -> dict[str, Any]:
        lib = self.lib
        for buffer_type in self.buffers:
            context = self._context(2)
            w = lib.ggml_new_tensor_2d(context, self.code, k, n)
            if lib.ggml_nbytes(w) != raw.nbytes:
                raise ValueError(f"{raw.nbytes} bytes of weights for a tensor of {lib.ggml_nbytes(w)}")
            buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
            packed = {"raw": raw, "k": k, "n": n, "w": w, "context": context, "buffer": buffer, "graph": None}
            if buffer:
                trial = self._graph(packed, 4)
                runs = lib.ggml_backend_supports_op(self.backend, trial["y"])
                self._free_graph(trial)
                if runs:
                    lib.ggml_backend_tensor_set(w, raw.ctypes.data, 0, raw.nbytes)
                    return packed
                lib.ggml_backend_buffer_free(buffer)
            lib.ggml_free(context)
        raise Refused("its CPU backend has no kernel for these weights")

    def _graph(self, packed: dict[str, Any], m: int) -> dict[str, Any]:
        lib, context = self.lib, self._context(4)
        x = lib.ggml_new_tensor_2d(context, 0, packed["k"], m)  # 0: fp32
        y = lib.ggml_mul_mat(context, packed["w"], x)
        graph = lib.ggml_new_graph(context)
        lib.ggml_build_forward_expand(graph, y)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, lib.ggml_backend_cpu_buffer_type())
        return {"context": context, "buffer": buffer, "x": x, "y": y, "graph": graph, "shape": (m, packed["n"])}

    def _free_graph(self, graph: dict[str, Any]) -> None:
        self.lib.ggml_backend_buffer_free(graph["buffer"])
        self.lib.ggml_free(graph["context"])

    def clone(self, packed: Any) -> Any:
        return self._place(packed["raw"], packed["k"], packed["n"])

    def size(self, packed: Any) -> int:
        return int(packed["raw"].nbytes)

    def input(self, x: Array, dtype: str) -> Any:
        return np.ascontiguousarray(x)

    def call(self, packed: Any, x: Any) -> Any:
        if packed["graph"] is None or packed["graph"]["of"] is not x:
            self._drop_graph(packed)
            packed["graph"] = self._graph(packed, len(x)) | {"of": x}
            self.lib.ggml_backend_tensor_set(packed["graph"]["x"], x.ctypes.data, 0, x.nbytes)
        status = self.lib.ggml_backend_graph_compute(self.backend, packed["graph"]["graph"])
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return packed["graph"]

    def _array(self, y: Any) -> Array:
        return np.ctypeslib.as_array(ctypes.cast(self.lib.ggml_get_data(y["y"]), POINTER(c_float)), y["shape"])

    def poison(self, y: Any) -> None:
        self._array(y)[:] = np.nan

    def output(self, y: Any) -> Array:
        return self._array(y).copy()

    def _drop_graph(self, packed: Any) -> None:
        if packed["graph"] is not None:
            self._free_graph(packed["graph"])
            packed["graph"] = None

    def free(self, packed: Any) -> None:
        self._drop_graph(packed)
        self.lib.ggml_backend_buffer_free(packed["buffer"])
        self.lib.ggml_free(packed["context"])


def _blocks(weights: Weights) -> tuple[Array, Array, Array]:
    """Nibbles uint8 [N, K / 32, 16] (element i low, i + 16 high), scales and zero points [N, K / 32]."""
    q = np.ascontiguousarray(weights.q.T).reshape(weights.n, -1, BLOCK)
    repeats = weights.group // BLOCK
    scales, zeros = (np.repeat(values.T, repeats, axis=1) for values in (weights.scales, weights.zeros))
    return q[..., :16] | (q[..., 16:] << 4), scales, zeros


def _fp16_bytes(values: Array) -> Array:
    return np.ascontiguousarray(values.astype(np.float16)).view(np.uint8).reshape(*values.shape, 2)


class Q40(_MulMat):
    """Q4_0."""

    zero_points, code = False, 2

    def rows(self, weights: Weights) -> Array:
        nibbles, scales, _ = _blocks(weights)
        return np.concatenate((_fp16_bytes(scales), nibbles), axis=2).reshape(weights.n, -1)


class Q41(_MulMat):
    """Q4_1: q * d + m with m = -z * d."""

    code = 3

    def rows(self, weights: Weights) -> Array:
        nibbles, scales, zeros = _blocks(weights)
        parts = (_fp16_bytes(scales), _fp16_bytes(-scales * zeros), nibbles)
        return np.concatenate(parts, axis=2).reshape(weights.n, -1)


class Q4K(_MulMat):
    """Q4_K: blocks of 256 with scales of 6 bits, quantized by ggml from the dequantized weights."""

    code, own_weights = 12, True

    def rows(self, weights: Weights) -> Array:
        if weights.k % 256:
            raise Refused(f"K={weights.k} is not a multiple of 256")
        w = np.ascontiguousarray(weights.float32().T)
        raw = np.empty((weights.n, self.lib.ggml_row_size(self.code, weights.k)), np.uint8)
        for start in range(0, weights.n, _ROWS_AT_ONCE):
            some, into = w[start : start + _ROWS_AT_ONCE], raw[start:]
            self.lib.ggml_quantize_chunk(self.code, some.ctypes.data, into.ctypes.data, 0, len(some), weights.k, None)
        return raw

    def weights_of(self, packed: Any, columns: Array) -> Array:
        rows = np.ascontiguousarray(packed["raw"][columns])
        w = np.empty((len(rows), packed["k"]), np.float32)
        self.lib.ggml_get_type_traits(self.code).contents.to_float(rows.ctypes.data, w.ctypes.data, w.size)
        return w.T.astype(np.float64)
