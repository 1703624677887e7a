# SPDX-License-Identifier: Apache-2.0
"""One contender of the demo, in a process of its own so that its peak memory is its own.

``python -m awqjit.cli.contender FOLDER KIND COMPUTE RESULT [QUESTION]``: KIND is "int4" or "dense"; the answer to
QUESTION, if given, goes to stdout as it comes, the figures go to the file RESULT as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from awqjit import config, jit
from awqjit.cli.generate import encode, greedy, load_tokenizer, stream
from awqjit.errors import AwqJitError
from awqjit.integrations.transformers import from_pretrained, read_config, require_transformers, skeleton
from awqjit.modules import Int4Linear

PREFILL_TOKENS = 256
DECODE_TOKENS = 32
ANSWER_TOKENS = 48
FIRST_DECODE_TOKENS = 4  # of a first run, which tells how many the next ones can take
MAX_SECONDS = 4.0  # of each further decode run: fewer tokens on a slow machine
ROUNDS = 2  # the best of them is reported: the first also fills caches


def resident_bytes() -> int:
    """Memory this process has in RAM now; where /proc is missing its peak so far, which after imports is close."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most memory this process has had in RAM."""
    try:
        # Not ru_maxrss: that starts with the peak of the process that started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
    if config.JIT.read() and all(choice.kernel.name not in jit.WITHOUT_COMPILER for choice in choices):
        with tempfile.TemporaryDirectory() as empty, config.override(cache_dir=empty, cache_path=None):
            compiled = {choice.problem: choice.compile_seconds for choice in _choose_again(choices)}
        _choose_again(choices)
    return [
        {
            "in_features": choice.problem.k,
            "out_features": choice.problem.n,
            "group_size": choice.problem.group_size,
            "layers": counts[choice.problem],
            "kernel": choice.kernel.name,
            "passed_over": [f"{row}: {reason}" for row, reason in choice.refusals],
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
    before = resident_bytes()
    start = time.perf_counter()
    model = from_pretrained(folder, dtype=torch.bfloat16, compute=compute, progress=question is not None)
    if kind == "dense":
        to_dense(model, torch.bfloat16)
    load_seconds = time.perf_counter() - start
    choices = jit.warm(model, show_progress=question is not None)
    found: dict[str, Any] = {"load_seconds": load_seconds}
    if question is not None:
        answer = stream(
            model, tokenizer, question, max_new_tokens=ANSWER_TOKENS, write=lambda text: print(text, end="", flush=True)
        )
        print(flush=True)
        found["answer"] = answer.text
    found |= measure(model, tokenizer, question or "Say something about the weather, the sea and the mountains.")
    found["peak_bytes"] = peak_bytes() - before
    if kind == "int4":
        found["kernels"] = kernels(model, choices)
    return found


if __name__ == "__main__":
    folder, kind, compute, result, *question = sys.argv[1:]
    try:
        found = run(folder, kind, compute, question[0] if question else None)
    except AwqJitError as error:
        found = {"error": str(error)}
    Path(result).write_text(json.dumps(found), encoding="utf-8")
