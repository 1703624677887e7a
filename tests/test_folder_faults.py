# SPDX-License-Identifier: Apache-2.0
"""Folders with strange configs, tensors, tokenizers or file sets: one clear error, and never made-up numbers."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from models import edit_config, edit_tensors, tensors, write_float
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import awqjit
from awqjit import config
from awqjit.cli.quantize import lines, plan_lines
from awqjit.errors import ArgumentError, FormatError
from awqjit.inspect_folder import inspect_folder
from awqjit.integrations.calibration import Calibration
from awqjit.integrations.evaluate import Evaluation, Score, evaluate
from awqjit.integrations.quantize_folder import Report, quantize_folder
from awqjit.integrations.quantize_plan import Plan
from awqjit.integrations.transformers import read_tokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "models"
GATE = "model.layers.0.mlp.gate_proj.weight"
TEXT = " ".join(f"w{i % 128}" for i in range(80))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(FIXTURES / name, tmp_path / name))


def load(folder: Path) -> Any:
    with config.override(kernel="torch"):
        return awqjit.from_pretrained(folder, dtype=torch.float32, progress=False)


def write_tokenizer(folder: Path, words: int) -> None:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "64"}, {"hidden_size": 0}, {"hidden_size": -64}, {"num_attention_heads": 0}, {"vocab_size": 0},
        {"hidden_act": "nothing"}, {"pad_token_id": 9999}, {"model_type": ["llama"]}, {"quantization_config": [1]},
    ],
)  # fmt: skip
def test_a_config_that_makes_no_model_is_a_format_error(
    copy_of: Callable[[str], Path], changes: dict[str, Any]
) -> None:
    folder = copy_of("llama-gptq-sym")
    edit_config(folder, lambda found: found.update(changes))
    with pytest.raises(FormatError):
        load(folder)


def test_a_damaged_generation_config_is_a_format_error(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama-gptq-sym")
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(FormatError, match=r"generation_config\.json"):
        load(folder)


def test_nobody_is_asked_whether_to_run_a_models_code(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask at the terminal, wait, and take a yes."""
    folder = copy_of("llama-gptq-sym")
    (folder / "code.py").write_text("raise SystemExit('the code of a model ran')")
    edit_config(folder, lambda found: found.update(model_type="its_own", auto_map={"AutoConfig": "code.Config"}))
    described = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))

    def asked(*prompt: object) -> str:
        pytest.fail("asked a question")

    monkeypatch.setattr("builtins.input", asked)
    for read in (load, read_tokenizer):
        with pytest.raises(FormatError, match="custom code"):
            read(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_integers_where_the_model_has_floats_are_refused(
    copy_of: Callable[[str], Path], name: str, dtype: torch.dtype
) -> None:
    folder = copy_of("llama-gptq-sym")
    edit_tensors(folder, lambda found: found.update({name: found[name].to(dtype)}))
    with pytest.raises(FormatError, match=rf"{name} is stored as {dtype}"):
        load(folder)


def test_inspect_names_a_weight_shape_that_is_not_one(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen2-compressed-awq-asym")
    name = "model.layers.0.self_attn.q_proj.weight_shape"
    edit_tensors(folder, lambda found: found.update({name: torch.full((2,), torch.nan)}))
    refused = [layer.refused for layer in inspect_folder(folder, show_progress=False).layers if layer.refused]
    assert len(refused) == 1 and "weight_shape" in refused[0]


def test_an_index_of_other_files_does_not_hide_the_single_one(copy_of: Callable[[str], Path]) -> None:
    """What a model was saved over may leave its index and shards behind; transformers reads the single file."""
    folder = copy_of("llama-gptq-sym")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted = load(folder)(ids).logits
    old = {name: torch.zeros_like(tensor) for name, tensor in tensors(folder).items()}
    save_file(old, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        assert torch.equal(load(folder)(ids).logits, wanted)


class TestQuantize:
    @pytest.mark.parametrize("calibrated", [True, False])
    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda weight: weight.index_fill(0, torch.tensor([0]), torch.nan), f"{GATE} holds NaN or infinity"),
            (lambda weight: weight / 0, f"{GATE} holds NaN or infinity"),
            (lambda weight: weight.to(torch.int8), f"{GATE} is stored as torch.int8"),
            (lambda weight: weight.to(torch.float8_e4m3fn), f"{GATE} is stored as torch.float8_e4m3fn"),
            (lambda weight: weight * 1e-9, r"layers\.0.*cannot be quantized: weight: got values up to"),
        ],
    )
    def test_a_source_that_is_not_a_float_model_is_refused(
        self, tmp_path: Path, calibrated: bool, change: Callable[[torch.Tensor], torch.Tensor], message: str
    ) -> None:
        source = write_float(tmp_path / "float", num_hidden_layers=1)
        write_tokenizer(source, 128)
        edit_tensors(source, lambda found: found.update({GATE: change(found[GATE])}))
        calibration = Calibration(TEXT, sequences=2, length=20) if calibrated else None
        with pytest.raises(FormatError, match=message):
            quantize_folder(source, tmp_path / "int4", group_size=32, calibration=calibration, show_progress=False)
        assert [entry.name for entry in tmp_path.iterdir()] == ["float"]

    @pytest.mark.parametrize("inside", ["file/int4", "/proc/nowhere/int4"])
    def test_a_destination_that_cannot_be_made_is_an_argument_error(self, tmp_path: Path, inside: str) -> None:
        (tmp_path / "file").touch()
        source = write_float(tmp_path / "float", num_hidden_layers=1)
        with pytest.raises(ArgumentError, match="writing fails"):
            quantize_folder(source, tmp_path / inside, group_size=32, show_progress=False)

    def test_a_full_disk_is_an_argument_error(self, tmp_path: Path) -> None:
        source = write_float(tmp_path / "float", num_hidden_layers=1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            with pytest.raises(ArgumentError, match="writing fails"):
                quantize_folder(source, tmp_path / "int4", group_size=32, show_progress=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [entry.name for entry in tmp_path.iterdir()] == ["float"]

    def test_a_tokenizer_of_another_model_is_refused(self, tmp_path: Path) -> None:
        source = write_float(tmp_path / "float", num_hidden_layers=1)
        write_tokenizer(source, 4000)
        with pytest.raises(FormatError, match="gives the token 3000, and the model knows 128"):
            quantize_folder(source, tmp_path / "int4", group_size=32, calibration=Calibration("w3000 " * 40))

    def test_the_report_fits_80_columns(self) -> None:
        kept = {"model.layers.0.self_attn.q_proj": "in_features 64 is not a multiple of group size 24; " * 3}
        plan = Plan(24, True, ("a",), kept, None)
        shown = plan_lines(plan) + lines(Report(Path("/somewhere"), plan, False, 1, 1.0))
        assert all(len(line) <= 80 for text in shown for line in text.splitlines())


class TestEval:
    def test_a_tokenizer_of_another_model_is_refused(self, copy_of: Callable[[str], Path]) -> None:
        folder = copy_of("llama-gptq-sym")
        write_tokenizer(folder, 4000)
        with config.override(kernel="torch"), pytest.raises(FormatError, match="gives the token 3000"):
            evaluate(folder, "w3000 " * 40, show_progress=False)

    @pytest.mark.parametrize("nll", [1e5, float("nan"), float("inf")])
    def test_scores_beyond_a_float_are_null_in_json(self, nll: float) -> None:
        found = Evaluation("folder", 1, 1, "bfloat16", (Score("dequantized", nll, 1.0),)).to_dict()
        assert found["scores"][0]["perplexity"] is None
        json.dumps(found, allow_nan=False)

    def test_a_warning_about_the_folder_is_shown_once(self, copy_of: Callable[[str], Path]) -> None:
        """It is loaded twice, for the reference and for the modes."""
        import warnings

        folder = copy_of("llama-auto-round-mixed")
        write_tokenizer(folder, 128)
        with config.override(kernel="torch"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            evaluate(folder, TEXT, tokens=40, show_progress=False)
        assert len([warning for warning in caught if "dequantized" in str(warning.message)]) == 1
