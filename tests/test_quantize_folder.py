# SPDX-License-Identifier: Apache-2.0
"""Folders that `awqjit quantize` writes: forms, what stays float, and that they hold the model that was rounded."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("typer")

from models import tensors, write_float
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import awqjit
from awqjit import config
from awqjit.checkpoint import Checkpoint
from awqjit.cli import main
from awqjit.errors import ArgumentError, AwqJitWarning
from awqjit.integrations.calibration import Calibration
from awqjit.integrations.quantize_folder import quantize_folder
from awqjit.integrations.quantize_plan import Plan, make_plan

GENERATOR = torch.Generator().manual_seed(6)
CHARACTERS = [chr(code) for code in range(33, 127)]
TEXT = "".join(CHARACTERS[i] for i in torch.randint(0, len(CHARACTERS), (400,), generator=GENERATOR).tolist())
CALIBRATION = Calibration(TEXT, sequences=6, length=40, sample=120)
IDS = torch.randint(0, 128, (2, 24), generator=GENERATOR)
# One of each kind of block: gated and grouped-query, biased, with 1 + w norms and two masks, and with layer norms.
KINDS = ("llama", "qwen2", "gemma3_text", "phi")


def write_source(folder: Path, family: str, **settings: Any) -> Path:
    """A float folder with a tokenizer that takes every visible ASCII character for a token.

    It is a byte-level one, so that the classes that the library has for some families read it as the generic one does.
    """
    source = write_float(folder, family, **settings)
    characters = Tokenizer(models.BPE({character: i for i, character in enumerate(CHARACTERS)}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(source)
    read = AutoTokenizer.from_pretrained(source)(TEXT, add_special_tokens=False)["input_ids"]
    assert [CHARACTERS[i] for i in read] == list(TEXT)
    return source


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("float")
    return {family: write_source(root / family, family) for family in (*KINDS, "opt")}


def columns(words: np.ndarray[Any, Any], order: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """int32 [R, C] as values [R, 8 C]: nibble i of a word holds column order[i]."""
    values = np.empty((*words.shape, 8), np.float32)
    for i, column in enumerate(order):
        values[..., column] = words.view(np.uint32) >> np.uint32(4 * i) & np.uint32(15)
    return values.reshape(len(words), -1)


def weight_of(found: dict[str, torch.Tensor], layer: str, form: str) -> torch.Tensor:
    """fp32 [N, K], read by code that shares nothing with awqjit's."""
    q, zeros, scales = (found[f"{layer}.{part}"].numpy() for part in ("qweight", "qzeros", "scales"))
    if form == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        q, z = columns(q, order), columns(zeros, order)
    else:
        natural = tuple(range(8))
        q, z = columns(q.T.copy(), natural).T, columns(zeros, natural) + 1
        assert z.max() <= 15  # nothing wrapped around: not all readers mask
    rows = len(q) // len(scales)
    return torch.from_numpy(((q - z.repeat(rows, 0)) * scales.astype(np.float32).repeat(rows, 0)).T.copy())


def fake_quantized(folder: Path, form: str) -> Any:
    """A transformers model of ``nn.Linear`` in fp32 that holds the folder's weights."""
    found = tensors(folder)
    layers = [name.removesuffix(".qweight") for name in found if name.endswith(".qweight")]
    state = {f"{layer}.weight": weight_of(found, layer, form) for layer in layers}
    state |= {
        name: value.float() for name, value in found.items() if value.is_floating_point() and "scales" not in name
    }
    settings = AutoConfig.from_pretrained(folder)
    del settings.quantization_config
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def described(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("form", "symmetric"), [("awq", False), ("gptq", False), ("gptq", True)])
def test_the_folder_is_the_rounded_model(
    sources: dict[str, Path], tmp_path: Path, family: str, form: str, symmetric: bool
) -> None:
    report = quantize_folder(
        sources[family], tmp_path / "out", group_size=16, symmetric=symmetric, calibration=CALIBRATION, format=form,
        show_progress=False,
    )  # fmt: skip
    assert report.calibrated
    with config.override(kernel="torch"):
        model = awqjit.from_pretrained(tmp_path / "out", dtype=torch.float32, progress=False)
        assert sum(isinstance(module, awqjit.Int4Linear) for module in model.modules()) == len(report.quantized)
        got = logits(model)
    assert bool(torch.isfinite(got).all())
    wanted = logits(fake_quantized(tmp_path / "out", form))
    # The same weights; sums are formed in another order.
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    exact = logits(AutoModelForCausalLM.from_pretrained(sources[family], dtype=torch.float32).eval())
    assert float((got - exact).norm() / exact.norm()) < 0.7  # and the rounded model is near the one it was made of


