# SPDX-License-Identifier: Apache-2.0
"""What configs say of single layers, and where configs are: AutoRound's, compressed-tensors' and GPTQModel's forms."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from awqjit.errors import FormatError
from awqjit.formats import FormatConfig, LayerFormat, find_config, parse
from awqjit.formats.rules import Rule

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}
Q, GATE, DOWN = (f"model.layers.3.{part}" for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"))


def weights(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128} | changes


def compressed(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": {"targets": ["Linear"], "weights": weights()} | group
                          for i, group in enumerate(groups or ({},))},
        "ignore": ["lm_head"],
    } | changes  # fmt: skip


def settings_of(config: dict[str, Any], name: str) -> tuple[int, int, bool]:
    layer = parse(config).layer(name)
    assert type(layer) is LayerFormat
    return layer.bits, layer.group_size, layer.zero_point


class TestDynamic:
    CONFIG = GPTQ | {
        "dynamic": {
            r"-:mlp": {},  # no name starts like that
            r"-:.*\.self_attn\..*": {},
            r"+:.*\.3\.mlp\.down.*": {"bits": 8, "group_size": 64, "desc_act": True},
            r".*\.mlp\.gate_proj": {"group_size": 32, "sym": False},
            r".*down_proj": {"bits": 2},
        }
    }

    def test_the_first_expression_that_matches_from_the_start_holds(self) -> None:
        format = parse(self.CONFIG)
        assert format.skips(Q) and not format.skips(GATE) and not format.skips(DOWN)
        assert settings_of(self.CONFIG, DOWN) == (8, 64, False)
        assert settings_of(self.CONFIG, GATE) == (4, 32, True)
        assert settings_of(self.CONFIG, "model.layers.4.mlp.down_proj") == (2, 128, False)
        assert settings_of(self.CONFIG, "model.layers.4.mlp.up_proj") == (4, 128, False)

    def test_layers_that_are_not_int4_say_why(self) -> None:
        format = parse(self.CONFIG)
        assert format.layer(DOWN).refused == "it has 8 bits, only 4 are read"
        assert format.layer(DOWN).dequantizable
        assert not format.layer("model.layers.4.mlp.down_proj").dequantizable
        assert format.layer(GATE).refused is None

    def test_a_layer_listed_as_float_has_the_models_settings_in_case_it_is_quantized(self) -> None:
        assert settings_of(self.CONFIG, Q) == (4, 128, False)

    def test_awq_has_dynamic_too(self) -> None:
        config = {"quant_method": "awq", "bits": 4, "group_size": 64, "dynamic": {"+:.*gate.*": {"zero_point": False}}}
        assert settings_of(config, GATE) == (4, 64, False)


class TestAutoRound:
    @pytest.mark.parametrize(
        ("form", "version"),
        [
            ("auto_round:auto_gptq", "auto_round:auto_gptq"),
            ("auto_round:gptq", "auto_round:auto_gptq"),
            ("auto_gptq", "auto_round:auto_gptq"),
            ("auto", "auto_round:auto_gptq"),
            (None, "auto_round:auto_gptq"),
            ("AUTO_ROUND", "auto_round:gptqmodel"),
            ("auto_round:gptqmodel", "auto_round:gptqmodel"),
            ("auto_round:exllamav2", "auto_round:gptqmodel"),
            ("auto_round:auto_awq", "auto_round:auto_awq"),
            ("auto_round:awq", "auto_round:auto_awq"),
        ],
    )
    @pytest.mark.parametrize("method", ["auto-round", "intel/auto-round", "auto_round"])
    def test_each_packing_format_has_its_packing(self, method: str, form: str | None, version: str) -> None:
        config = ROUND | {"quant_method": method, "packing_format": form}
        assert parse(config) == FormatConfig("auto-round", 4, 128, False, version)

    def test_zero_points_are_stored_minus_one_by_auto_gptq_only(self) -> None:
        assert not parse(ROUND).v2
        assert parse(ROUND | {"packing_format": "auto_round"}).v2
        assert not parse({key: value for key, value in ROUND.items() if key != "packing_format"}
                         | {"backend": "gptq:exllamav2"}).v2  # fmt: skip

    def test_extra_config_names_layers_in_full_or_by_an_expression(self) -> None:
        config = ROUND | {
            "extra_config": {
                r".*mlp\.gate.*": {"bits": 8},
                "lm_head": {"bits": 16, "data_type": "float"},
                GATE: {"group_size": 32, "sym": False},
                DOWN: {"bits": 4, "data_type": "mx_fp"},
            }
        }
        format = parse(config)
        assert format.skips("lm_head")
        assert settings_of(config, GATE) == (4, 32, True)
        assert settings_of(config, "model.layers.4.mlp.gate_proj") == (8, 128, False)
        assert format.layer(DOWN).refused == "its weights are of type mx_fp"

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"packing_format": "auto_round:llm_compressor"}, "llm_compressor"),
            ({"packing_format": "auto_round:fp8_static"}, "fp8_static"),
            ({"data_type": "mx_fp"}, "mx_fp"),
            ({"act_bits": 8}, "activations of 8 bits"),
            ({"rotation_config": {"a": 1}}, "rotation_config"),
            ({"super_bits": 6}, "super_bits"),
            ({"bits": 2}, "2 bits"),
        ],
    )
    def test_other_exports_are_refused_by_name(self, change: dict[str, Any], named: str) -> None:
        with pytest.raises(FormatError, match=named):
            parse(ROUND | change)


class TestCompressedTensors:
    @pytest.mark.parametrize(
        ("group", "wanted"),
        [
            ({}, (4, 128, False)),
            ({"weights": weights(symmetric=False, group_size=32)}, (4, 32, True)),
            ({"weights": weights(strategy="channel", group_size=None)}, (4, -1, False)),
            ({"weights": weights(strategy="channel", group_size=-1)}, (4, -1, False)),
            ({"weights": {"num_bits": 4, "group_size": 64}}, (4, 64, False)),
            ({"format": "pack-quantized", "input_activations": None}, (4, 128, False)),
            ({"weights": weights(actorder="group")}, (4, 128, False)),
        ],
    )
    def test_a_group_of_all_linear_layers(self, group: dict[str, Any], wanted: tuple[int, int, bool]) -> None:
        assert settings_of(compressed(group), Q) == wanted
        assert parse(compressed(group)).packing.mark == "weight_packed"

    def test_names_come_before_expressions_and_those_before_classes(self) -> None:
        config = compressed(
            {"weights": weights(num_bits=8)},
            {"targets": ["re:.*mlp.*"], "weights": weights(symmetric=False)},
            {"targets": [DOWN], "weights": weights(group_size=32)},
            ignore=["lm_head", "re:.*vision.*"],
        )
        assert settings_of(config, Q) == (8, 128, False)
        assert settings_of(config, GATE) == (4, 128, True)
        assert settings_of(config, DOWN) == (4, 32, False)
        format = parse(config)
        assert format.skips("lm_head") and format.skips("model.vision.mlp.0") and not format.skips(Q)
        assert not format.skips("model.lm_head")

    def test_layers_that_no_group_targets_are_float(self) -> None:
        format = parse(compressed({"targets": ["re:.*mlp.*"]}))
        assert format.skips(Q) and not format.skips(GATE)

    def test_groups_in_other_forms_are_refused_layer_by_layer(self) -> None:
        config = compressed(
            {"targets": ["re:.*mlp.*"]},
            {"targets": [Q], "format": "float-quantized", "weights": weights(num_bits=8, type="float")},
            {"targets": ["lm_head"], "format": "float-quantized"},
            {"targets": ["other"], "weights": weights(strategy="tensor")},
            {"targets": ["last"], "input_activations": {"num_bits": 8}},
            format="mixed-precision", ignore=[],
        )  # fmt: skip
        reasons = {name: parse(config).layer(name).refused for name in (GATE, Q, "lm_head", "other", "last")}
        assert reasons == {
            GATE: None,
            Q: "its weights are of type float",
            "lm_head": "it is of format float-quantized",
            "other": "its scales are of strategy tensor",
            "last": "its activations are quantized to 8 bits",
        }
        assert not parse(config).layer(Q).dequantizable

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            (compressed(format="float-quantized"), "float-quantized"),
            (compressed(format="marlin-24"), "marlin-24"),
            (compressed(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
            (compressed({"weights": weights(num_bits=8)}), "8 bits"),
            (compressed({"weights": weights(type="float", num_bits=8)}), "type float"),
            (compressed({"input_activations": {"num_bits": 8}}), "activations are quantized to 8 bits"),
            (compressed(config_groups={}), "no config_groups"),
            (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
            (compressed(transform_config={"config_groups": {}}), "transform_config"),
            (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
            (compressed(quantization_status="frozen"), "frozen"),
        ],
        ids=str,
    )
    def test_other_checkpoints_are_refused_by_name(self, config: dict[str, Any], named: str) -> None:
        with pytest.raises(FormatError, match=named):
            parse(config)

    def test_the_producers_own_config_objects_are_read(self) -> None:
        config = {
            "config_groups": {"group_0": {"format": None, "input_activations": None, "output_activations": None,
                "targets": ["Linear"], "weights": {"actorder": None, "block_structure": None, "dynamic": False,
                "group_size": 128, "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None,
                "strategy": "group", "symmetric": True, "type": "int", "zp_dtype": None}}},
            "format": "pack-quantized", "global_compression_ratio": None, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
            "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
        }  # fmt: skip
        assert settings_of(config, Q) == (4, 128, False)


@pytest.mark.parametrize(
    "config",
    [
        TestDynamic.CONFIG,
        ROUND | {"extra_config": {"lm_head": {"bits": 16}, ".*gate.*": {"group_size": 32}}, "dynamic": {"-:a": {}}},
        compressed({"weights": weights(num_bits=8)}, {"targets": ["re:.*mlp.*", Q]}),
        compressed({"weights": weights(strategy="channel", group_size=None, symmetric=False)}),
        compressed({"targets": ["re:.*mlp.*"]}),
        compressed({}, {"targets": [Q], "weights": weights(type="float", num_bits=8)}),
        ROUND | {"extra_config": {DOWN: {"data_type": "mx_fp"}}},
    ],
    ids=str,
)
def test_a_config_is_written_as_it_is_read(config: dict[str, Any]) -> None:
    format = parse(config)
    assert parse(json.loads(json.dumps(format.to_dict()))) == format


@pytest.mark.parametrize(
    "config",
    [
        GPTQ | {"dynamic": {"+:(": {"bits": 8}}},
        ROUND | {"extra_config": {"*": {"bits": 8}}},
        compressed(ignore=["re:["]),
    ],
    ids=str,
)
def test_an_expression_that_is_none_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="which is no regular expression"):
        parse(config)


def test_a_group_that_is_not_read_for_any_reason_is_not_read_from_what_is_written() -> None:
    format = parse(compressed({}, {"targets": [Q], "input_activations": {"num_bits": 8}}))
    assert parse(format.to_dict()).layer(Q).refused


class TestFindConfig:
    def test_it_is_found_wherever_producers_put_it(self, tmp_path: Path) -> None:
        assert find_config(tmp_path, {"quantization_config": GPTQ, "text_config": {}}) == GPTQ
        assert find_config(tmp_path, {"text_config": {"quantization_config": GPTQ}}) == GPTQ
        assert find_config(tmp_path, {"compression_config": compressed()}) == compressed()
        (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 32, "version": "GEMM"}))
        found = find_config(tmp_path, {"quantization_config": None})
        assert parse(found) == FormatConfig("awq", 4, 32, True, "gemm")
        (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "damp_percent": 0.1}))
        assert parse(find_config(tmp_path, {})).method == "gptq"
        assert find_config(tmp_path, {"quantization_config": GPTQ}) == GPTQ

    def test_without_one_the_places_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"no quantization_config in config\.json, nor quantize_config\.json"):
            find_config(tmp_path, {"text_config": 3})

    @pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
    def test_a_damaged_file_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "quant_config.json").write_text(text, encoding="latin-1")
        with pytest.raises(FormatError, match=r"quant_config\.json"):
            find_config(tmp_path, {})


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(?:.*,)*x", r"(a|aa)*b", r"(?=(a+)*)x", r".*.*.*.*.*x", r"(.*){3}.*.*x"]
)
@pytest.mark.parametrize("kind", ["match", "search"])
def test_a_pattern_that_could_match_for_ever_is_refused(kind: str, pattern: str) -> None:
    with pytest.raises(FormatError, match="take for ever"):
        Rule(kind, pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"(?:.*\.)?layers\.\d+\.mlp\..*_proj", r".*layers\..*\.mlp\.experts\..*_proj.*", r"^model\.(q|k|v)_proj$"],
)
def test_patterns_that_producers_write_are_used_and_answer_at_once(pattern: str) -> None:
    rule, start = Rule("search", pattern), time.process_time()
    for layer in range(100):
        rule.matches(f"model.layers.{layer}.block_sparse_moe.experts.{layer}.mlp.shared.up_projection.weight")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("config", [GPTQ, ROUND], ids=["gptq", "auto-round"])
def test_a_sym_that_is_null_is_as_good_as_absent(config: dict[str, Any]) -> None:
    absent = {key: value for key, value in config.items() if key != "sym"}
    assert parse(absent | {"sym": None}).layer(Q) == parse(absent).layer(Q)
    with pytest.raises(FormatError, match="wanted true or false"):
        parse(absent | {"sym": "yes"})
