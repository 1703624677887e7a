# SPDX-License-Identifier: Apache-2.0
"""Gate and up as one layer, and an int4 head on request: same results, and a state_dict that says what is there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from models import write_float

import awqjit
from awqjit import fusion as fusing
from awqjit.errors import ArgumentError
from awqjit.formats.layer import LayerFormat
from awqjit.integrations.quantize_folder import quantize_folder
from awqjit.modules import Int4Linear

IDS = torch.tensor([[1, 17, 99, 4, 56, 23]])
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("fused")

    def make(family: str, form: str = "awq", **settings: Any) -> Path:
        name = f"{family}-{form}-{'-'.join(map(str, settings.values()))}"
        if not (root / name).exists():
            write_float(root / f"{name}-float", family, **settings)
            quantize_folder(root / f"{name}-float", root / name, group_size=32, format=form, show_progress=False)
        return root / name

    return make


def load(folder: Path, **options: Any) -> Any:
    return awqjit.from_pretrained(folder, dtype=torch.float32, progress=False, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_gives_the_same_logits_and_the_same_state(
    folder_of: Callable[..., Path], family: str, compute: str
) -> None:
    model = load(folder_of(family), compute=compute)
    before, state = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = awqjit.fuse(model)
    assert done.fused == ("model.layers.0.mlp", "model.layers.1.mlp") and not done.refused
    calls = [module for module in model.modules() if type(module) is fusing._Joined]
    assert [layer.out_features for layer in calls] == [192, 192]
    assert torch.equal(logits(model), before)
    after = model.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(after[name], state[name]) for name in state)
    assert awqjit.fuse(model) == fusing.Fusion((), {})


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_a_fused_model_loads_states_and_survives_copies(folder_of: Callable[..., Path], form: str) -> None:
    model, other = load(folder_of("llama", form)), load(folder_of("llama", form))
    state, expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}, logits(model)
    awqjit.fuse(other)
    layer = other.model.layers[0].mlp
    for tensor in (layer.gate_up_proj.packed_weight, layer.gate_up_proj.packed_scales):
        tensor.zero_()
    assert not torch.equal(logits(other), expected)
    other.load_state_dict(state)
    for again in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(logits(again), expected)
        mlp = again.model.layers[0].mlp
        assert mlp.gate_proj.joined is mlp.gate_up_proj, "a copy's parts are those of the copy"


def test_a_fused_layer_refuses_a_state_that_is_incomplete_or_of_another_kind(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("llama"))
    state = dict(model.state_dict())
    awqjit.fuse(model)
    before = logits(model)
    key = "model.layers.0.mlp.up_proj.scales"
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.mlp\.up_proj\.qweight"):
        model.load_state_dict({name: value for name, value in state.items() if "up_proj.qweight" not in name})
    with pytest.raises(RuntimeError, match="does not fit the layer it is joined with"):
        model.load_state_dict(state | {key: state[key].to(torch.float32)})
    assert torch.equal(logits(model), before)


def test_a_part_alone_gives_its_columns(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("llama"))
    x = torch.randn(3, 64)
    expected = model.model.layers[0].mlp.up_proj(x)
    awqjit.fuse(model)
    assert torch.equal(model.model.layers[0].mlp.up_proj(x), expected)


def test_a_saved_fused_model_is_the_folder_it_came_from(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    model = load(folder_of("qwen2"))
    awqjit.fuse(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_layers_that_do_not_fit_together_stay_apart_with_the_reason(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("llama"))
    mlps = [layer.mlp for layer in model.model.layers]
    mlps[0].gate_proj.packed_perm = torch.arange(64, dtype=torch.int32)
    mlps[1].up_proj.act_bits = 8
    done = awqjit.fuse(model)
    assert done.fused == ()
    assert "act-orders" in done.refused["model.layers.0.mlp"] and "act_bits" in done.refused["model.layers.1.mlp"]
    mlps[1].up_proj.act_bits = 16
    mlps[1].up_proj.register_forward_hook(lambda *arguments: None)
    assert "hooks" in awqjit.fuse(model).refused["model.layers.1.mlp"]
    mlps[0].gate_proj = torch.nn.Linear(64, 96)
    assert "Linear" in awqjit.fuse(model).refused["model.layers.0.mlp"]


def test_rows_in_one_act_order_are_fused(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("llama"))
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.packed_perm = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    mlp.up_proj.packed_perm = mlp.gate_proj.packed_perm.clone()
    before = logits(model)
    assert "model.layers.0.mlp" in awqjit.fuse(model).fused
    assert torch.equal(logits(model), before)


def test_replacing_a_fused_layer_is_refused(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("llama"))
    awqjit.fuse(model)
    with pytest.raises(ArgumentError, match="gate_proj"):
        model.model.layers[0].mlp.gate_proj = torch.nn.Linear(64, 96)


@pytest.mark.parametrize("form", ["awq", "gptq"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_becomes_int4_on_request_and_is_saved_as_such(
    folder_of: Callable[..., Path], tmp_path: Path, form: str, tied: bool
) -> None:
    folder = folder_of("llama", form, tie_word_embeddings=tied)
    plain, model = load(folder), load(folder, lm_head="w4a16")
    head = model.lm_head
    assert isinstance(plain.lm_head, torch.nn.Linear) and isinstance(head, Int4Linear)
    embeddings = model.get_input_embeddings().weight
    assert embeddings.is_floating_point() and torch.equal(embeddings, plain.get_input_embeddings().weight)
    expected = head.quantized().dequantize(torch.float32)
    weight = plain.lm_head.weight.T
    assert float((expected - weight).norm() / weight.norm()) < 0.15
    assert model.config.tie_word_embeddings is False
    assert "lm_head.qweight" in model.state_dict() and "lm_head.weight" not in model.state_dict()
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert isinstance(again.lm_head, Int4Linear)
    assert torch.equal(logits(again), logits(model))


def test_a_head_has_its_own_mode_and_is_not_rounded_twice(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("llama"), lm_head="w4a8")
    assert model.lm_head.compute == "w4a8" and isinstance(model.lm_head.format, LayerFormat)
    head = model.lm_head
    assert awqjit.quantize_head(model) == "lm_head" and model.lm_head is head
    with pytest.raises(ArgumentError, match="compute"):
        load(folder_of("llama"), lm_head="int4")
    with pytest.raises(ArgumentError, match="group_size"):
        awqjit.quantize_head(load(folder_of("llama")), group_size=48)