def test_calibrating_twice_writes_the_same_bytes(sources: dict[str, Path], tmp_path: Path) -> None:
    for name in ("one", "two"):
        quantize_folder(sources["llama"], tmp_path / name, group_size=32, calibration=CALIBRATION, show_progress=False)
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_calibration_scales_what_the_weights_alone_do_not(sources: dict[str, Path], tmp_path: Path) -> None:
    quantize_folder(sources["llama"], tmp_path / "awq", group_size=32, calibration=CALIBRATION, show_progress=False)
    quantize_folder(sources["llama"], tmp_path / "clip", group_size=32, show_progress=False)
    float_one, awq, clip = (tensors(folder) for folder in (sources["llama"], tmp_path / "awq", tmp_path / "clip"))
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(clip[norm], float_one[norm])
    assert not torch.equal(awq[norm], float_one[norm])
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(awq[name], float_one[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_stays_float_keeps_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    source = write_source(tmp_path / "float", "qwen2", dtype=dtype)
    quantize_folder(source, tmp_path / "out", group_size=32, calibration=CALIBRATION, show_progress=False)
    found = tensors(tmp_path / "out")
    for name, value in found.items():
        if value.is_floating_point():
            assert value.dtype == (torch.float16 if name.endswith("scales") else dtype), name


def test_configs_are_what_other_readers_expect(sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["llama"]
    options: dict[str, Any] = {"group_size": 32, "skip": ("layers.1.mlp", "v_proj"), "show_progress": False}
    report = quantize_folder(source, tmp_path / "awq", **options)
    skipped = sorted([f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
                     + [f"model.layers.{i}.self_attn.v_proj" for i in range(2)])  # fmt: skip
    assert sorted(report.kept) == sorted([*skipped, "lm_head"])
    assert described(tmp_path / "awq") == {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head", *skipped],
    }  # fmt: skip
    quantize_folder(source, tmp_path / "gptq", symmetric=True, format="gptq", **options)
    found = described(tmp_path / "gptq")
    assert found.items() >= {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": False,
        "sym": True, "lm_head": False,
    }.items()  # fmt: skip
    rules = [rf"-:^{name}$".replace(".", r"\.") for name in skipped]
    assert found["dynamic"] == {rule: {} for rule in rules}
    tensors_found = tensors(tmp_path / "gptq")
    assert set(tensors_found["model.layers.0.mlp.up_proj.qzeros"].flatten().tolist()) == {0x77777777}
    assert tensors_found["model.layers.0.mlp.up_proj.g_idx"].tolist() == [i // 32 for i in range(64)]
    assert f"{skipped[0]}.weight" in tensors_found
    with config.override(kernel="torch"):
        for name in ("awq", "gptq"):
            assert bool(torch.isfinite(logits(awqjit.from_pretrained(tmp_path / name, progress=False))).all())


def test_names_that_skip_nothing_are_an_error(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="skip: got gate_prj"):
        quantize_folder(sources["llama"], tmp_path / "out", group_size=32, skip=("gate_prj", "up_proj"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("group_size", [16, 48, 96, -1])
def test_group_sizes_from_16_to_a_whole_column_are_written(
    sources: dict[str, Path], tmp_path: Path, group_size: int
) -> None:
    # 48 and 96 divide the 96 columns of down_proj, and not the 64 of the others, which stay float.
    report = quantize_folder(
        sources["llama"], tmp_path / "out", group_size=group_size, calibration=CALIBRATION, show_progress=False
    )
    assert len(report.quantized) == (14 if group_size in (16, -1) else 2)
    scales = tensors(tmp_path / "out")["model.layers.0.mlp.down_proj.scales"]
    assert len(scales) == (1 if group_size == -1 else 96 // group_size)
    with config.override(kernel="torch"):
        got = logits(awqjit.from_pretrained(tmp_path / "out", dtype=torch.float32, progress=False))
    wanted = logits(fake_quantized(tmp_path / "out", "awq"))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(("options", "message"), [
    ({"group_size": 8}, "group_size: got 8"), ({"group_size": 20}, "group_size: got 20"),
    ({"group_size": 0}, "group_size: got 0"), ({"format": "gguf"}, "format: got 'gguf', wanted one of awq, gptq"),
])  # fmt: skip
def test_other_group_sizes_and_forms_are_refused(
    sources: dict[str, Path], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        quantize_folder(sources["llama"], tmp_path / "out", **options)


@pytest.mark.parametrize(("widths", "size"), [
    ((64, 96), 32), ((64, 192), 64), ((256, 128), 128), ((256, 384), 128), ((64, 48), 16), ((64, 80), 16),
])  # fmt: skip
def test_the_automatic_group_size_is_the_largest_that_divides_every_layer(
    tmp_path: Path, widths: tuple[int, int], size: int
) -> None:
    hidden, intermediate = widths
    source = write_float(tmp_path / "float", hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1)
    report = quantize_folder(source, tmp_path / "out", show_progress=False)
    assert (report.group_size, report.plan.automatic) == (size, True)
    assert len(report.quantized) == report.plan.layers == 7
    assert report.kept.keys() == {report.plan.head} == {"lm_head"}
    assert described(tmp_path / "out")["group_size"] == size
    scales = tensors(tmp_path / "out")["model.layers.0.mlp.down_proj.scales"]
    assert len(scales) == intermediate // size


class TestPlan:
    """A model of layers with 256 columns, and one with 40, which no group size on the list divides."""

    @staticmethod
    def model(**more: nn.Linear) -> nn.Module:
        made = nn.Module()
        made.one, made.narrow, made.two = nn.Linear(256, 64), nn.Linear(40, 64), nn.Linear(256, 64)
        for name, layer in more.items():
            setattr(made, name, layer)
        made.get_output_embeddings = lambda: more.get("head")
        return made

    def test_layers_that_no_size_divides_do_not_count(self) -> None:
        plan = make_plan(self.model(), None, "awq", ())
        assert plan == Plan(128, True, ("one", "two"), {"narrow": "in_features 40 is not a multiple of 16"}, None)

    def test_layers_that_stay_float_anyway_do_not_count(self) -> None:
        odd = {"odd": nn.Linear(32, 63), "head": nn.Linear(32, 64), "left": nn.Linear(32, 64)}
        plan = make_plan(self.model(**odd), None, "awq", ("left",))
        assert plan.group_size == 128
        assert plan.kept == {
            "narrow": "in_features 40 is not a multiple of 16", "odd": "out_features 63 is not a multiple of 8",
            "head": "the head is never quantized", "left": "skipped: left",
        }  # fmt: skip
        assert plan.head == "head" and plan.layers == 5

    def test_a_size_that_was_asked_for_is_taken(self) -> None:
        plan = make_plan(self.model(), 40, "awq", ())
        assert (plan.group_size, plan.automatic, plan.quantized) == (40, False, ("narrow",))
        assert plan.kept["one"].endswith("not a multiple of group size 40; --group-size 16, 32, 64, 128 would do")
        assert make_plan(self.model(), -1, "gptq", ()).quantized == ("one", "narrow", "two")

    @pytest.mark.parametrize(("size", "got"), [(None, "the automatic one"), (48, "48")])
    def test_a_model_without_a_layer_that_fits_is_refused(self, size: int | None, got: str) -> None:
        with pytest.raises(ArgumentError, match=rf"group_size: got {got}, wanted one that suits.*one: skipped"):
            make_plan(self.model(), size, "awq", ("one", "two"))


@pytest.mark.parametrize(("size", "shown"), [
    ([], ["group size 32 (the largest of", "float: lm_head (the head is never quantized)"]),
    (["--group-size", "64"], ["float: model.layers.0.mlp.down_proj and 1 more (in_features 96", "float: lm_head"]),
])  # fmt: skip
def test_the_command_says_what_stays_float_before_it_reads_a_weight(
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    size: list[str],
    shown: list[str],
) -> None:
    said: list[str] = []
    read = Checkpoint.read

    def noting(self: Checkpoint, *names: str, **options: Any) -> dict[str, torch.Tensor]:
        said.append(capsys.readouterr().out)
        return read(self, *names, **options)

    monkeypatch.setattr(Checkpoint, "read", noting)
    assert main(["quantize", str(sources["llama"]), str(tmp_path / "out"), "--method", "clip", *size]) == 0
    before, after = said[0].splitlines(), capsys.readouterr().out
    assert not any(said[1:])
    for start in shown:
        assert any(line.startswith(start) for line in before), (start, before)
    assert f"{12 if size else 14} of 14 layers quantized at group size {64 if size else 32}: " in after
    assert "float:" not in after


def test_a_destination_that_holds_the_source_is_refused(tmp_path: Path) -> None:
    source = write_float(tmp_path / "models/float")
    with pytest.raises(ArgumentError, match=r"the destination is the source$"):
        quantize_folder(source, source, force=True)
    with pytest.raises(ArgumentError, match=rf"the source {re.escape(str(source))} is in it$"):
        quantize_folder(source, tmp_path / "models", force=True)
    assert (source / "model.safetensors").is_file()


def test_a_type_of_model_that_is_not_known_is_rounded_by_its_weights_alone_with_one_warning(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.warns(AwqJitWarning, match="does not know models of type 'opt'") as caught:
        report = quantize_folder(
            sources["opt"], tmp_path / "out", group_size=32, calibration=CALIBRATION, show_progress=False
        )
    assert len([warning for warning in caught if warning.category is AwqJitWarning]) == 1
    assert not report.calibrated
    quantize_folder(sources["opt"], tmp_path / "clip", group_size=32, show_progress=False)
    one, two = tensors(tmp_path / "out"), tensors(tmp_path / "clip")
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_a_model_without_a_tokenizer_is_rounded_by_its_weights_alone_with_one_warning(tmp_path: Path) -> None:
    source = write_float(tmp_path / "float")
    with pytest.warns(AwqJitWarning, match="no tokenizer"):
        report = quantize_folder(source, tmp_path / "out", group_size=32, calibration=CALIBRATION, show_progress=False)
    assert not report.calibrated


def test_a_calibration_that_runs_warns_of_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AwqJitWarning)
        quantize_folder(sources["qwen2"], tmp_path / "out", calibration=CALIBRATION, group_size=32, show_progress=False)
