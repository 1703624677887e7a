# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's real engine on int4 folders and writes what it answered: ``python vllm_engine.py REQUEST ANSWER``.

The request is JSON: ``{"prompt": [token ids], "tokens": how many to generate, "runs": {name: {"folder": ..., more
arguments of vllm.LLM}}}``; a run may have a ``prompt`` and ``tokens`` of its own, and ``"logprobs": false``. The answer
maps each name to the tokens, the log-probabilities of the whole vocabulary at every position, and for each layer with
a kernel of vLLM's mixed-precision table the kernel's name and what it decided; or to the traceback.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_logprobs": -1,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "seed": 0,
}


def kernels(model: Any) -> dict[str, list[Any]]:
    """Name of each layer that has a kernel -> the kernel's class, and its act_bits if it is ours."""
    from vllm.model_executor.kernels.linear import MPLinearKernel

    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # The kernel hangs on the method, on a method within it, or on the layer's scheme: the formats differ.
        places = (method, getattr(method, "scheme", None), getattr(module, "scheme", None))
        for holder in (*places, *(getattr(place, "linear_method", None) for place in places)):
            kernel = getattr(holder, "kernel", None)
            if isinstance(kernel, MPLinearKernel):
                problem = getattr(kernel, "problem", None)
                found[name] = [type(kernel).__name__, None if problem is None else problem.act_bits]
    return found


def table(logprobs: Any) -> list[float]:
    """The log-probabilities of one position, by token."""
    return [logprobs[token].logprob for token in range(len(logprobs))]


def run(folder: str, prompt: list[int], tokens: int, logprobs: bool = True, **settings: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    inspects = "distributed_executor_backend" in settings  # in this process: a function can be handed to the model
    llm = LLM(folder, **(SETTINGS | settings))
    try:
        every = -1 if logprobs else None
        wanted = SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=every, prompt_logprobs=every, detokenize=False, ignore_eos=True
        )
        answer = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)[0]
        generated = answer.outputs[0]
        return {
            "tokens": list(generated.token_ids),
            "logprobs": [table(position) for position in (*answer.prompt_logprobs[1:], *generated.logprobs)]
            if logprobs
            else [],
            "kernels": llm.apply_model(kernels)[0] if inspects else {},
        }
    finally:
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    answers: dict[str, Any] = {}
    for name, settings in request["runs"].items():
        print(f"==== {name}", flush=True)
        try:
            answers[name] = run(**{"prompt": request["prompt"], "tokens": request["tokens"]} | settings)
        except Exception:
            answers[name] = {"error": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":  # vLLM starts its workers by importing this file again
    main()
