# SPDX-License-Identifier: Apache-2.0
"""The activation-aware search: what it folds changes no model, what it chooses lowers the error of outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from models import write_float
from torch import nn
from transformers import AutoModelForCausalLM

from awqjit.errors import ArgumentError, FormatError
from awqjit.integrations import awq_search
from awqjit.integrations.awq_search import FAMILIES, Fold, Inputs, fold, scale_block, search_scales
from awqjit.integrations.calibration import BlockRunner, Calibration, builtin_text, first_tokens
from awqjit.integrations.float_source import open_source
from awqjit.quantize import round_trip

IDS = torch.randint(0, 128, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def source(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp(family) / "float", family)


def float_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def unrounded(name: str, value: torch.Tensor) -> torch.Tensor:
    return value


def in_bfloat16(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16)


@pytest.mark.parametrize("stored", [unrounded, in_bfloat16])
def test_folding_any_scales_leaves_the_model_as_it_was(family: str, source: Path, stored: Any) -> None:
    model = float_model(source)
    before = logits(model)
    generator = torch.Generator().manual_seed(2)
    folded = 0
    for block in model.model.layers:
        for item in FAMILIES[family]:
            columns = block.get_submodule(item.layers[0]).in_features
            repeat = awq_search._repeat(block, item)
            assert repeat is not None
            scales = awq_search.shared_channels(torch.rand(columns, generator=generator) * 4 + 0.25, repeat)
            weights = [block.get_submodule(name).weight.clone() for name in item.layers]
            used = fold(block, item, scales, stored, repeat)
            for name, weight in zip(item.layers, weights, strict=True):
                torch.testing.assert_close(block.get_submodule(name).weight, weight * used)
            if item.offset == 0 or stored is unrounded:  # else a small 1 + w is stored as a coarse w near -1
                torch.testing.assert_close(used, scales, rtol=2**-7, atol=0)  # of bf16's 8 bits
            folded += 1
    assert folded == 2 * len(FAMILIES[family])
    # fp32 sums in another order; random weights make some logits small.
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))


def test_norms_that_are_folded_hold_what_their_dtype_can(source: Path, family: str) -> None:
    item = next(item for item in FAMILIES[family] if item.previous == "input_layernorm")
    block = float_model(source).model.layers[0].to(torch.bfloat16).float()
    scales = torch.full((64,), 3.0)
    fold(block, item, scales, in_bfloat16)
    weight = block.get_submodule(item.previous).weight
    assert torch.equal(weight, weight.to(torch.bfloat16).float())


def test_a_norm_weight_of_zero_stays_and_its_channel_is_not_scaled() -> None:
    block = nn.ModuleDict({"norm": nn.RMSNorm(4), "layer": nn.Linear(4, 8, bias=False)})
    block["norm"].weight.data[2] = 0
    weight = block["layer"].weight.clone()
    used = fold(block, Fold("norm", ("layer",)), torch.tensor([2.0, 4.0, 8.0, 0.5]), unrounded)
    assert used.tolist() == [2, 4, 1, 0.5]
    assert block["norm"].weight.tolist() == [0.5, 0.25, 0, 2]
    assert torch.equal(block["layer"].weight, weight * used)


def test_blocks_run_one_by_one_compute_what_the_model_does(source: Path) -> None:
    model = float_model(source)
    hidden_wanted: list[torch.Tensor] = []
    for block in model.model.layers:
        block.register_forward_hook(
            lambda module, args, out: hidden_wanted.append(out[0] if isinstance(out, tuple) else out)
        )
    logits(model)
    opened = open_source(source)
    runner = BlockRunner(opened.model, opened.read)
    hidden = runner.start(IDS)
    for index, wanted in enumerate(hidden_wanted):
        with runner.loaded(index) as loaded:
            others = [other for other in runner.blocks if other is not loaded]
            assert all(parameter.is_meta for other in others for parameter in other.parameters())
            assert not any(parameter.is_meta for parameter in loaded.parameters())
            inputs = runner.observe(index, hidden, sample=9)
        assert all(parameter.is_meta for parameter in loaded.parameters())
        torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        assert {len(given.sample) for given in inputs.values()} == {9}
    assert index == 1


def test_inputs_are_seen_as_the_layers_get_them(tmp_path: Path) -> None:
    opened = open_source(write_float(tmp_path / "float"))
    given: dict[str, list[torch.Tensor]] = {"self_attn.q_proj": [], "mlp.down_proj": []}
    model = float_model(tmp_path / "float")
    for name, seen in given.items():
        model.model.layers[1].get_submodule(name).register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0])
        )
    logits(model)
    runner = BlockRunner(opened.model, opened.read)
    hidden = runner.start(IDS)
    for index in range(2):
        with runner.loaded(index):
            inputs = runner.observe(index, hidden, sample=IDS.numel())
    for name, (seen,) in given.items():
        rows = seen.flatten(0, 1)
        torch.testing.assert_close(inputs[name].sample, rows, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(inputs[name].magnitude, rows.abs().mean(0), rtol=1e-4, atol=1e-4)
    assert inputs["self_attn.q_proj"] is inputs["self_attn.v_proj"]
    assert inputs["mlp.gate_proj"] is inputs["mlp.up_proj"] is not inputs["self_attn.q_proj"]


def salient_inputs(tokens: int = 200) -> Inputs:
    sample = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(3))
    sample[:, [5, 77]] *= 40
    return Inputs(sample.abs().mean(0), sample)


def test_the_search_gives_precision_to_channels_with_large_inputs() -> None:
    inputs = salient_inputs()
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)) * 0.02
    scales = search_scales([weight], inputs, group_size=64, symmetric=False)
    assert float(scales[[5, 77]].min()) > 2 * float(scales.median())

    def error(rounded: torch.Tensor) -> float:
        return float((inputs.sample.double() @ (rounded - weight).double().T).square().sum())

    scaled = round_trip(weight * scales, group_size=64) / scales
    assert error(scaled) < 0.5 * error(round_trip(weight, group_size=64))


@pytest.mark.parametrize("tokens", [40, 200])  # fewer than a layer's columns, and more
def test_the_sum_of_squares_is_that_of_the_outputs(tokens: int) -> None:
    inputs = salient_inputs(tokens)
    deltas = torch.randn(8, 128, generator=torch.Generator().manual_seed(5))
    wanted = float((inputs.sample.double() @ deltas.double().T).square().sum())
    assert awq_search.Energy(inputs.sample)(deltas) == pytest.approx(wanted, rel=1e-5)


def test_layers_without_inputs_are_not_scaled_to_nothing() -> None:
    inputs = Inputs(torch.zeros(64), torch.zeros(10, 64))
    scales = search_scales([torch.randn(8, 64)], inputs, group_size=32, symmetric=False)
    assert torch.equal(scales, torch.ones(64))


def observed(folder: Path) -> tuple[BlockRunner, torch.Tensor]:
    opened = open_source(folder)
    runner = BlockRunner(opened.model, opened.read)
    return runner, runner.start(IDS)


def test_a_fold_that_the_model_does_not_allow_is_found(tmp_path: Path) -> None:
    runner, hidden = observed(write_float(tmp_path / "float"))
    with runner.loaded(0) as block:
        before = hidden[:1].clone()
        inputs = runner.observe(0, hidden, 64)
        runner.check(0, before, hidden[:1])
        wrong = (Fold("input_layernorm", ("mlp.gate_proj", "mlp.up_proj")),)
        chosen = {"mlp.gate_proj", "mlp.up_proj"}
        inputs["mlp.gate_proj"].sample[:, 3] *= 50  # or no scales would be wanted
        inputs["mlp.gate_proj"].magnitude[3] *= 50
        scale_block(block, wrong, chosen, inputs, unrounded, group_size=32, symmetric=False)
        with pytest.raises(FormatError, match="computes something else"):
            runner.check(0, before, hidden[:1])
        mixed = (Fold("input_layernorm", ("self_attn.q_proj", "mlp.up_proj")),)
        with pytest.raises(FormatError, match="not given the same inputs"):
            scale_block(block, mixed, {*mixed[0].layers}, inputs, unrounded, group_size=32, symmetric=False)


@pytest.mark.parametrize("left_out", ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_layers_that_stay_float_keep_their_weights(tmp_path: Path, left_out: str) -> None:
    runner, hidden = observed(write_float(tmp_path / "float"))
    with runner.loaded(0) as block:
        inputs = runner.observe(0, hidden, 64)
        names = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        before = block.get_submodule(left_out).weight.clone()
        chosen = names - {left_out}
        scale_block(block, FAMILIES["llama"], chosen, inputs, unrounded, group_size=32, symmetric=False)
        assert torch.equal(block.get_submodule(left_out).weight, before)


class Words:
    """A tokenizer that takes every character for a token."""

    def __init__(self, first: int | None = None) -> None:
        self.bos_token_id = first

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, list[int]]:
        special = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": special + [ord(character) for character in text]}


class Config:
    max_position_embeddings = 30


def test_pieces_are_spread_over_the_text_and_begin_as_the_model_wants() -> None:
    text = "".join(chr(i) for i in range(100))
    pieces = Calibration(text, sequences=3, length=10).tokens(Words(), Config())
    assert pieces.tolist() == [[*range(0, 10)], [*range(45, 55)], [*range(90, 100)]]
    pieces = Calibration(text, sequences=2, length=10).tokens(Words(1), Config())
    assert pieces.tolist() == [[1, *range(0, 9)], [1, *range(91, 100)]]
    assert Calibration(text, sequences=9, length=50).tokens(Words(), Config()).shape == (3, 30)
    assert Calibration(text[:20], sequences=9, length=50).tokens(Words(), Config()).shape == (1, 20)
    assert first_tokens(Words(7)).tolist() == [7]
    assert first_tokens(Words()).tolist() == []


def test_texts_too_short_and_numbers_too_small_are_refused() -> None:
    with pytest.raises(ArgumentError, match="at least 8 tokens"):
        Calibration("abc").tokens(Words(), Config())
    with pytest.raises(ArgumentError, match="sample: got 0"):
        Calibration("abc", sample=0)


def test_the_texts_that_come_along_share_no_paragraph() -> None:
    calibration, evaluation = (set(builtin_text(name).split("\n\n")) for name in ("calibration", "evaluation"))
    assert len(builtin_text("calibration")) > 100_000
    assert len(builtin_text("evaluation")) > 20_000
    assert not calibration & evaluation
