# SPDX-License-Identifier: Apache-2.0
"""One contender of the demo, in a process of its own so that its peak memory is its own.

``python -m awqjit.cli.contender FOLDER KIND COMPUTE RESULT [QUESTION]``: KIND is "int4" or "dense"; the answer to
QUESTION, if given, goes to stdout as it comes, the figures go to the file RESULT as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from awqjit import config, jit, select
from awqjit.cli.common import plain_warnings
from awqjit.cli.generate import encode, greedy, load_tokenizer, stream
from awqjit.cli.kernels import no_compiler
from awqjit.errors import AwqJitError
from awqjit.integrations.transformers import from_pretrained, read_config, require_transformers, skeleton
from awqjit.modules import Int4Linear

PREFILL_TOKENS = 256
DECODE_TOKENS = 32
ANSWER_TOKENS = 48
FIRST_DECODE_TOKENS = 4  # of a first run, which tells how many the next ones can take
MAX_SECONDS = 4.0  # of each further decode run: fewer tokens on a slow machine
WATCH_SECONDS = 0.02  # between two looks at the memory; a look takes some 0.05 ms
ROUNDS = 2  # the best of them is reported: the first also fills caches


def own_bytes() -> int | None:
    """Memory of this process's own in RAM; pages of mapped files, which the system can drop, do not count.

    None where /proc/self/status does not tell.
    """
    try:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return None


class Peak:
    """The most memory since the start of a block.

    Attributes:
        bytes: the peak, less what was there at the start.
        counts: what was counted, for a table.
    """

    def __init__(self, counts: str) -> None:
        self.bytes = 0
        self.counts = counts


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Watch this process's memory for a block. Where own memory is not told, the peak of all of it, files included."""
    before = own_bytes()
    if before is None:
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        peak = Peak("with mapped files")
        yield peak
        peak.bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - most
        return
    peak, done = Peak("without mapped files"), threading.Event()

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            look()

    def look() -> None:
        peak.bytes = max(peak.bytes, (own_bytes() or 0) - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        look()


def to_dense(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every int4 layer by an ``nn.Linear`` of the same weights, one at a time."""
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, Int4Linear):
            continue
        dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        weight = layer.quantized().dequantize(dtype).T.contiguous()
        dense.weight = nn.Parameter(weight, requires_grad=False)
        if layer.bias is not None:
            dense.bias = nn.Parameter(layer.get_parameter("bias").to(dtype), requires_grad=False)
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, dense)


def kernels(model: nn.Module, choices: tuple[jit.Choice, ...]) -> list[dict[str, Any]]:
    """One row per distinct problem: its layers, the kernel and why, seconds to compile and to load from the cache."""
    counts: dict[Any, int] = {}
    dtype = next(parameter.dtype for parameter in model.parameters())
    for layer in model.modules():
        if isinstance(layer, Int4Linear):
            counts[layer.problem(dtype)] = counts.get(layer.problem(dtype), 0) + 1
    loaded = {choice.problem: choice.seconds for choice in _choose_again(choices)}
    compiled: dict[Any, float] = {}
    if no_compiler() is None and all(choice.kernel.name not in jit.WITHOUT_COMPILER for choice in choices):
        with tempfile.TemporaryDirectory() as empty, config.override(cache_dir=empty, cache_path=None):
            compiled = {choice.problem: choice.compile_seconds for choice in _choose_again(choices)}
        _choose_again(choices)
    rows = {row.name: row for row in select.ROWS}
    return [
        {
            "in_features": choice.problem.k,
            "out_features": choice.problem.n,
            "group_size": choice.problem.group_size,
            "layers": counts[choice.problem],
            "kernel": choice.kernel.name,
            "passed_over": [
                {"kernel": name, "reason": reason}
                for name, reason in choice.refusals
                if (target := rows[name].target) is None or choice.problem.act_bits in target.act_bits
            ],
            "compile_seconds": compiled.get(choice.problem),
            "load_seconds": loaded[choice.problem],
        }
        for choice in choices
    ]


def _choose_again(choices: tuple[jit.Choice, ...]) -> list[jit.Choice]:
    jit.forget()
    return [jit.choose(choice.problem) for choice in choices]


def _decode_step(model: Any, inputs: Any, tokens: int) -> float:
    """Mean seconds of a decode step over ``tokens`` steps of ``model.generate``."""
    ticks: list[float] = []

    class Ticks:
        def put(self, value: torch.Tensor) -> None:
            ticks.append(time.perf_counter())

        def end(self) -> None:
            pass

    with torch.inference_mode():
        settings = greedy(model, tokens + 1, min_new_tokens=tokens + 1)
        model.generate(**inputs, generation_config=settings, streamer=Ticks())
    # ticks: the prompt, the first token (prefill), then one per decode step
    return (ticks[-1] - ticks[1]) / tokens


def measure(model: Any, tokenizer: Any, text: str) -> dict[str, float]:
    """Tokens per second of prefill (PREFILL_TOKENS in one go) and decode (up to DECODE_TOKENS one by one), batch 1."""
    inputs = encode(tokenizer, text)
    ids = inputs["input_ids"].repeat(1, -(-PREFILL_TOKENS // inputs["input_ids"].shape[1]))[:, :PREFILL_TOKENS]
    prefill = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            start = time.perf_counter()
            model(ids, logits_to_keep=1)
            prefill.append(time.perf_counter() - start)
    step = _decode_step(model, inputs, FIRST_DECODE_TOKENS)
    tokens = max(FIRST_DECODE_TOKENS, min(DECODE_TOKENS, int(MAX_SECONDS / step)))
    decode = [step, *(_decode_step(model, inputs, tokens) for _ in range(ROUNDS))]
    return {
        "prefill_tokens_per_second": PREFILL_TOKENS / min(prefill),
        "decode_tokens_per_second": 1 / min(decode),
    }


def run(folder: str, kind: str, compute: str, question: str | None) -> dict[str, Any]:
    """Load the model, answer the question if there is one, and measure."""
    transformers = require_transformers("the demo")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = load_tokenizer(folder)
    skeleton(read_config(folder), torch.bfloat16)  # imports the model's own code
    with peak_memory() as peak:
        start = time.perf_counter()
        model = from_pretrained(folder, dtype=torch.bfloat16, compute=compute, progress=question is not None)
        if kind == "dense":
            to_dense(model, torch.bfloat16)
        found: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
        choices = jit.warm(model, show_progress=question is not None)
        if question is not None:
            answer = stream(
                model,
                tokenizer,
                question,
                max_new_tokens=ANSWER_TOKENS,
                write=lambda text: print(text, end="", flush=True),
            )
            print(flush=True)
            found["answer"] = answer.text
        found |= measure(model, tokenizer, question or "Say something about the weather, the sea and the mountains.")
    found |= {"peak_bytes": peak.bytes, "peak_counts": peak.counts}
    if kind == "int4":
        found["kernels"] = kernels(model, choices)
    return found


if __name__ == "__main__":
    folder, kind, compute, result, *question = sys.argv[1:]
    try:
        with plain_warnings():
            found = run(folder, kind, compute, question[0] if question else None)
    except AwqJitError as error:
        found = {"error": str(error)}
    Path(result).write_text(json.dumps(found), encoding="utf-8")
