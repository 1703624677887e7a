# SPDX-License-Identifier: Apache-2.0
"""int4 folders in the transformers library's own `from_pretrained`: the same model, or the library left alone."""

from __future__ import annotations

import importlib.util
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from int4_folders import FORMS, IDS, logits_of, write_int4  # noqa: E402
from models import edit_config, edit_tensors, tensors, write_float  # noqa: E402
from test_docs import write_awq_model  # noqa: E402
from transformers import modeling_utils  # noqa: E402

import awqjit  # noqa: E402
from awqjit import config  # noqa: E402
from awqjit.errors import ArgumentError, AwqJitWarning, CheckpointMismatchError, FormatError  # noqa: E402
from awqjit.integrations import transformers_quantizer, transformers_takeover  # noqa: E402
from awqjit.integrations.transformers import disable, enable  # noqa: E402
from awqjit.integrations.transformers_quantizer import AwqJitConfig, device_of  # noqa: E402
from awqjit.jit import forget  # noqa: E402
from awqjit.modules import Int4Linear  # noqa: E402

QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def reference_kernels() -> Iterator[None]:
    """Loading is tested here, not the kernels: the row in plain torch needs no compiler."""
    with config.override(kernel="torch"):
        forget()
        yield
    forget()


@pytest.fixture
def enabled() -> Iterator[None]:
    enable()
    yield
    disable()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llama")
    return write_int4(write_float(root / "float", tie_word_embeddings=False), root / "awq")


def ours(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return awqjit.from_pretrained(folder, dtype=dtype, progress=False, **options)


def theirs(folder: Path, dtype: torch.dtype = torch.float32, kind: str = "AutoModelForCausalLM", **options: Any) -> Any:
    return getattr(transformers, kind).from_pretrained(folder, dtype=dtype, **options)


def int4_layers(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Int4Linear)]


def test_neither_gptqmodel_nor_autoawq_is_installed_here() -> None:
    for package in ("gptqmodel", "awq", "auto_gptq", "optimum", "compressed_tensors"):
        if importlib.util.find_spec(package) is not None:
            pytest.skip(f"{package} is")


# ---- the same model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", sorted(FORMS))
def test_both_ways_of_loading_give_the_same_bits(form: str, tmp_path: Path, enabled: None) -> None:
    float_folder = write_float(tmp_path / "float", "qwen2", torch.float16, tie_word_embeddings=True)
    folder = write_int4(float_folder, tmp_path / "int4", form)
    model, other = theirs(folder, torch.bfloat16), ours(folder, torch.bfloat16)
    assert len(int4_layers(model)) == 14
    assert int4_layers(model) == int4_layers(other)
    assert torch.equal(logits_of(model), logits_of(other))
    assert not model.training
    assert model.dtype == other.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.quantization_config == other.config.quantization_config
    for name, tensor in other.state_dict().items():
        found = model.state_dict()[name]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "mistral", "opt", "qwen3"])
def test_families_are_the_same_model_in_both_ways(family: str, tmp_path: Path, enabled: None) -> None:
    folder = write_int4(write_float(tmp_path / "float", family), tmp_path / "int4")
    model, other = theirs(folder), ours(folder)
    assert int4_layers(model) == int4_layers(other) != []
    assert torch.equal(logits_of(model), logits_of(other))


@pytest.mark.parametrize("form", ["awq-gemm", "gptq-v1-act-order", "compressed-asym"])
def test_save_pretrained_writes_the_folder_again(form: str, tmp_path: Path, enabled: None) -> None:
    folder = write_int4(write_float(tmp_path / "float"), tmp_path / "int4", form)
    model = theirs(folder)
    model.save_pretrained(tmp_path / "saved")
    before, after = tensors(folder), tensors(tmp_path / "saved")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    for again in (theirs(tmp_path / "saved"), ours(tmp_path / "saved")):
        assert torch.equal(logits_of(again), logits_of(model))


