# SPDX-License-Identifier: Apache-2.0
"""AWQ folders of real models' shapes with random weights: speed depends on shapes only, and nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from awqjit import progress
from awqjit.checkpoint import new_folder
from awqjit.integrations.transformers import require_transformers
from benchmarks.common import LARGE_GROUP

VOCABULARY = 32_000  # fewer tokens than the real models have: the head is float in every contender


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model."""

    hidden: int
    middle: int
    blocks: int
    heads: int
    key_value_heads: int


SHAPES: dict[str, Shape] = {
    "qwen2-0.5b": Shape(hidden=896, middle=4864, blocks=24, heads=14, key_value_heads=2),
    "qwen2-1.5b": Shape(hidden=1536, middle=8960, blocks=28, heads=12, key_value_heads=2),
}
NAME = "qwen2-1.5b"


def large_folder(directory: Path, blocks: int | None = None) -> Path:
    """The folder of the larger model, or of its first blocks (about 0.85 GB whole)."""
    return random_folder(NAME, directory, blocks)


def random_folder(name: str, directory: Path, blocks: int | None = None) -> Path:
    """A model of one of :data:`SHAPES` with random int4 weights of group size 128, made once below ``directory``."""
    shape = SHAPES[name]
    blocks = blocks or shape.blocks
    folder = directory / f"random-{name}-{blocks}-blocks-awq-g{LARGE_GROUP}-1"
    if folder.is_dir():
        return folder
    config = require_transformers("benchmarking models").Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.middle,
        num_hidden_layers=blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    hidden, middle = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    layers = {
        "self_attn.q_proj": (hidden, hidden, True),
        "self_attn.k_proj": (hidden, kv, True),
        "self_attn.v_proj": (hidden, kv, True),
        "self_attn.o_proj": (hidden, hidden, False),
        "mlp.gate_proj": (hidden, middle, False),
        "mlp.up_proj": (hidden, middle, False),
        "mlp.down_proj": (middle, hidden, False),
    }
    generator = torch.Generator().manual_seed(1)

    def words(rows: int, columns: int, low: int, high: int) -> torch.Tensor:
        """int32 [rows, columns / 8] of nibbles low..high."""
        nibbles = torch.randint(low, high + 1, (8, rows, columns // 8), generator=generator, dtype=torch.int32)
        packed = torch.zeros_like(nibbles[0])
        for i in range(8):
            packed |= nibbles[i] << (4 * i)
        return packed

    with (
        new_folder(folder, force=True) as writer,
        progress.bar("making random weights", blocks) as step,
    ):
        embeddings = torch.randn(config.vocab_size, hidden, generator=generator).mul_(0.02)
        writer.add("model.embed_tokens.weight", embeddings.to(torch.float16))
        writer.add("model.norm.weight", torch.ones(hidden, dtype=torch.float16))
        for block in range(blocks):
            prefix = f"model.layers.{block}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                writer.add(f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=torch.float16))
            for layer, (k, n, bias) in layers.items():
                place, groups = f"{prefix}.{layer}", k // LARGE_GROUP
                writer.add(f"{place}.qweight", words(k, n, 0, 15))
                writer.add(f"{place}.qzeros", words(groups, n, 5, 10))
                # q - z has a standard deviation of 4.9: weights get one of about 1 / sqrt(k).
                scales = torch.rand(groups, n, generator=generator).add_(0.5).div_(4.9 * k**0.5)
                writer.add(f"{place}.scales", scales.to(torch.float16))
                if bias:
                    writer.add(f"{place}.bias", torch.randn(n, generator=generator).mul_(0.1).to(torch.float16))
            step()
        quantization = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": LARGE_GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }
        writer.write_json("config.json", config.to_dict() | {"quantization_config": quantization})
    return folder
