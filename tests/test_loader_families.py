# SPDX-License-Identifier: Apache-2.0
"""Model families and checkpoint forms, end to end: what transformers makes of the float weights is what we have to."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from int4_folders import FORMS, IDS, assert_logits, float_logits, is_linear, logits_of, write_int4  # noqa: E402
from models import edit_tensors, tensors, write_float  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import awqjit  # noqa: E402
from awqjit import config  # noqa: E402
from awqjit.errors import AwqJitWarning, FormatError  # noqa: E402
from awqjit.integrations import conversions  # noqa: E402
from awqjit.integrations.transformers import skeleton  # noqa: E402
from awqjit.jit import forget  # noqa: E402
from awqjit.modules import Int4Linear  # noqa: E402

FIXTURES = Path(__file__).parent / "fixtures"

# Family -> int4 layers of two blocks.
FAMILIES = {
    "llama": 14, "qwen2": 14, "qwen3": 14, "mistral": 14, "gemma": 14, "gemma2": 14, "gemma3_text": 14, "phi": 12,
    "phi3": 8,
    # Built of nn.Linear as well, and loaded by the same code.
    "olmo2": 14, "starcoder2": 12, "stablelm": 14, "cohere2": 14, "granite": 14, "glm4": 12, "smollm3": 14, "falcon": 8,
    "gpt_neox": 8, "opt": 12, "nemotron": 12, "exaone4": 14, "apertus": 12, "gpt_bigcode": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def reference_kernels() -> Any:
    """Loading is tested here, not the kernels: the row in plain torch needs no compiler."""
    with config.override(kernel="torch"):
        forget()
        yield
    forget()


def load(folder: Path, dtype: Any = torch.float32) -> Any:
    return awqjit.from_pretrained(folder, dtype=dtype, progress=False)


def int4_layers(model: torch.nn.Module) -> int:
    return sum(isinstance(module, Int4Linear) for module in model.modules())


@pytest.mark.parametrize(("family", "form"), list(zip(FAMILIES, itertools.cycle(("awq-gemm", "gptq-v1-act-order")))))
@pytest.mark.filterwarnings("error::awqjit.errors.AwqJitWarning")
def test_a_family_gives_the_logits_of_its_float_model(family: str, form: str, tmp_path: Path) -> None:
    folder = write_int4(write_float(tmp_path / "float", family), tmp_path / "int4", form)
    model = load(folder)
    assert int4_layers(model) == FAMILIES[family]
    assert FAMILIES[family] == sum(is_linear(*item) for item in tensors(tmp_path / "float").items())
    assert_logits(logits_of(model), folder)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3", "gpt_bigcode"])
def test_computed_buffers_are_the_librarys(family: str, tmp_path: Path) -> None:
    source = write_float(tmp_path / "float", family)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ours = load(write_int4(source, tmp_path / "int4"), torch.bfloat16)
    buffers = dict(fresh.named_buffers())
    assert buffers and buffers.keys() == dict(ours.named_buffers()).keys() - {
        name for name in dict(ours.named_buffers()) if ".packed_" in name
    }
    for name, buffer in buffers.items():
        assert torch.equal(ours.get_buffer(name), buffer) and ours.get_buffer(name).dtype == buffer.dtype, name


def test_a_buffer_that_the_library_does_not_compute_is_refused() -> None:
    model = skeleton(transformers.LlamaConfig(num_hidden_layers=1), torch.float32)
    conversions.compute_buffers(model)
    model.model.register_buffer("secret", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(FormatError, match=r"buffers secret of model \(LlamaModel\) cannot be computed"):
        conversions.compute_buffers(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("error::awqjit.errors.AwqJitWarning")
def test_a_form_loads_and_is_written_again(form: str, tmp_path: Path) -> None:
    folder = write_int4(write_float(tmp_path / "float", "qwen2", tie_word_embeddings=True), tmp_path / "int4", form)
    model = load(folder)
    assert int4_layers(model) == 14
    assert_logits(logits_of(model), folder)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits_of(again), logits_of(model))
    state = model.state_dict()
    assert state.keys() == again.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name
    before, after = tensors(folder), tensors(tmp_path / "saved")
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    # Trivial groups and zero points may be spelled out where the producer left them away.
    assert {name.rpartition(".")[2] for name in after.keys() - before.keys()} <= {"g_idx", "qzeros", "weight_g_idx"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["awq-gemm", "gptq-v1-act-order", "compressed-asym"])
def test_half_precision_is_as_exact_as_the_float_models(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_int4(write_float(tmp_path / "float", "llama"), tmp_path / "int4", form)
    model = load(folder, dtype)
    assert model.dtype == dtype
    assert_logits(logits_of(model), folder, dtype)


@pytest.mark.parametrize("name", sorted(path.stem for path in (FIXTURES / "logits").glob("*.safetensors")))
def test_what_producers_wrote_has_the_logits_that_they_read(name: str, tmp_path: Path) -> None:
    """Folders that quantizers wrote, against logits of weights dequantized by the quantizers' own code."""
    recorded = load_file(FIXTURES / "logits" / f"{name}.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(FIXTURES / "models" / name)
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, AwqJitWarning)]
    assert all("8 bits" in message for message in messages) and len(messages) == ("mixed" in name)
    with torch.no_grad():
        found = model(recorded["input_ids"]).logits.double()
    assert (found - recorded["logits"]).abs().max() <= 8 * recorded["rounding"]
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(load(tmp_path / "saved")), logits_of(model))