def test_scales_and_biases_stay_as_they_are_on_disk(tmp_path: Path, enabled: None) -> None:
    folder = write_int4(write_float(tmp_path / "float", "qwen2", torch.float16), tmp_path / "int4")
    layer = theirs(folder, torch.bfloat16).get_submodule(QUERY)
    stored = tensors(folder)
    assert torch.equal(layer.quantized().scales, stored[f"{QUERY}.scales"])
    assert layer.bias.dtype == torch.float16
    assert torch.equal(layer.bias, stored[f"{QUERY}.bias"])


def test_a_quantized_head_shares_nothing_with_the_embeddings(tmp_path: Path, enabled: None) -> None:
    float_folder = write_float(tmp_path / "float", tie_word_embeddings=False)
    folder = write_int4(float_folder, tmp_path / "int4", quantizes=lambda name, t: t.dim() == 2 and "embed" not in name)
    edit_config(folder, lambda c: c.update(tie_word_embeddings=True))
    model = theirs(folder)
    assert "lm_head" in int4_layers(model)
    assert not model.config.tie_word_embeddings
    assert torch.equal(logits_of(model), logits_of(ours(folder)))


def test_a_layer_that_only_runs_as_float_does_so_in_both_ways(tmp_path: Path, enabled: None) -> None:
    float_folder = write_float(tmp_path / "float")
    changed = {"overrides": {"down_proj": (8, 32)}, "settings": {"dynamic": {r"+:.*down_proj$": {"bits": 8}}}}
    folder = write_int4(float_folder, tmp_path / "int4", "gptq-v2", **changed)
    with pytest.warns(AwqJitWarning, match="run as dequantized float layers"):
        model = theirs(folder)
    with pytest.warns(AwqJitWarning, match="run as dequantized float layers"):
        other = ours(folder)
    assert len(int4_layers(model)) == 12
    assert torch.equal(logits_of(model), logits_of(other))
    assert model.config.quantization_config == other.config.quantization_config


def test_the_decoder_alone_loads_from_a_folder_with_a_head(folder: Path, enabled: None) -> None:
    model = theirs(folder, kind="AutoModel")
    with torch.no_grad():
        hidden = model(IDS).last_hidden_state
        assert torch.equal(hidden, ours(folder).model(IDS).last_hidden_state)


def test_another_head_on_the_decoder_is_reported_by_the_library(folder: Path, enabled: None) -> None:
    model, report = theirs(folder, kind="AutoModelForSequenceClassification", output_loading_info=True)
    assert len(int4_layers(model)) == 14
    assert set(report["missing_keys"]) == {"score.weight"}
    assert set(report["unexpected_keys"]) == {"lm_head.weight"}


def test_nothing_is_reported_of_a_folder_that_fits(folder: Path, enabled: None) -> None:
    model, report = theirs(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model._keys_to_ignore_on_load_unexpected == ours(folder)._keys_to_ignore_on_load_unexpected


def test_a_head_of_its_own_is_kept_where_the_config_ties_it(folder: Path, tmp_path: Path, enabled: None) -> None:
    copied = write_int4(write_float(tmp_path / "float", tie_word_embeddings=False), tmp_path / "int4")
    edit_config(copied, lambda c: c.update(tie_word_embeddings=True))
    with pytest.warns(AwqJitWarning, match="weights of their own"):
        other = ours(copied)
    assert torch.equal(logits_of(theirs(copied)), logits_of(other))


# ---- in use -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating_gives_the_tokens_of_the_float_model(folder: Path, cache: str, enabled: None) -> None:
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    wanted = theirs(Path(f"{folder}-float")).generate(IDS, **options)
    assert torch.equal(theirs(folder).generate(IDS, **options), wanted)
    assert torch.equal(ours(folder).generate(IDS, **options), wanted)


def test_assisted_decoding_gives_the_same_tokens(folder: Path, tmp_path: Path, enabled: None) -> None:
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    model = theirs(folder)
    small = write_float(tmp_path / "small", num_hidden_layers=1, tie_word_embeddings=False)
    for assistant in (theirs(write_int4(small, tmp_path / "small-int4")), theirs(small)):
        assert torch.equal(model.generate(IDS, assistant_model=assistant, **options), model.generate(IDS, **options))


def test_a_pipeline_writes_the_text_of_generate(tmp_path: Path, enabled: None) -> None:
    write_awq_model(tmp_path / "model")
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "model"), dtype=torch.float32)
    assert len(int4_layers(pipe.model)) == 14
    (found,) = pipe("Hello", max_new_tokens=5, do_sample=False)
    tokens = pipe.tokenizer("Hello", return_tensors="pt")
    with torch.no_grad():
        wanted = ours(tmp_path / "model").generate(**tokens, max_new_tokens=5, do_sample=False)
    assert found["generated_text"] == pipe.tokenizer.decode(wanted[0], skip_special_tokens=True)


