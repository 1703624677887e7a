# SPDX-License-Identifier: Apache-2.0
"""`awqjit inspect`: a folder's layers as they are, and labels that its numbers contradict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch

safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("typer")

from strategies import RawWeight, Shape  # noqa: E402
from test_formats_layers import packed  # noqa: E402

from awqjit.cli.app import app  # noqa: E402
from awqjit.errors import FormatError  # noqa: E402
from awqjit.inspect_folder import LayerReport, inspect_folder, statistics  # noqa: E402
from awqjit.weight import QuantizedWeight, pack_nibbles  # noqa: E402

SHAPE = Shape(128, 64, 32)
NAMES = [f"model.layers.{i}.mlp.up_proj" for i in (0, 2, 10)]
CONFIGS: dict[str, dict[str, Any]] = {
    "gemm": {"quant_method": "awq", "version": "gemm"},
    "gemv": {"quant_method": "awq", "version": "gemv"},
    "gptq": {"quant_method": "gptq", "sym": False},
    "gptq_v2": {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_v2"},
    "auto_gptq": {"quant_method": "auto-round", "sym": False, "packing_format": "auto_round:auto_gptq"},
    "auto_awq": {"quant_method": "auto-round", "sym": False, "packing_format": "auto_round:auto_awq"},
    "pack-quantized": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"targets": ["Linear"],
                                "weights": {"num_bits": 4, "group_size": 32, "symmetric": False}}},
    },
}  # fmt: skip


def rounded(seed: int, shape: Shape = SHAPE) -> RawWeight:
    """Normal weights whose columns lie off centre, rounded to nearest between each group's ends."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((shape.k, shape.n)) + rng.uniform(-0.8, 0.8, shape.n)
    parts = [w[g * shape.group : (g + 1) * shape.group] for g in range(shape.groups)]
    low, high = (np.stack([getattr(part, end)(axis=0) for part in parts]) for end in ("min", "max"))
    s = (high - low) / 15
    z = np.clip(np.round(-low / s), 0, 15)
    row = np.arange(shape.k) // shape.group
    q = np.clip(np.round(w / s[row]) + z[row], 0, 15)
    tensors = (torch.from_numpy(values) for values in (q.astype(np.uint8), z.astype(np.uint8)))
    return RawWeight(shape, *tensors, torch.from_numpy(s).half(), "rounded")


def write(folder: Path, config: dict[str, Any], layers: dict[str, dict[str, torch.Tensor]]) -> Path:
    tensors = {f"{name}.{part}": tensor for name, parts in layers.items() for part, tensor in parts.items()}
    tensors["model.embed_tokens.weight"] = torch.zeros(10, 64, dtype=torch.float16)
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.float16)
    folder.mkdir(exist_ok=True)
    safetensors_torch.save_file({name: tensor.clone() for name, tensor in tensors.items()},
                                str(folder / "model.safetensors"))  # fmt: skip
    described = {"bits": 4, "group_size": 32} | config
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": described}))
    return folder


def layers_of(folder: Path) -> tuple[LayerReport, ...]:
    return inspect_folder(folder, show_progress=False).layers


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_sound_folder_is_shown_as_it_is(name: str, tmp_path: Path) -> None:
    raw = {layer: rounded(seed) for seed, layer in enumerate(NAMES)}
    report = inspect_folder(write(tmp_path / "a", CONFIGS[name], {n: packed(name, r) for n, r in raw.items()}),
                            show_progress=False)  # fmt: skip
    assert [layer.name for layer in report.layers] == NAMES  # 2 before 10
    assert report.kept == ("model.embed_tokens",) and report.dtype == "float16"
    for layer, source in zip(report.layers, raw.values(), strict=True):
        assert (layer.in_features, layer.out_features, layer.bits, layer.group_size) == (128, 64, 4, 32)
        assert (layer.symmetric, layer.order, layer.scale_dtype, layer.bias) == (False, "no", "float16", False)
        assert layer.refused is None and layer.notes == () and layer.doubts == ()
        assert layer.centred and layer.columns
        assert layer.mean == pytest.approx(
            float((source.q.double() - source.dense_z.double().repeat_interleave(32, 0)).mean()), abs=1e-4
        )


