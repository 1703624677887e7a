# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: ``python vllm_worker.py SETTINGS``, started by `benchmarks.vllm_models`.

The settings are JSON: ``{"folder": ..., "dtype": ..., "force_w4a8": bool}``. The process answers one JSON line when its
engine is up, and one for each request line ``{"prefill": tokens, "decode": tokens, "batches": [sizes], "seed": n}``.
Everything else that vLLM prints goes to stderr. Needs vLLM and nothing of this project.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any, TextIO

SHORT_PROMPT = 16  # tokens before the decoding that is timed


def force_w4a8() -> None:
    """Make vLLM's own CPU kernel run its W4A8 operator, which it picks by itself only on a CPU with AMX."""
    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel

    original = CPUWNA16LinearKernel.process_weights_after_loading

    def forced(self: Any, layer: Any) -> None:
        asked = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        try:
            original(self, layer)
        finally:
            torch.cpu._is_amx_tile_supported = asked

    CPUWNA16LinearKernel.process_weights_after_loading = forced


def kernels(model: Any) -> dict[str, int]:
    """Kernel class of vLLM's mixed-precision table -> how many layers have it."""
    from vllm.model_executor.kernels.linear import MPLinearKernel

    found: dict[str, int] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        places = (method, getattr(method, "scheme", None), getattr(module, "scheme", None))
        for holder in (*places, *(getattr(place, "linear_method", None) for place in places)):
            kernel = getattr(holder, "kernel", None)
            if isinstance(kernel, MPLinearKernel):
                name = type(kernel).__name__
                found[name] = found.get(name, 0) + 1
                break
    return found


class Worker:
    """An engine and its measurements."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        if settings["force_w4a8"]:
            force_w4a8()
        start = time.perf_counter()
        self.llm = LLM(
            settings["folder"],
            dtype=settings["dtype"],
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
            seed=0,
        )
        self.ready = {
            "load_seconds": time.perf_counter() - start,
            "kernels": self.llm.apply_model(kernels)[0],
            "threads": torch.get_num_threads(),
        }

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of each prompt."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        return time.perf_counter() - start, [list(answer.outputs[0].token_ids) for answer in answers]

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds of one prefill with one token; seconds of a step of decoding, for each number of sequences."""
        draw = random.Random(request["seed"])

        def prompt(length: int) -> list[int]:
            return [draw.randrange(1, 31_000) for _ in range(length)]

        seconds, first = self.generate([prompt(request["prefill"])], 1)
        found: dict[str, Any] = {"prefill": seconds, "tokens": first[0], "decode": {}}
        for batch in request["batches"]:
            prompts = [prompt(SHORT_PROMPT) for _ in range(batch)]
            short, _ = self.generate(prompts, 1)
            long, tokens = self.generate(prompts, 1 + request["decode"])
            found["decode"][str(batch)] = (long - short) / request["decode"]
            found["tokens"] += tokens[0]
        return found


def answer(channel: TextIO, value: dict[str, Any]) -> None:
    channel.write(json.dumps(value) + "\n")
    channel.flush()


def main() -> None:
    # vLLM prints to stdout too, from native code among others: the answers get a descriptor of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(json.loads(sys.argv[1]))
    answer(channel, worker.ready)
    for line in sys.stdin:
        answer(channel, worker.measure(json.loads(line)))


if __name__ == "__main__":
    main()