def test_a_loaded_model_is_pickled_with_its_quantizer(folder: Path, enabled: None) -> None:
    model = theirs(folder)
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits_of(copied), logits_of(model))
    assert copied.hf_quantizer.is_serializable()


# ---- what is asked for ------------------------------------------------------------------------------------------


def test_the_mode_is_chosen_for_all_loads_or_for_one(folder: Path) -> None:
    def modes(**options: Any) -> set[str]:
        model = theirs(folder, **options)
        return {model.get_submodule(name).compute for name in int4_layers(model)}

    try:
        enable("w4a8")
        assert modes() == {"w4a8"}
        assert modes(quantization_config=AwqJitConfig("w4a16")) == {"w4a16"}
        enable()
        assert modes() == {"w4a16"}
        assert modes(quantization_config=AwqJitConfig("w4a8")) == {"w4a8"}
        model = theirs(folder, quantization_config=AwqJitConfig("w4a8"))
        assert torch.equal(logits_of(model), logits_of(ours(folder, compute="w4a8")))
    finally:
        disable()
    for wrong in (enable, AwqJitConfig):
        with pytest.raises(ArgumentError, match="compute: got 'w8a8'"):
            wrong("w8a8")


def test_disabling_gives_the_library_its_own_choice_back(folder: Path) -> None:
    before = modeling_utils.get_hf_quantizer
    enable()
    enable("w4a8")
    assert modeling_utils.get_hf_quantizer is not before
    disable()
    assert modeling_utils.get_hf_quantizer is before
    disable()
    assert modeling_utils.get_hf_quantizer is before
    if importlib.util.find_spec("gptqmodel") is None:
        with pytest.raises(ImportError, match="gptqmodel"):
            theirs(folder)


def test_a_config_that_names_the_quantizer_needs_no_takeover(folder: Path) -> None:
    described = transformers.AutoConfig.from_pretrained(folder)
    checkpoint = described.quantization_config
    described.quantization_config = {"quant_method": "awqjit", "compute": "w4a8", "checkpoint": checkpoint}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=described, dtype=torch.float32)
    assert torch.equal(logits_of(model), logits_of(ours(folder, compute="w4a8")))
    assert model.config.quantization_config == checkpoint


def test_a_request_for_another_library_is_left_alone(folder: Path, enabled: None) -> None:
    if importlib.util.find_spec("gptqmodel") is not None:
        pytest.skip("gptqmodel would load it")
    with pytest.raises(ImportError, match="gptqmodel"):
        theirs(folder, quantization_config=transformers.AwqConfig(bits=4, group_size=32))


def test_float_folders_load_as_before(folder: Path, enabled: None) -> None:
    assert int4_layers(theirs(Path(f"{folder}-float"))) == []


def test_a_form_that_is_not_read_is_left_to_the_library_with_a_warning(
    folder: Path, tmp_path: Path, enabled: None
) -> None:
    copied = write_int4(write_float(tmp_path / "float"), tmp_path / "int4")
    edit_config(copied, lambda c: c["quantization_config"].update(bits=3))
    with (
        pytest.warns(AwqJitWarning, match="leaves this model to transformers: .*3 bits"),
        pytest.raises((ImportError, ValueError)),
    ):
        theirs(copied)
    with pytest.raises(FormatError, match="3 bits"):
        theirs(copied, quantization_config=AwqJitConfig())


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device_map", "wanted"),
    [
        (None, CPU),
        ("cpu", CPU),
        ({"": "cpu"}, CPU),
        ({"model": CPU, "lm_head": "cpu"}, CPU),
        ("cuda", None),
        (torch.device("cuda", 1), None),
        ({"": 0}, None if not torch.xpu.is_available() else torch.device("xpu", 0)),
        ({"model": "cpu", "lm_head": "disk"}, None),
        ({"model": "cpu", "lm_head": "cuda:0"}, None),
        ({}, None),
    ],
)
def test_only_models_on_one_served_device_are_taken(device_map: Any, wanted: torch.device | None) -> None:
    assert device_of(device_map) == wanted


