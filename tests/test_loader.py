# SPDX-License-Identifier: Apache-2.0
"""int4 folders become models: every tensor in its place, bit for bit, or a clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from models import edit_config, edit_tensors, tensors, write_float  # noqa: E402

import awqjit  # noqa: E402
from awqjit import config, packer  # noqa: E402
from awqjit.errors import ArgumentError, AwqJitWarning, CheckpointMismatchError, FormatError  # noqa: E402
from awqjit.formats.awq import awq_to_standard  # noqa: E402
from awqjit.formats.gptq import standard_to_gptq  # noqa: E402
from awqjit.integrations.gguf_file import GgufSource, find, pair_halves, transformers_name  # noqa: E402
from awqjit.integrations.quantize_folder import quantize_folder  # noqa: E402
from awqjit.jit import forget  # noqa: E402
from awqjit.layout import PackedWeight  # noqa: E402
from awqjit.modules import Int4Linear  # noqa: E402

IDS = torch.tensor([[1, 17, 99, 4, 56, 23]])
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def reference_kernels() -> Any:
    """Loading is tested here, not the kernels: the row in plain torch needs no compiler."""
    with config.override(kernel="torch"):
        forget()
        yield
    forget()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """AWQ folders, made once: Llama with a head of its own, Qwen2 (biases) with a tied one."""
    root = tmp_path_factory.mktemp("models")
    write_float(root / "llama", "llama", tie_word_embeddings=False)
    write_float(root / "qwen2", "qwen2", torch.bfloat16, tie_word_embeddings=True)
    for name in ("llama", "qwen2"):
        quantize_folder(root / name, root / f"{name}-awq", group_size=32, show_progress=False)
    return {name: root / name for name in ("llama", "qwen2", "llama-awq", "qwen2-awq")}


@pytest.fixture
def copy_of(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


def load(folder: Path, dtype: Any = torch.float32, **options: Any) -> Any:
    return awqjit.from_pretrained(folder, dtype=dtype, progress=False, **options)


def dense_logits(folder: Path) -> torch.Tensor:
    """Logits of the folder's weights, dequantized here, in transformers' own model."""
    found = tensors(folder)
    model_config = transformers.AutoConfig.from_pretrained(folder)
    group_size = model_config.quantization_config["group_size"]
    del model_config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).eval()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        layer, _, part = name.rpartition(".")
        if part == "qweight":
            parts = (tensor, found[f"{layer}.scales"], found[f"{layer}.qzeros"])
            state[f"{layer}.weight"] = awq_to_standard(*parts, group_size).dequantize().T
        elif part in ("weight", "bias"):
            state[name] = tensor.float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_the_dequantized_model(folders: dict[str, Path], family: str) -> None:
    model = load(folders[f"{family}-awq"])
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, dense_logits(folders[f"{family}-awq"]), rtol=1e-4, atol=1e-4)
    assert not model.training
    assert sum(isinstance(module, Int4Linear) for module in model.modules()) == 14
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("compute", ["w4a16", "w4a8"])
def test_a_loaded_model_generates(folders: dict[str, Path], family: str, compute: str) -> None:
    model = load(folders[f"{family}-awq"], torch.bfloat16, compute=compute)
    out = model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape == (1, IDS.shape[1] + 4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_save_pretrained_writes_the_same_tensors(folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    before = tensors(folders[f"{family}-awq"])
    load(folders[f"{family}-awq"], "auto").save_pretrained(tmp_path / "saved")
    after = tensors(tmp_path / "saved")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    assert load(tmp_path / "saved").config.quantization_config["quant_method"] == "awq"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_keep_the_checkpoints_dtype(folders: dict[str, Path], dtype: torch.dtype) -> None:
    model = load(folders["llama-awq"], dtype)
    expected = tensors(folders["llama-awq"])[f"{QUERY}.scales"]
    assert model.dtype == dtype
    for changed in (model, model.half()):
        scales = changed.get_submodule(QUERY).quantized().scales
        assert scales.dtype == torch.float16 and torch.equal(scales, expected)


def test_rotary_frequencies_are_computed_as_transformers_does(folders: dict[str, Path]) -> None:
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    ours = load(folders["llama-awq"], torch.bfloat16)
    assert torch.equal(ours.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)


def test_a_tied_head_shares_the_embeddings_memory(folders: dict[str, Path]) -> None:
    model = load(folders["qwen2-awq"])
    assert "lm_head.weight" not in tensors(folders["qwen2-awq"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_head_that_is_stored_all_the_same_is_tied(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen2-awq")
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_head_with_weights_of_its_own_keeps_them(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_of("qwen2-awq")
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}))
    with pytest.warns(AwqJitWarning, match="weights of their own"):
        model = load(folder)
    assert torch.equal(model.lm_head.weight, -model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "saved")
    assert "lm_head.weight" in tensors(tmp_path / "saved")


def test_only_the_head_is_stored_where_both_are_tied(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen2-awq")
    expected = tensors(folder)["model.embed_tokens.weight"].float()
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    model = load(folder)
    assert torch.equal(model.model.embed_tokens.weight, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_tensors_decide_over_the_config(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama-awq")

    def unquantize(found: dict[str, torch.Tensor]) -> None:
        parts = [found.pop(f"{QUERY}.{part}") for part in ("qweight", "scales", "qzeros")]
        found[f"{QUERY}.weight"] = awq_to_standard(*parts, 32).dequantize().T.contiguous()

    expected = load(folder)(IDS).logits
    edit_tensors(folder, unquantize)
    edit_config(folder, lambda c: c["quantization_config"].update(modules_to_not_convert=["down_proj"]))
    model = load(folder)
    assert type(model.get_submodule(QUERY)) is torch.nn.Linear
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("v2", [False, True])
def test_gptq_folders_load(copy_of: Callable[[str], Path], v2: bool) -> None:
    folder = copy_of("qwen2-awq")
    expected = dense_logits(folder)

    def to_gptq(found: dict[str, torch.Tensor]) -> None:
        for layer in [name.removesuffix(".qweight") for name in list(found) if name.endswith(".qweight")]:
            weight = awq_to_standard(*(found.pop(f"{layer}.{part}") for part in ("qweight", "scales", "qzeros")), 32)
            parts = zip(("qweight", "scales", "qzeros", "g_idx"), standard_to_gptq(weight, v2=v2), strict=True)
            found.update({f"{layer}.{part}": tensor for part, tensor in parts})
            if f"{layer}.bias" not in found:
                found[f"{layer}.bias"] = torch.zeros(weight.out_features)  # as old packers do

    edit_tensors(folder, to_gptq)
    quantization = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False,
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "use_exllama": True,
    }  # fmt: skip
    edit_config(folder, lambda c: c.update(quantization_config=quantization))
    with torch.no_grad():
        torch.testing.assert_close(load(folder)(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_every_misfit_is_listed_and_nothing_is_made_up(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama-awq")

    def spoil(found: dict[str, torch.Tensor]) -> None:
        del found["model.norm.weight"], found[f"{QUERY}.scales"]
        found["model.extra.weight"] = torch.zeros(3)
        found["lm_head.weight"] = found["lm_head.weight"][:5].clone()
        found["model.layers.1.mlp.up_proj.bias"] = torch.ones(96)

    edit_tensors(folder, spoil)
    with pytest.raises(CheckpointMismatchError) as caught:
        load(folder)
    missing, unexpected, mismatched = caught.value.args
    assert missing == (f"{QUERY}.scales", "model.norm.weight")
    assert unexpected == ("model.extra.weight", "model.layers.1.mlp.up_proj.bias")
    assert len(mismatched) == 1 and mismatched[0].startswith("lm_head.weight [5, 64], wanted [128, 64]")
    assert "model.norm.weight" in str(caught.value)


def test_layers_that_cannot_be_packed_run_dequantized_with_one_warning(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(weight: Any) -> PackedWeight:
        if weight.in_features == 96:
            raise awqjit.errors.ArgumentError("in_features", 96, "something else")
        return packer.in_torch(weight)

    monkeypatch.setattr(packer, "packer_for", lambda weights: refuse)
    with pytest.warns(AwqJitWarning, match="2 int4 layers run as dequantized") as caught:
        model = load(folders["llama-awq"])
    assert len([w for w in caught if issubclass(w.category, AwqJitWarning)]) == 1
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, dense_logits(folders["llama-awq"]), rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "saved")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "is missing"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "shorter"),
        (lambda f: edit_config(f, lambda c: c.pop("quantization_config")), "no quantization_config"),
        (lambda f: edit_config(f, lambda c: c["quantization_config"].update(bits=8)), "8 bits"),
        (lambda f: edit_config(f, lambda c: c.update(model_type="no-such-model")), "cannot read the config"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")] and (f / "a.bin").touch(), "only a.bin"),
    ],
)
def test_folders_that_cannot_be_read_are_refused(
    copy_of: Callable[[str], Path], spoil: Callable[[Path], Any], message: str
) -> None:
    folder = copy_of("llama-awq")
    spoil(folder)
    with pytest.raises(FormatError, match=message):
        load(folder)


def test_a_float_folder_is_refused_with_the_way_out(folders: dict[str, Path]) -> None:
    with pytest.raises(FormatError, match="awqjit quantize"):
        load(folders["llama"])


def test_quantizing_writes_small_shards_with_an_index(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path / "source")
    (tmp_path / "source/tokenizer.json").write_text("{}")
    quantize_folder(tmp_path / "source", tmp_path / "out", group_size=32, shard_bytes=20_000, show_progress=False)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 and set(index["weight_map"].values()) == set(shards)
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert (tmp_path / "out/tokenizer.json").exists() and (tmp_path / "out/generation_config.json").exists()
    whole = tensors(folders["llama-awq"])
    for name, tensor in tensors(tmp_path / "out").items():
        assert torch.equal(tensor, whole[name]), name
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out")(IDS).logits, load(folders["llama-awq"])(IDS).logits)


@pytest.mark.parametrize("symmetric", [False, True])
def test_quantized_logits_are_near_the_float_models(folders: dict[str, Path], tmp_path: Path, symmetric: bool) -> None:
    quantize_folder(folders["llama"], tmp_path / "out", group_size=32, symmetric=symmetric, show_progress=False)
    with torch.no_grad():
        exact = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()(IDS).logits
        error = (load(tmp_path / "out")(IDS).logits - exact).norm() / exact.norm()
    assert 0.001 < float(error) < 0.3


def test_layers_that_do_not_fit_the_group_size_stay_float(folders: dict[str, Path], tmp_path: Path) -> None:
    report = quantize_folder(folders["llama"], tmp_path / "out", group_size=64, show_progress=False)
    assert set(report.kept) == {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    assert "96 is not a multiple of group size 64" in report.kept["model.layers.0.mlp.down_proj"]
    assert sum(isinstance(module, Int4Linear) for module in load(tmp_path / "out").modules()) == 12


def test_a_failure_leaves_nothing_behind(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_of("llama")
    edit_tensors(folder, lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(float("nan")))
    with pytest.raises(FormatError, match=r"model\.layers\.1\.mlp\.up_proj cannot be quantized.*NaN"):
        quantize_folder(folder, tmp_path / "out", group_size=32, show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_full_destination_is_left_alone_unless_forced(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("keep me")
    with pytest.raises(awqjit.errors.ArgumentError, match="not empty"):
        quantize_folder(folders["llama"], tmp_path / "out", group_size=32, show_progress=False)
    assert (tmp_path / "out/mine.txt").read_text() == "keep me"
    (tmp_path / "out/config.json").write_text("{}")  # now it looks like a model
    quantize_folder(folders["llama"], tmp_path / "out", group_size=32, force=True, show_progress=False)
    assert not (tmp_path / "out/mine.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_int4_folder_is_not_quantized_again(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="quantized already"):
        quantize_folder(folders["llama-awq"], tmp_path / "out", group_size=32, show_progress=False)


def test_gguf_names_and_row_order() -> None:
    assert transformers_name("blk.11.attn_q.bias") == "model.layers.11.self_attn.q_proj.bias"
    assert transformers_name("blk.0.ffn_gate_exps.weight") is None
    assert transformers_name("rope_freqs.weight") is None
    # One head of 6 rows: pairs (0,3) (1,4) (2,5) of transformers lie side by side in the file.
    in_file = torch.tensor([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15])
    assert pair_halves(in_file, 2).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]


def test_a_gguf_file_holds_the_models_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    expected = tensors(folders["llama"])
    ours = {
        "model.embed_tokens.weight": "token_embd.weight",
        f"{QUERY}.weight": "blk.0.attn_q.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for name, stored in ours.items():
        tensor = expected[name]
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:  # the file's order: halves of a head become neighbours
            tensor = tensor.reshape(heads, 2, -1, 64).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(stored, tensor.numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource.open(find(tmp_path) or tmp_path, heads={"q_proj": 4, "k_proj": 2})
    assert source.shapes == {name: tuple(expected[name].shape) for name in ours}
    for name in ours:
        assert torch.equal(source.read(name), expected[name]), name


def test_gguf_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(FormatError, match="not a complete GGUF file"):
        GgufSource.open(tmp_path / "a.gguf", heads={})
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match="architecture 'gemma'"):
        GgufSource.open(tmp_path / "b.gguf", heads={})
    with pytest.raises(FormatError, match="several GGUF files"):
        find(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused_by_name(copy_of: Callable[[str], Path], value: float) -> None:
    folder = copy_of("llama-awq")
    name = "model.layers.0.mlp.up_proj.scales"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0, 0] = value

    edit_tensors(folder, damage)
    with pytest.raises(FormatError, match="up_proj cannot be read: a scale is NaN or infinite"):
        load(folder)


def test_awq_layers_may_carry_a_trivial_g_idx(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama-awq")
    name, k = "model.layers.0.mlp.up_proj", 64

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.g_idx"] = (torch.arange(k) // 32).int()

    expected = load(folder)
    edit_tensors(folder, add)
    found = load(folder)
    ids = torch.arange(8)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)
    edit_tensors(folder, lambda tensors: tensors[f"{name}.g_idx"].copy_(torch.arange(k).int() % 2))
    with pytest.raises(FormatError, match="g_idx other than"):
        load(folder)


def test_force_never_deletes_the_source_or_what_is_no_model(folders: dict[str, Path], tmp_path: Path) -> None:
    parent = tmp_path / "models"
    source = write_float(parent / "llama")
    (parent / "precious.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="destination"):
        quantize_folder(source, parent, group_size=32, force=True, show_progress=False)
    with pytest.raises(ArgumentError, match="holds more than a model"):
        quantize_folder(folders["qwen2"], parent, group_size=32, force=True, show_progress=False)
    assert (parent / "precious.txt").read_text() == "mine" and (source / "config.json").exists()
