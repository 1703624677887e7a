# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a folder's compute modes, on a tiny model with its dequantized weights as the answer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("typer")

from test_quantize_folder import CHARACTERS, TEXT, fake_quantized, write_source

from awqjit import config
from awqjit.cli import main
from awqjit.errors import ArgumentError, FormatError
from awqjit.integrations.evaluate import Evaluation, evaluate
from awqjit.integrations.quantize_folder import quantize_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    quantize_folder(write_source(root / "float", "llama"), root / "awq", group_size=32, show_progress=False)
    return root / "awq"


@pytest.fixture(scope="module")
def found(folder: Path) -> Evaluation:
    with config.override(kernel="torch"):
        return evaluate(folder, TEXT, tokens=100, context=32, dtype=torch.float32, show_progress=False)


@torch.no_grad()
def test_the_first_score_is_that_of_the_dequantized_model(folder: Path, found: Evaluation) -> None:
    model = fake_quantized(folder, "awq")
    ids = torch.tensor([CHARACTERS.index(character) for character in TEXT[:100]])
    losses = []
    for start in (0, 32, 64, 96):  # windows of 32 tokens, the first of each not predicted
        window = ids[start : start + 32]
        losses.append(F.cross_entropy(model(input_ids=window[None]).logits[0, :-1], window[1:], reduction="none"))
    assert found.tokens == len(torch.cat(losses)) == 96
    assert found.scores[0].mode == "dequantized"
    assert found.scores[0].agreement == 1
    assert found.scores[0].nll == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_modes_are_compared_with_it(found: Evaluation) -> None:
    reference, w4a16, w4a8 = found.scores
    assert (w4a16.mode, w4a8.mode) == ("w4a16", "w4a8")
    assert w4a16.nll == pytest.approx(reference.nll, rel=1e-5)  # fp32 activations: only sums are formed differently
    assert w4a16.agreement == 1
    assert 1e-5 < abs(w4a8.nll - reference.nll) < 0.1  # int8 activations: seen, and small
    assert 0.5 < w4a8.agreement <= 1


def test_perplexities_and_differences_follow_from_the_scores(found: Evaluation) -> None:
    described = found.to_dict()
    for score, entry in zip(found.scores, described["scores"], strict=True):
        assert entry["perplexity"] == score.perplexity == pytest.approx(math.exp(score.nll))
        assert entry["nll_difference"] == score.nll - found.scores[0].nll
    assert json.loads(json.dumps(described))["context"] == 32


def test_a_text_that_is_too_short_is_refused(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="at least 2 tokens"):
        evaluate(folder, "w", show_progress=False)
    with pytest.raises(ArgumentError, match="tokens: got 1, wanted at least 2"):
        evaluate(folder, TEXT, tokens=1, show_progress=False)


def test_a_folder_without_a_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if "token" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(FormatError, match="no tokenizer"):
        evaluate(tmp_path, TEXT, show_progress=False)


def test_the_command_prints_a_table_or_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    with config.override(kernel="torch"):
        assert main(["eval", str(folder), "--text", str(tmp_path / "text.txt"), "--tokens", "40"]) == 0
        out = capsys.readouterr().out
        for word in ("39 tokens", "dequantized", "w4a16", "w4a8", "perplexity"):
            assert word in out
        assert main(["eval", str(folder), "--tokens", "40", "--json"]) == 0  # the text that comes along
        assert [score["mode"] for score in json.loads(capsys.readouterr().out)["scores"]][1:] == ["w4a16", "w4a8"]
    assert main(["eval", str(folder), "--text", str(tmp_path / "missing.txt")]) == 1
    assert "cannot be read as a text" in capsys.readouterr().err
