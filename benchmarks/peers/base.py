# SPDX-License-Identifier: Apache-2.0
"""What an adapter has to say about its contender, and the parts that those on torch share."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.data import Array, Weights


class Refused(Exception):
    """A contender that cannot run here, or not this layer; the message says why."""


class Peer:
    """One way to compute ``y = x W``.

    A peer's packed weights are an object of its own making; ``clone`` gives the same in fresh memory, so that calls can
    use copies in rotation. Everything between ``call`` and its return is timed: what the peer does to activations that
    it gets in one of ``takes`` counts, converting them into that dtype does not.

    Attributes:
        takes: dtypes of x it accepts. One that takes only fp32 gets fp32 instead of bf16 or fp16.
        arithmetic: what its products run in: ``int8``, ``bf16`` or ``fp32``; the peak of that is its limit.
        zero_points: whether its weights can have them; others get weights whose zero points are all 8.
        weight_bits: 4, or more for dense layers.
        own_weights: it rounds the weights once more: its error is measured against its own.
        prepares_batches: each copy makes ready for each new batch size at its first call.
        max_copies: of the weights, where more would disturb it.
    """

    takes: ClassVar[tuple[str, ...]] = ("bf16",)
    arithmetic: ClassVar[str] = "bf16"
    zero_points: ClassVar[bool] = True
    weight_bits: ClassVar[int] = 4
    own_weights: ClassVar[bool] = False
    prepares_batches: ClassVar[bool] = False
    max_copies: ClassVar[int] = 1 << 20

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @classmethod
    def dtype_for(cls, dtype: str) -> str:
        """The dtype it gets where the layer's activations are ``dtype``.

        Raises:
            Refused: it takes neither that nor fp32 in its place.
        """
        if dtype in cls.takes:
            return dtype
        if cls.takes == ("fp32",):
            return "fp32"
        raise Refused(f"takes x in {', '.join(cls.takes)}, not {dtype}")

    @classmethod
    def arithmetic_for(cls, dtype: str) -> str:
        """What its products run in where x is ``dtype``."""
        return cls.arithmetic

    def setup(self) -> str:
        """Load the library, set its threads, and return its version.

        Raises:
            Refused: the library, or the CPU for it, is not here.
        """
        raise NotImplementedError

    def prepare(self, weights: Weights, dtype: str) -> Any:
        """Pack the weights for activations of ``dtype``.

        Raises:
            Refused: not a layer it can compute.
        """
        raise NotImplementedError

    def clone(self, packed: Any) -> Any:
        """The same weights in memory of their own."""
        raise NotImplementedError

    def size(self, packed: Any) -> int:
        """Bytes of the packed weights, scales and zero points: what one call has to read."""
        raise NotImplementedError

    def input(self, x: Array, dtype: str) -> Any:
        """Float32 activations as the peer takes them."""
        raise NotImplementedError

    def call(self, packed: Any, x: Any) -> Any:
        """Compute; this is what is timed."""
        raise NotImplementedError

    def poison(self, y: Any) -> None:
        """Write NaN over an output's memory, and give the memory back for the next call to take."""
        raise NotImplementedError

    def output(self, y: Any) -> Array:
        """An output as float32 [M, N], in memory of its own."""
        raise NotImplementedError

    def weights_of(self, packed: Any, columns: Array) -> Array:
        """Float64 [K, len(columns)] of the peer's own rounding; only where ``own_weights``."""
        raise NotImplementedError

    def free(self, packed: Any) -> None:
        """Give back what Python does not."""


def pack_columns(values: Array, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Array:
    """uint8 [R, N] below 16 -> int32 [R, N / 8]; nibble i of a word holds column ``order[i]`` of its eight.

    Raises:
        Refused: N is no multiple of 8.
    """
    rows, n = values.shape
    if n % 8:
        raise Refused(f"N={n} is not a multiple of 8")
    eights = values.reshape(rows, n // 8, 8)
    words = np.zeros((rows, n // 8), np.uint32)
    for nibble, column in enumerate(order):
        words |= eights[:, :, column].astype(np.uint32) << (4 * nibble)
    return words.view(np.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""How AWQ checkpoints order the eight columns of a word."""


def pack_pairs(values: Array) -> Array:
    """uint8 [..., 2k] below 16 -> uint8 [..., k], the even one in the low nibble."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


class TorchPeer(Peer):
    """Packed weights are a tuple of tensors and numbers, outputs are fresh tensors."""

    def setup(self) -> str:
        try:
            import torch
        except ImportError as error:
            raise Refused(f"torch cannot be imported: {error}") from error
        self.torch = torch
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        self.dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return self.load()

    def load(self) -> str:
        """Load what is needed besides torch, and return the version."""
        return f"torch {self.torch.__version__}"

    def clone(self, packed: Any) -> Any:
        return tuple(part.clone() if isinstance(part, self.torch.Tensor) else part for part in packed)

    def size(self, packed: Any) -> int:
        tensors = (part for part in packed if isinstance(part, self.torch.Tensor))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def input(self, x: Array, dtype: str) -> Any:
        return self.torch.from_numpy(x).to(self.dtypes[dtype], copy=True)

    def poison(self, y: Any) -> None:
        y.fill_(self.torch.nan)  # the allocator gives the next output of the same size the same memory

    def output(self, y: Any) -> Array:
        result: Array = y.to(self.torch.float32, copy=True).numpy()
        return result
