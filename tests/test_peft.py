# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the PEFT library on int4 layers: they train, are saved and loaded, and leave the int4 weight be."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from int4_folders import IDS, assert_logits, logits_of, write_int4
from models import write_float
from test_docs import write_awq_model

import awqjit
from awqjit.cli import demo_weights
from awqjit.errors import ArgumentError, DemoWeightsError, MissingDependencyError
from awqjit.integrations import peft as integration
from awqjit.integrations.peft import register
from awqjit.modules import Int4Linear

try:
    import peft
except ImportError:
    peft = None

needs_peft = pytest.mark.skipif(peft is None, reason="peft is not installed (tox -e integrations installs it)")
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("qwen2")
    return write_int4(write_float(root / "float", "qwen2"), root / "int4")


@pytest.fixture(scope="session")
def weights() -> Path:
    """The demo's folder, in the user's own cache: session fixtures run before tests get an environment of their own."""
    try:
        return demo_weights.prepare(show_progress=False)
    except DemoWeightsError as error:
        pytest.skip(f"no real weights: {error}")


def model_of(folder: Path, compute: str = "w4a16") -> Any:
    return awqjit.from_pretrained(folder, dtype=torch.float32, compute=compute, progress=False)


def adapted(folder: Path, compute: str = "w4a16", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = register(peft.LoraConfig(r=4, target_modules=TARGETS, **settings))
    return peft.get_peft_model(model_of(folder, compute), config)


def train(model: Any, ids: Tensor, steps: int, rate: float) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_without_peft_it_is_asked_for() -> None:
    if peft is not None:
        pytest.skip("peft is installed")
    with pytest.raises(MissingDependencyError, match="pip install peft"):
        integration._lora_int4_linear()


@needs_peft
def test_a_new_adapter_changes_nothing_and_holds_all_that_trains(folder: Path) -> None:
    model = adapted(folder)
    assert torch.equal(logits_of(model), logits_of(model_of(folder)))
    layers = [m for m in model.modules() if isinstance(m, integration.LoraInt4Linear)]
    assert len(layers) == 2 * len(TARGETS)
    assert all(isinstance(layer.get_base_layer(), Int4Linear) for layer in layers)
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


@needs_peft
@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_every_adapter_gets_the_gradient_of_the_dequantized_model(folder: Path, compute: str) -> None:
    int4, dense = adapted(folder, compute), adapted(folder)
    for model in (int4, dense):  # an adapter that is not zero lets its gradient reach both of its factors
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05
    for layer in dense.modules():
        if isinstance(layer, integration.LoraInt4Linear):
            layer.base_layer = dequantized(layer.base_layer)
    gradients = []
    for model in (int4, dense):
        model(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    bound = {"w4a16": 1e-4, "w4a8": 0.1}[compute]  # w4a8 rounds activations to 8 bits
    for name, wanted in gradients[1].items():
        assert (gradients[0][name] - wanted).norm() <= bound * wanted.norm(), name


def dequantized(layer: Int4Linear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    linear.weight = nn.Parameter(layer.quantized().dequantize().T.contiguous(), requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.float(), requires_grad=False)
    return linear


@needs_peft
def test_training_leaves_the_int4_weights_as_they_were(folder: Path) -> None:
    model = adapted(folder, lora_dropout=0.1)
    before = {name: t.clone() for name, t in model.state_dict().items() if "lora_" not in name}
    losses = train(model.train(), IDS, 10, 1e-2)
    assert losses[-1] < losses[0] / 2
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@needs_peft
def test_a_saved_adapter_is_loaded_onto_the_folder_again(folder: Path, tmp_path: Path) -> None:
    model = adapted(folder)
    train(model, IDS, 5, 1e-2)
    wanted = logits_of(model)
    model.save_pretrained(tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(
        model_of(folder), tmp_path / "adapter", config=register(peft.LoraConfig.from_pretrained(tmp_path / "adapter"))
    )
    assert torch.equal(logits_of(found), wanted)
    with found.disable_adapter():
        assert torch.equal(logits_of(found), logits_of(model_of(folder)))
    assert torch.equal(logits_of(found.unload()), logits_of(model_of(folder)))


@needs_peft
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_an_adapted_model_computes_the_same(folder: Path, how: Any) -> None:
    model = adapted(folder)
    train(model, IDS, 2, 1e-2)
    assert torch.equal(logits_of(how(model)), logits_of(model))


@needs_peft
def test_float_layers_take_adapters_as_before(folder: Path) -> None:
    config = register(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model = peft.get_peft_model(float_model(folder), config)
    assert not any(isinstance(module, integration.LoraInt4Linear) for module in model.modules())
    assert_logits(logits_of(model), folder)


def float_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-float", dtype=torch.float32).eval()


@needs_peft
def test_what_would_read_or_change_the_int4_weight_is_refused(folder: Path) -> None:
    for wrong in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}):
        (name,) = wrong
        with pytest.raises(ArgumentError, match=f"{name}: .*the base weight is int4"):
            register(peft.LoraConfig(r=4, target_modules=TARGETS, **wrong))
    with pytest.raises(ArgumentError, match="target_modules: got all-linear, wanted a list of names"):
        register(peft.LoraConfig(r=4, target_modules="all-linear"))
    model = adapted(folder)
    with pytest.raises(ArgumentError, match="merge: got an int4 layer"):
        model.merge_and_unload()
    with pytest.raises(ArgumentError, match="use_dora"):
        model.add_adapter("second", register_unchecked(peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True)))


def register_unchecked(config: Any) -> Any:
    config._register_custom_module({Int4Linear: integration.LoraInt4Linear})
    return config


@needs_peft
def test_the_loss_of_a_real_model_falls_over_fifty_steps(weights: Path) -> None:
    """SmolLM2-135M on a few tokens that it does not expect in this order."""
    torch.manual_seed(0)
    # The upper blocks: gradients go through their 42 int4 layers, and training takes seconds instead of minutes.
    config = register(
        peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=list(range(24, 30)))
    )
    model = peft.get_peft_model(model_of(weights), config)
    ids = torch.tensor([[504, 6354, 6330, 282, 260, 3575, 30, 1116, 2148, 4967, 253, 9905]])
    losses = train(model, ids, 50, 2e-3)
    assert all(later < earlier for earlier, later in zip(losses[::10], losses[10::10], strict=False)), losses[::10]
    assert losses[-1] < losses[0] / 2


@needs_peft
def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "transformers.md").read_text(encoding="utf-8")
    (example,) = [code for code in re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "peft" in code]
    write_awq_model(tmp_path / "my-awq-model")
    script = f"import torch, awqjit\nids = torch.tensor([[72, 101, 108]])\n{example}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
