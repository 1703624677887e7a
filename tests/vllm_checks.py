# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, and what they have to answer: used by the tests of vLLM's real engine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from models import tensors

import awqjit
from awqjit import config, formats
from awqjit.jit import forget

PROMPT = [1, 17, 99, 4, 56, 23, 120, 64]
TOKENS = 6


@dataclass(frozen=True)
class Engine:
    """Starts engines in one child process; they share kernels with the tests."""

    directory: Path
    cache: Path

    def ask(self, runs: Mapping[str, Mapping[str, Any]], **variables: str) -> tuple[dict[str, Any], str]:
        """The answers by name, and the log."""
        request, answer = self.directory / "request.json", self.directory / "answer.json"
        request.write_text(json.dumps({"prompt": PROMPT, "tokens": TOKENS, "runs": runs}))
        answer.unlink(missing_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "AWQJIT_"))}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("vllm_engine.py")), str(request), str(answer)],
            env=inherited
            | {"AWQJIT_CACHE_DIR": str(self.cache), "VLLM_CACHE_ROOT": str(self.directory / "vllm")}
            | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
            | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=900,
        )
        assert answer.exists(), done.stdout[-5000:]
        answers = json.loads(answer.read_text())
        for name, found in answers.items():
            assert "error" not in found, f"{name}: {found.get('error')}"
        return answers, done.stdout

    def ask_in_process(self, runs: Mapping[str, Mapping[str, Any]], **variables: str) -> tuple[dict[str, Any], str]:
        """The same with vLLM's worker in the child process itself, where its layers can be looked at."""
        settings = {"distributed_executor_backend": "uni"}
        runs = {name: {**run, **settings} for name, run in runs.items()}
        return self.ask(runs, VLLM_ENABLE_V1_MULTIPROCESSING="0", **variables)


@cache
def weights_of(folder: Path) -> dict[str, awqjit.QuantizedWeight]:
    """What the int4 layers hold, by name. Other tests show that each packer's layers are read bit for bit."""
    found = tensors(folder)
    format = formats.parse(formats.find_config(folder, json.loads((folder / "config.json").read_text())))
    weights = {}
    for name in {key.rpartition(".")[0] for key in found if key.rpartition(".")[2] in formats.MARKS}:
        parts = {key.rpartition(".")[2]: tensor for key, tensor in found.items() if key.startswith(f"{name}.")}
        weights[name] = format.layer(name).read({last: part for last, part in parts.items() if last != "bias"})
    return weights


@cache
def model_of(folder: Path, dtype: torch.dtype, compute: str = "w4a16") -> Any:
    """transformers' model. In float64 its weights are multiplied out; else int4 layers compute in plain torch."""
    described = transformers.AutoConfig.from_pretrained(folder)
    del described.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
    weights = weights_of(folder)
    dense = (key for key in tensors(folder) if key.rpartition(".")[0] not in weights or key.endswith(".bias"))
    state = {key: tensors(folder)[key].float() for key in dense}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if described.tie_word_embeddings else set()
    assert not unexpected and set(missing) <= {f"{name}.weight" for name in weights} | tied
    model.tie_weights()
    model = model.to(dtype)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        if dtype == torch.float64:
            layer.weight = torch.nn.Parameter(weight.dequantize(dtype).T)
        else:  # vLLM holds scales in the model's dtype
            weight = dataclasses.replace(weight, scales=weight.scales.to(dtype))
            bias = None if layer.bias is None else layer.bias.data
            model.set_submodule(name, awqjit.Int4Linear.from_quantized(weight, bias, compute=compute))
    return model.eval()


def logprobs_of(folder: Path, ids: list[int], dtype: torch.dtype, compute: str = "w4a16") -> torch.Tensor:
    """float64 [len(ids), vocabulary]."""
    with config.override(kernel="torch"), torch.no_grad():
        forget()
        logits = model_of(folder, dtype, compute)(torch.tensor([ids])).logits[0]
    forget()
    return logits.double().log_softmax(-1)


def errors_of(answer: Any, folder: Path, dtype: str, compute: str = "w4a16") -> tuple[torch.Tensor, ...]:
    """float64 log-probabilities [positions, vocabulary] of the weights; the answer's distance; that of the dtype.

    The last is the distance of transformers' model in the same dtype. Both round the same quantities to it, in other
    orders: two draws from one distribution.
    """
    ids = PROMPT + answer["tokens"][:-1]
    wanted = logprobs_of(folder, ids, torch.float64)
    found = torch.tensor(answer["logprobs"], dtype=torch.float64)
    return wanted, found - wanted, logprobs_of(folder, ids, getattr(torch, dtype), compute) - wanted


def assert_answers_as_the_weights_do(answer: Any, folder: Path, dtype: str, compute: str = "w4a16") -> None:
    """Log-probabilities as near to float64's as those of transformers' model in the same dtype, times 8; and tokens.

    The largest value over more than a thousand log-probabilities varies far less than that between two draws.
    """
    wanted, difference, rounding = errors_of(answer, folder, dtype, compute)
    error, noise = difference.abs().max(), rounding.abs().max()
    assert wanted.std() > 0.5 and noise < 0.2 * wanted.std(), "these logits would hide an error"
    assert error <= 8 * noise, f"error {error:.2e}, arithmetic in {dtype} explains {noise:.2e}"
    # Greedy: each token is the most likely one, or as likely as the arithmetic can tell.
    steps = wanted[len(PROMPT) - 1 :]
    chosen = steps.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0]
    assert (steps.max(1).values - chosen <= 16 * noise).all()
    assert (steps.argmax(1) == torch.tensor(answer["tokens"])).sum() >= TOKENS - 1