@pytest.mark.parametrize(("stored", "labelled"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_zero_points_of_the_other_gptq_version_are_off_by_one(stored: str, labelled: str, tmp_path: Path) -> None:
    for layer in layers_of(write(tmp_path / "a", CONFIGS[labelled], {n: packed(stored, rounded(7)) for n in NAMES})):
        assert layer.centred is False
        assert abs(layer.mean or 0) == pytest.approx(1, abs=0.3)
        assert layer.doubts and "off by one" in layer.doubts[0]


def test_zero_points_in_another_order_than_the_weights_show(tmp_path: Path) -> None:
    raw = rounded(5)
    straight, _ = packers.pack_gptq(raw.dense_z.numpy().T.copy(), np.zeros((1, 8), dtype=np.uint8), v2=True)
    tensors = packed("gemm", raw) | {"qzeros": torch.from_numpy(straight.T.copy())}
    (layer,) = layers_of(write(tmp_path / "a", CONFIGS["gemm"], {NAMES[0]: tensors}))
    assert layer.columns is False and "another order" in layer.doubts[0]
    assert layer.centred


def test_a_label_that_the_shapes_contradict_is_overruled_with_a_note(tmp_path: Path) -> None:
    raw = rounded(1)
    for stored, labelled, config in (("gptq", "gemm", {}), ("gemm", "gptq", {}), ("gemm", "gemm", {"group_size": 64})):
        (layer,) = layers_of(write(tmp_path / "a", CONFIGS[labelled] | config, {NAMES[0]: packed(stored, raw)}))
        assert len(layer.notes) == 1 and "they are believed" in layer.notes[0]
        assert layer.packing == {"gptq": "GPTQ", "gemm": "AWQ gemm"}[stored] and layer.group_size == 32
        assert layer.refused is None and layer.centred


def test_other_layers_say_what_they_are(tmp_path: Path) -> None:
    raw, order = rounded(2), torch.arange(128, dtype=torch.int32).flip(0) // 32
    uneven = order.clone()
    uneven[:3] = 0
    layers: dict[str, dict[str, torch.Tensor]] = {
        "even": packed("gptq", raw, order),
        "uneven": packed("gptq", raw, uneven),
        "eight": {
            "qweight": torch.zeros(32, 64, dtype=torch.int32),
            "qzeros": torch.zeros(4, 16, dtype=torch.int32),
            "scales": torch.ones(4, 64),
        },
        "four": packed("gptq", raw),
        "odd": {"qweight": torch.zeros(3, 3, dtype=torch.int32), "scales": torch.zeros(2, 2)},
        "broken": packed("gptq", raw) | {"scales": torch.full((4, 64), torch.nan)},
        "biased": packed("gptq", raw) | {"bias": torch.zeros(64)},
    }
    config = CONFIGS["gptq"] | {"dynamic": {"+:eight|four": {"bits": 8}}}
    found = {layer.name: layer for layer in layers_of(write(tmp_path / "a", config, layers))}
    assert found["even"].order == "act-order" and found["uneven"].order == "uneven act-order"
    assert found["even"].columns is None
    assert found["eight"].bits == 8 and found["eight"].refused == "it has 8 bits, only 4 are read"
    assert (found["eight"].in_features, found["eight"].out_features) == (128, 64)
    assert found["four"].bits == 4 and found["four"].refused is None and len(found["four"].notes) == 1
    assert found["odd"].refused == "its tensors have the shapes of no format that is read"
    assert found["broken"].refused is not None and "NaN" in found["broken"].refused
    assert found["biased"].bias and not found["even"].bias


def test_a_folder_without_int4_layers_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no int4 layer"):
        inspect_folder(write(tmp_path / "a", {}, {}))
    folder = write(tmp_path / "b", {}, {NAMES[0]: packed("gemm", rounded(1))})
    (folder / "config.json").write_text("{}")
    with pytest.raises(FormatError, match="no quantization_config"):
        inspect_folder(folder)


def test_statistics_look_at_a_sample_of_large_layers() -> None:
    raw = rounded(3, Shape(64, 32, 16))
    weight = QuantizedWeight(pack_nibbles(raw.q), raw.s, raw.dense_z, 16, 64, 32)
    symmetric = QuantizedWeight(pack_nibbles(raw.q), raw.s, None, 16, 64, 32)
    assert statistics(weight)[1] is True
    mean, columns = statistics(symmetric)
    assert columns is None and mean == pytest.approx(float(raw.q.double().mean()) - 8, abs=1e-4)
    large = QuantizedWeight(pack_nibbles(raw.q).repeat(40, 2048), raw.s.repeat(40, 2048), raw.dense_z.repeat(40, 2048),
                            16, 2560, 65536)  # fmt: skip
    assert statistics(large)[1] is True


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        app(["inspect", *arguments], standalone_mode=False)
        return capsys.readouterr().out

    def test_identical_layers_are_one_entry_of_80_columns(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        layers = {name: packed("gemm", rounded(seed)) for seed, name in enumerate(NAMES)}
        text = self.run(capsys, str(write(tmp_path / "a", CONFIGS["gemm"], layers)))
        assert (
            "   3 x model.layers.*.mlp.up_proj\n       AWQ gemm, 128 -> 64, 4 bits, g 32, asymmetric, float16" in text
        )
        assert "runs on " in text and "(w4a16)" in text and "(w4a8)" in text
        assert "1 x float: model.embed_tokens" in text and "nothing odd was found" in text
        assert max(map(len, text.splitlines())) <= 80

    def test_what_is_odd_is_said_once_with_the_layers(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        layers = {f"model.layers.{i}.up": packed("gptq", rounded(i)) for i in range(5)}
        text = self.run(capsys, str(write(tmp_path / "a", CONFIGS["gptq_v2"], layers)))
        assert text.count("off by one") == 1 and "nothing odd" not in text
        assert "model.layers.2.up and 2 more" in " ".join(text.split())

    def test_json_holds_every_layer(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        layers = {name: packed("gptq", rounded(1)) for name in NAMES}
        found = json.loads(
            self.run(capsys, str(write(tmp_path / "a", CONFIGS["gptq"], layers)), "--json", "--dtype", "auto")
        )
        assert [layer["name"] for layer in found["layers"]] == NAMES
        assert set(found["layers"][0]["kernels"]) == {"w4a16", "w4a8"}
        assert found["config"]["quant_method"] == "gptq" and found["float"] == ["model.embed_tokens"]

    def test_transformers_is_not_needed(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a", CONFIGS["gemm"], {NAMES[0]: packed("gemm", rounded(1))})
        code = (
            "import sys; sys.modules['transformers'] = None\n"
            f"from awqjit.cli.app import app; app(['inspect', {str(folder)!r}])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "AWQ gemm" in done.stdout, done.stderr
