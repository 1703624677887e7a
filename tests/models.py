# SPDX-License-Identifier: Apache-2.0
"""Tiny random transformers folders, and ways to edit them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {"num_key_value_heads": None},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "intermediate_size": None},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
}
"""What a family (the library's ``model_type``) needs besides :data:`SIZES` to be tiny and to show what is its own."""


def write_float(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """A float folder of random weights, large enough for logits to differ; biases are not zero."""
    config = CONFIG_MAPPING[family](**(SIZES | SETTINGS.get(family, {}) | settings))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.2)
            elif not bool((parameter == 1).all()):
                parameter.data.normal_()
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite a folder's tensors as one file without an index."""
    found = tensors(folder)
    change(found)
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
