# SPDX-License-Identifier: Apache-2.0
"""Loading takes the memory of the packed model and of the two layers at work, whatever the checkpoint's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import save_file
from transformers import LlamaConfig

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc")

HIDDEN, MIDDLE, GROUP = 1024, 2816, 64
MIB = 1 << 20

# In a process of its own. The first load is of one block: it imports what loading imports.
SCRIPT = """
import gc, json, sys
import torch
import awqjit
from awqjit import config
from awqjit.modules import Int4Linear

def field(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

small, large, keep = sys.argv[1:]
awqjit.from_pretrained(small, progress=False)
gc.collect()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before = field("VmRSS")
if keep == "everything":
    from awqjit.checkpoint import Checkpoint
    kept, read = [], Checkpoint.read
    def keeping(self, *names, dtype=None, into=None):
        kept.append(read(self, *names, dtype=dtype))
        return dict(kept[-1])
    Checkpoint.read = keeping
model = awqjit.from_pretrained(large, progress=False)
layers = [size(module.buffers()) for module in model.modules() if isinstance(module, Int4Linear)]
print(json.dumps({
    "peak": field("VmHWM") - before, "layer": max(layers), "layers": sum(layers),
    "model": size(model.parameters()) + size(model.buffers()),
}))
"""


def write(folder: Path, blocks: int, act_order: bool) -> Path:
    """A GPTQ or AWQ folder whose blocks all hold the same random tensors: 4 bits for each of 13 million weights."""
    generator = torch.Generator().manual_seed(0)
    layers = {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
    layers |= {"mlp.gate_proj": (HIDDEN, MIDDLE), "mlp.up_proj": (HIDDEN, MIDDLE), "mlp.down_proj": (MIDDLE, HIDDEN)}

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    found = {"model.embed_tokens.weight": torch.zeros(64, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for block in range(blocks):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{block}.{norm}.weight"] = torch.ones(HIDDEN)
        for layer, (k, n) in layers.items():
            parts = {
                "qweight": words(k // 8, n) if act_order else words(k, n // 8),
                "qzeros": words(k // GROUP, n // 8),
                "scales": torch.rand(k // GROUP, n, generator=generator).half(),
            }
            if act_order:
                parts["g_idx"] = (torch.randperm(k, generator=generator) // GROUP).int()
            found |= {f"model.layers.{block}.{layer}.{last}": tensor for last, tensor in parts.items()}
    folder.mkdir()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=MIDDLE, num_hidden_layers=blocks, num_attention_heads=8, vocab_size=64,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ).to_dict()  # fmt: skip
    method = {"quant_method": "gptq", "sym": False, "desc_act": True} if act_order else {"quant_method": "awq"}
    config["quantization_config"] = method | {"bits": 4, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def measure(*arguments: str) -> dict[str, int]:
    # Every tensor is mapped and unmapped by itself: what the allocator keeps for later differs from run to run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("act_order", [False, True], ids=["awq", "gptq act-order"])
def test_memory_peaks_at_the_packed_model_and_two_layers(act_order: bool, tmp_path: Path) -> None:
    small, large = (write(tmp_path / str(blocks), blocks, act_order) for blocks in (1, 10))
    found = measure(str(small), str(large), "nothing")
    assert found["layers"] > 20 * found["layer"] > 20 * MIB
    # 4 MiB are for the pages of the file that are being read, and for temporaries.
    assert found["peak"] < found["model"] + 2 * found["layer"] + 4 * MIB
    if not act_order:  # what is measured would be seen
        assert measure(str(small), str(large), "everything")["peak"] > found["model"] + found["layers"] // 2