def test_a_model_for_another_device_goes_to_the_librarys_own_choice() -> None:
    asked: list[Any] = []
    takeover = transformers_takeover.Takeover(lambda *args, **named: asked.append(args), "w4a16")
    described = transformers.LlamaConfig(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
    takeover(described, None, "cuda", None, {})
    takeover(described, None, {"": "cpu"}, None, {}, gguf_file="model.gguf")
    assert [args[0].quantization_config["quant_method"] for args in asked] == ["awq", "awq"]
    takeover(described, None, {"": "cpu"}, None, {})
    assert asked[-1][0].quantization_config["quant_method"] == "awqjit"


def test_the_quantizer_refuses_other_devices_and_folders(folder: Path, tmp_path: Path) -> None:
    quantizer = transformers_quantizer.AwqJitQuantizer(AwqJitConfig())
    with pytest.raises(ArgumentError, match="device_map: got cuda, wanted one device: cpu"):
        quantizer.validate_environment(device_map="cuda")
    for files in (None, [str(tmp_path / "pytorch_model.bin")]):
        with pytest.raises(FormatError, match="not the safetensors of one model folder"):
            transformers_quantizer._open(files)
    with pytest.raises(ArgumentError, match="quant_method: got awq, wanted awqjit"):
        AwqJitConfig(quant_method="awq")


# ---- damaged folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["scales", "qzeros"])
def test_a_missing_tensor_of_an_int4_layer_is_named(part: str, tmp_path: Path, enabled: None) -> None:
    copied = write_int4(write_float(tmp_path / "float"), tmp_path / "int4")
    edit_tensors(copied, lambda t: t.pop(f"{QUERY}.{part}"))
    with pytest.raises(CheckpointMismatchError, match=f"missing: {QUERY}.{part}"):
        theirs(copied)


def test_int4_layers_that_the_model_lacks_are_named(tmp_path: Path, enabled: None) -> None:
    copied = write_int4(write_float(tmp_path / "float"), tmp_path / "int4")
    edit_config(copied, lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(CheckpointMismatchError, match=r"unexpected: model\.layers\.1\."):
        theirs(copied)


def test_an_int4_layer_of_another_size_is_named(tmp_path: Path, enabled: None) -> None:
    copied = write_int4(write_float(tmp_path / "float"), tmp_path / "int4")
    edit_config(copied, lambda c: c.update(intermediate_size=128))
    with pytest.raises(CheckpointMismatchError, match=r"of another shape: .*down_proj\.qweight"):
        theirs(copied)


# ---- threads ----------------------------------------------------------------------------------------------------


def test_threads_enable_and_disable_without_leaving_anything_behind() -> None:
    before = modeling_utils.get_hf_quantizer
    barrier = threading.Barrier(8)

    def turn(number: int) -> None:
        barrier.wait()
        for _ in range(200):
            enable("w4a8" if number % 2 else "w4a16")
            disable()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(turn, range(8)))
    disable()
    assert modeling_utils.get_hf_quantizer is before


def test_threads_load_and_generate_side_by_side(folder: Path) -> None:
    default = torch.get_default_dtype()
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 2
    wanted = {dtype: logits_of(ours(folder, dtype)) for dtype in set(dtypes)}
    with ThreadPoolExecutor(len(dtypes)) as pool:
        models = list(pool.map(lambda dtype: ours(folder, dtype), dtypes))
        logits = list(pool.map(logits_of, models))
    assert torch.get_default_dtype() == default
    for dtype, model, found in zip(dtypes, models, logits, strict=True):
        assert model.dtype == dtype
        assert torch.equal(found, wanted[dtype])