def test_weights_that_the_library_renames_keep_their_names_on_disk(tmp_path: Path) -> None:
    source = write_float(tmp_path / "float", "gpt_neox")
    edit_tensors(
        source, lambda t: t.update({k.replace("lm_head", "embed_out"): t.pop(k) for k in list(t) if "lm_head" in k})
    )
    every = write_int4(source, tmp_path / "int4", quantizes=lambda name, t: is_linear(name, t) or "embed_out" in name)
    model = load(every)
    assert isinstance(model.lm_head, Int4Linear)
    assert_logits(logits_of(model), every)
    model.save_pretrained(tmp_path / "saved")
    assert tensors(tmp_path / "saved").keys() == tensors(every).keys()
    assert "embed_out.qweight" in tensors(every)


@pytest.mark.parametrize("form", ["awq-gemm", "gptq-v1-act-order", "compressed-sym"])
def test_halves_of_a_fused_layer_may_be_stored_apart(form: str, tmp_path: Path) -> None:
    """As some packers do to phi3's gate_up_proj. In act-order both halves have the same groups: their input is one."""
    whole = write_int4(write_float(tmp_path / "float", "phi3"), tmp_path / "int4", form)
    expected = load(whole)
    layers = [f"model.layers.{i}.mlp." for i in range(2)]

    def split(found: dict[str, torch.Tensor]) -> None:
        for layer in layers:
            for name in [name for name in found if name.startswith(f"{layer}gate_up_proj.")]:
                last, tensor = name.rpartition(".")[2], found.pop(name)
                parts = [tensor, tensor]
                if last == "weight_shape":
                    parts = [tensor // torch.tensor([2, 1])] * 2
                elif last != "g_idx":
                    parts = list(tensor.chunk(2, dim=0 if form.startswith("compressed") else 1))
                for part, half in zip(("gate_proj", "up_proj"), parts, strict=True):
                    found[f"{layer}{part}.{last}"] = half.clone()

    edit_tensors(whole, split)
    model = load(whole)
    assert int4_layers(model) == 8
    assert torch.equal(logits_of(model), logits_of(expected))

    def to_float(found: dict[str, torch.Tensor]) -> None:
        for layer in layers:
            for name in [name for name in found if name.startswith(layer) and "down_proj" not in name]:
                del found[name]
            weight = tensors(Path(f"{whole}-float"))[f"{layer}gate_up_proj.weight"]
            for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                found[f"{layer}{part}.weight"] = half.clone()

    edit_tensors(whole, to_float)
    assert int4_layers(load(whole)) == 6
    assert_logits(logits_of(load(whole)), whole)


def test_int4_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_int4(write_float(tmp_path / "float", "mixtral"), tmp_path / "int4")
    with pytest.raises(FormatError, match="mixture-of-experts") as caught:
        load(folder)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.qweight" in str(caught.value)
    assert "in all)" in str(caught.value)


def test_the_comparison_would_see_one_wrong_nibble(tmp_path: Path) -> None:
    folder = write_int4(write_float(tmp_path / "float", "llama"), tmp_path / "int4")

    def flip(found: dict[str, torch.Tensor]) -> None:
        found["model.layers.1.mlp.up_proj.qweight"][5, 3] ^= 1 << 30

    edit_tensors(folder, flip)
    assert float_logits(folder, torch.float32).shape == (1, IDS.shape[1], 128)
    with pytest.raises(AssertionError, match="arithmetic in"):
        assert_logits(logits_of(load(folder)), folder)
