# SPDX-License-Identifier: Apache-2.0
"""One process of one environment: holds its contenders' weights, checks and times calls as it is told.

``python -m benchmarks.worker THREADS CPU,CPU,...`` reads one JSON command a line and answers each with one line. It
imports numpy and the peers alone, so that it runs in any of their environments. See :class:`benchmarks.rounds.Worker`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers.base import Peer, Refused
from benchmarks.peers.data import (
    CHECKED_COLUMNS,
    CHECKED_ROWS,
    Array,
    Weights,
    ends,
    make_weights,
    make_x,
    relative_error,
)
from benchmarks.peers.registry import BY_NAME

WARM_SECONDS = 0.3


@dataclass
class Layer:
    """One contender's copies of one layer."""

    peer: Peer
    dtype: str
    copies: list[Any]
    reference: Array  # float64 [K, checked columns]
    columns: Array
    next_copy: int = 0
    warm: bool = False

    def call(self, x: Any) -> Any:
        """Compute with the copy that was used longest ago."""
        packed = self.copies[self.next_copy]
        self.next_copy = (self.next_copy + 1) % len(self.copies)
        return self.peer.call(packed, x)


class Worker:
    """State between commands: contenders, the layer they hold, the x they were given last."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.peers: dict[str, Peer] = {}
        self.layers: dict[str, Layer] = {}
        self.inputs: dict[str, Any] = {}
        self.shape = (0, 0, 0)
        self.dtype = ""

    def open(self, names: list[str]) -> dict[str, Any]:
        """Load libraries: name -> version, or why not."""
        answer: dict[str, Any] = {}
        for name in names:
            peer = BY_NAME[name].load()(self.threads)
            try:
                answer[name] = {"version": peer.setup()}
            except Refused as error:
                answer[name] = {"absent": str(error)}
            else:
                self.peers[name] = peer
        return answer

    def prepare(self, k: int, n: int, group: int, dtype: str, names: list[str], rotate_bytes: int) -> dict[str, Any]:
        """Drop the last layer and pack this one, in copies of more than ``rotate_bytes`` together."""
        self.drop()
        self.shape, self.dtype = (k, n, group), dtype
        made: dict[bool, tuple[Weights, Array]] = {}
        columns = ends(n, CHECKED_COLUMNS)
        answer: dict[str, Any] = {}
        for name in names:
            peer = self.peers[name]
            try:
                taken = peer.dtype_for(dtype)
                if peer.zero_points not in made:
                    weights = make_weights(k, n, group, zero_points=peer.zero_points)
                    made[peer.zero_points] = (weights, weights.float64(columns))
                weights, reference = made[peer.zero_points]
                packed = peer.prepare(weights, taken)
                peer.call(packed, peer.input(make_x(1, k, taken, outliers=False), taken))
            except Refused as error:
                answer[name] = {"absent": str(error)}
                continue
            except Exception as error:  # another's library fails in any way it likes; the results record it
                traceback.print_exc()
                answer[name] = {"absent": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
                continue
            size = peer.size(packed)
            count = min(rotate_bytes // size + 1, peer.max_copies)
            copies = [packed, *(peer.clone(packed) for _ in range(count - 1))]
            if peer.own_weights:
                reference = peer.weights_of(packed, columns)
            self.layers[name] = Layer(peer, taken, copies, reference, columns)
            answer[name] = {"bytes": size, "copies": count, "takes": taken, "arithmetic": peer.arithmetic_for(taken)}
        return answer

    def check(self, name: str, m: int, kinds: list[str]) -> dict[str, Any]:
        """Relative error against float64 on "plain" data and on data with "outliers", outputs poisoned before."""
        layer = self.layers[name]
        rows = ends(m, CHECKED_ROWS)
        answer: dict[str, Any] = {}
        try:
            for kind in kinds:
                values = make_x(m, self.shape[0], self.dtype, outliers=kind == "outliers")
                x = layer.peer.input(values, layer.dtype)
                y = self._poisoned(layer, x)
                reference = values[rows].astype(np.float64) @ layer.reference
                finite = bool(np.isfinite(y).all())  # of all, not only what is compared
                answer[kind] = relative_error(y[np.ix_(rows, layer.columns)], reference) if finite else float("nan")
        except Exception as error:
            traceback.print_exc()
            return {"absent": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}
        return answer

    def _poisoned(self, layer: Layer, x: Any) -> Array:
        """An output of memory that held NaN before: all copies' own memory, or what the allocator gives again."""
        for _ in layer.copies[:2]:
            y = layer.call(x)
            layer.peer.poison(y)
            del y
        layer.next_copy = (layer.next_copy - 2) % len(layer.copies)
        return layer.peer.output(layer.call(x))

    def input(self, m: int, names: list[str]) -> dict[str, Any]:
        """Make the activations of the next timings."""
        self.inputs = {}
        values = make_x(m, self.shape[0], self.dtype, outliers=False)
        for name in names:
            self.inputs[name] = self.layers[name].peer.input(values, self.layers[name].dtype)
        return {}

    def warm(self, name: str) -> dict[str, Any]:
        """Use every copy once: many libraries rearrange weights, or make scratch memory, at the first call.

        Where that happens once, and not for every batch size, it stops after a while at the second one.

        Returns:
            ``seconds`` of a call after that, to tell slow contenders.
        """
        layer, x = self.layers[name], self.inputs[name]
        end = time.perf_counter() + WARM_SECONDS
        for _ in layer.copies:
            layer.call(x)
            if layer.warm and not layer.peer.prepares_batches and time.perf_counter() > end:
                break
        layer.warm = True
        times: list[float] = []
        while len(times) < 3 and sum(times) < WARM_SECONDS:
            start = time.perf_counter()
            layer.call(x)
            times.append(time.perf_counter() - start)
        return {"seconds": min(times)}

    def time(self, names: list[str], seconds: float, most: int) -> dict[str, Any]:
        """Seconds of each call: contenders take turns call by call, and the order turns by one each time."""
        layers = [(self.layers[name], self.inputs[name]) for name in names]
        times: list[list[float]] = [[] for _ in names]
        if seconds > 0:
            for layer, x in layers:  # wakes threads up
                layer.call(x)
        gc.disable()
        try:
            end = time.perf_counter() + seconds * len(names)
            turn = 0
            while turn == 0 or (turn < most and time.perf_counter() < end):
                for step in range(len(layers)):
                    index = (turn + step) % len(layers)
                    layer, x = layers[index]
                    start = time.perf_counter()
                    layer.call(x)
                    times[index].append(time.perf_counter() - start)
                turn += 1
        finally:
            gc.enable()
        return dict(zip(names, times, strict=True))

    def drop(self) -> dict[str, Any]:
        """Give all weights back."""
        self.inputs = {}
        for layer in self.layers.values():
            for packed in layer.copies:
                layer.peer.free(packed)
        self.layers = {}
        gc.collect()
        return {}


def main() -> None:
    threads, cpus = int(sys.argv[1]), [int(cpu) for cpu in sys.argv[2].split(",") if cpu]
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    # Libraries print what they like; answers go where only this program writes.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker(threads)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
