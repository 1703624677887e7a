# SPDX-License-Identifier: Apache-2.0
"""Layers of one checkpoint that differ: mixed precision, redundant copies, odd shapes, groups that cannot be packed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from int4_folders import assert_logits, is_linear, logits_of, write_int4  # noqa: E402
from models import edit_config, edit_tensors, tensors, write_float  # noqa: E402

import awqjit  # noqa: E402
from awqjit import config, loader  # noqa: E402
from awqjit.checkpoint import Checkpoint  # noqa: E402
from awqjit.errors import AwqJitWarning, CheckpointMismatchError, FormatError  # noqa: E402
from awqjit.jit import forget  # noqa: E402
from awqjit.modules import Int4Linear  # noqa: E402
from awqjit.weight import QuantizedWeight  # noqa: E402

DOWN = "model.layers.{}.mlp.down_proj"
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(autouse=True)
def reference_kernels() -> Iterator[None]:
    with config.override(kernel="torch"):
        forget()
        yield
    forget()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_float(tmp_path_factory.mktemp("models") / "llama")


def load(folder: Any, **options: Any) -> Any:
    return awqjit.from_pretrained(folder, dtype=torch.float32, progress=False, **options)


def float_layers(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is torch.nn.Linear} - {"lm_head"}


def load_with_one_warning(folder: Path, match: str) -> Any:
    with pytest.warns(AwqJitWarning, match=match) as caught:
        model = load(folder)
    assert len([warning for warning in caught if issubclass(warning.category, AwqJitWarning)]) == 1
    return model


def assert_saved_again(model: Any, folder: Path) -> None:
    """What is written gives the same logits, and there is nothing left to warn of."""
    model.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AwqJitWarning)
        again = load(folder)
    assert float_layers(again) == float_layers(model)
    assert torch.equal(logits_of(again), logits_of(model))


def test_layers_may_have_groups_of_their_own(source: Path, tmp_path: Path) -> None:
    folder = write_int4(
        source,
        tmp_path / "int4",
        "gptq-v1",
        overrides={"down_proj": (4, 16), "layers.1.self_attn": (4, -1)},
        settings={"dynamic": {r"+:.*\.down_proj": {"group_size": 16}, r"+:.*layers\.1\.self_attn": {"group_size": -1}}},
    )
    model = load(folder)
    assert not float_layers(model)
    assert model.get_submodule(DOWN.format(0)).group_size == 16
    assert_logits(logits_of(model), folder)
    assert_saved_again(model, tmp_path / "saved")


@pytest.mark.parametrize("form", ["gptq-v1", "awq-gemm", "compressed-asym"])
def test_layers_may_be_left_float(form: str, source: Path, tmp_path: Path) -> None:
    folder = write_int4(
        source, tmp_path / "int4", form, quantizes=lambda name, t: is_linear(name, t) and "layers.0.mlp" not in name
    )
    model = load(folder)
    assert float_layers(model) == {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert_logits(logits_of(model), folder)
    assert_saved_again(model, tmp_path / "saved")


def test_8_bit_layers_run_as_float_with_one_warning(source: Path, tmp_path: Path) -> None:
    folder = write_int4(
        source,
        tmp_path / "int4",
        "gptq-v1",
        overrides={"down_proj": (8, 32)},
        settings={"dynamic": {r"+:.*\.down_proj": {"bits": 8}}},
    )
    model = load_with_one_warning(folder, r"2 int4 layers run as dequantized.*layers\.0\.mlp\.down_proj: it has 8 bits")
    assert float_layers(model) == {DOWN.format(0), DOWN.format(1)}
    assert_logits(logits_of(model), folder)
    assert_saved_again(model, tmp_path / "saved")


def test_layers_of_other_bits_are_refused_by_name_before_any_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_int4(source, tmp_path / "int4", "gptq-v1", settings={"dynamic": {r"+:.*\.down_proj": {"bits": 3}}})

    def to_3_bits(found: dict[str, torch.Tensor]) -> None:
        for layer in (DOWN.format(0), DOWN.format(1)):
            found[f"{layer}.qweight"] = torch.zeros(96 * 3 // 32, 64, dtype=torch.int32)
            found[f"{layer}.qzeros"] = torch.zeros(3, 64 * 3 // 32, dtype=torch.int32)

    edit_tensors(folder, to_3_bits)
    monkeypatch.setattr(Checkpoint, "read", None)
    with pytest.raises(FormatError, match=r"layers\.0\.mlp\.down_proj.*3 bits.*layers\.1\.mlp\.down_proj.*3 bits"):
        load(folder)


def test_act_order_with_unequal_groups_runs_as_float_with_one_warning(source: Path, tmp_path: Path) -> None:
    folder = write_int4(source, tmp_path / "int4", "gptq-v2-act-order")
    layers = [DOWN.format(0), UP]
    multiplied = tensors(Path(f"{folder}-float"))

    def move_a_row(found: dict[str, torch.Tensor]) -> None:
        for layer in layers:
            parts = {last: found[f"{layer}.{last}"] for last in ("qweight", "qzeros", "scales", "g_idx")}
            parts["g_idx"][3] = (parts["g_idx"][3] + 1) % 2
            q, z = packers.unpack_gptq(parts["qweight"].numpy(), parts["qzeros"].numpy(), v2=True)
            g = parts["g_idx"].numpy()
            wide = (q - z[g]).astype(np.float32) * parts["scales"].numpy().astype(np.float32)[g]
            multiplied[f"{layer}.weight"] = torch.from_numpy(np.ascontiguousarray(wide.T))

    edit_tensors(folder, move_a_row)
    edit_tensors(Path(f"{folder}-float"), lambda found: found.update(multiplied))
    model = load_with_one_warning(folder, "2 int4 layers run as dequantized.*rows into a group")
    assert float_layers(model) == set(layers)
    assert_logits(logits_of(model), folder)
    assert_saved_again(model, tmp_path / "saved")


@pytest.mark.parametrize("form", ["compressed-channel", "compressed-sym", "compressed-asym"])
def test_sizes_that_are_no_multiples_of_anything_load(form: str, tmp_path: Path) -> None:
    folder = write_int4(write_float(tmp_path / "float", intermediate_size=90), tmp_path / "int4", form)
    model = load(folder)
    assert not float_layers(model) and model.get_submodule(UP).out_features == 90
    assert_logits(logits_of(model), folder)
    assert_saved_again(model, tmp_path / "saved")


@pytest.mark.parametrize("shards", [2, 7])
def test_a_layers_tensors_may_lie_in_different_shards(shards: int, source: Path, tmp_path: Path) -> None:
    one = write_int4(source, tmp_path / "one", "gptq-v1-act-order")
    many = write_int4(source, tmp_path / "many", "gptq-v1-act-order", shards=shards)
    assert len(list(many.glob("*.safetensors"))) == shards
    assert torch.equal(logits_of(load(many)), logits_of(load(one)))


def test_a_quantized_head_is_used_although_the_config_ties_it(tmp_path: Path) -> None:
    source = write_float(tmp_path / "float", "qwen2", tie_word_embeddings=True)
    edit_tensors(source, lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].flip(0)}))
    folder = write_int4(
        source, tmp_path / "int4", quantizes=lambda name, t: is_linear(name, t) or name == "lm_head.weight"
    )
    edit_config(Path(f"{folder}-float"), lambda c: c.update(tie_word_embeddings=False))
    model = load(folder)
    assert isinstance(model.lm_head, Int4Linear) and isinstance(model.model.embed_tokens.weight, torch.nn.Parameter)
    assert_logits(logits_of(model), folder)
    assert_saved_again(model, tmp_path / "saved")


@pytest.mark.parametrize("listed", [False, True])
def test_a_layer_stored_twice_is_used_once(listed: bool, source: Path, tmp_path: Path) -> None:
    folder = write_int4(source, tmp_path / "int4", settings={"modules_to_not_convert": [UP] if listed else None})
    if listed:
        weight = tensors(source)[f"{UP}.weight"]
        edit_tensors(Path(f"{folder}-float"), lambda found: found.update({f"{UP}.weight": weight}))
    edit_tensors(folder, lambda found: found.update({f"{UP}.weight": tensors(source)[f"{UP}.weight"]}))
    used = "float" if listed else "int4"
    model = load_with_one_warning(
        folder, f"stored both as float and as int4.*the {used} weight is used .1 layers: {UP}"
    )
    assert float_layers(model) == ({UP} if listed else set())
    assert_logits(logits_of(model), folder)


def test_every_misfit_is_listed_and_no_layer_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_int4(source, tmp_path / "int4", "compressed-asym")

    def spoil(found: dict[str, torch.Tensor]) -> None:
        del found[f"{UP}.weight_scale"], found["model.norm.weight"]
        found[f"{DOWN.format(0)}.weight_packed"] = torch.zeros(3, 5, dtype=torch.int32)
        found["model.layers.7.mlp.up_proj.weight_packed"] = torch.zeros(96, 8, dtype=torch.int32)

    edit_tensors(folder, spoil)
    monkeypatch.setattr(Checkpoint, "read", None)
    with pytest.raises(CheckpointMismatchError) as caught:
        load(folder)
    missing, unexpected, mismatched = caught.value.args
    assert missing == (f"{UP}.weight_scale", "model.norm.weight")
    assert unexpected == ("model.layers.7.mlp.up_proj.weight_packed",)
    assert len(mismatched) == 1 and mismatched[0].startswith(f"{DOWN.format(0)}.weight_packed [3, 5], wanted [64, 12]")


def test_a_damaged_layer_stops_the_load_and_leaves_no_thread(source: Path, tmp_path: Path) -> None:
    folder = write_int4(source, tmp_path / "int4")
    edit_tensors(folder, lambda found: found[f"{UP}.scales"].fill_(float("nan")))
    with pytest.raises(FormatError, match=f"the layer {UP} cannot be read"):
        load(folder)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("awqjit-load")]


def test_the_bar_counts_every_layer_and_tensor(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {"steps": 0}

    @contextmanager
    def bar(description: str, total: int, enabled: bool) -> Iterator[Any]:
        seen.update(total=total, enabled=enabled)
        yield lambda: seen.update(steps=seen["steps"] + 1)

    monkeypatch.setattr(loader.progress, "bar", bar)
    load(write_int4(source, tmp_path / "int4"))
    assert seen == {"steps": 14 + 7, "total": 14 + 7, "enabled": False}  # embeddings, head, five norms


def test_hub_models_are_fetched_and_their_id_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = write_int4(source, tmp_path / "int4")
    asked = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "someone/nothing":
            raise OSError("no such model")
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    model = load("someone/tiny-llama-awq")
    assert torch.equal(logits_of(model), logits_of(load(folder)))
    assert model.config._name_or_path == "someone/tiny-llama-awq"
    assert [name for name, _ in asked] == ["someone/tiny-llama-awq"]
    assert "*.safetensors" in asked[0][1] and not any("bin" in pattern or "py" in pattern for pattern in asked[0][1])
    with pytest.raises(FormatError, match=r"neither a folder nor a hub model.*no such model"):
        load("someone/nothing")
    with pytest.raises(FormatError, match="is not a folder"):
        load("./someone/tiny-llama-awq")


def _weight(generator: torch.Generator, n: int, **changes: Any) -> QuantizedWeight:
    words = torch.randint(-(2**31), 2**31, (8, n), generator=generator).to(torch.int32)
    values: dict[str, Any] = {
        "qweight": words, "scales": torch.rand(2, n, generator=generator), "zeros": None, "group_size": 32,
        "in_features": 64, "out_features": n,
    }  # fmt: skip
    return QuantizedWeight(**(values | changes))


def test_weights_are_joined_side_by_side_only_if_their_groups_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    zeros = torch.randint(0, 16, (2, 24), generator=generator, dtype=torch.uint8)
    parts = [_weight(generator, 8), _weight(generator, 24, zeros=zeros)]
    joined = loader.join_columns(parts)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts], 1))
    assert loader.join_columns(parts[:1] * 2).zeros is None
    order = torch.arange(64).int().flip(0) // 32
    for other in (
        _weight(generator, 8, g_idx=order),
        _weight(generator, 8, scales=torch.ones(1, 8), group_size=64),
        _weight(generator, 8, scales=torch.ones(2, 8).half()),
    ):
        with pytest.raises(FormatError, match="different groups or scales"):
            loader.join_columns([parts[0], other])
