# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's ``quantization_config``: read whoever wrote it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from awqjit.errors import FormatError
from awqjit.formats import FormatConfig, Rule, parse

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


class TestConfig:
    @pytest.mark.parametrize(
        "config, wanted",
        [
            (AWQ, FormatConfig("awq", 4, 128, True, "gemm")),
            (AWQ | {"version": "GEMM", "group_size": -1}, FormatConfig("awq", 4, -1, True, "gemm")),
            ({"quant_method": "AWQ", "bits": 4, "group_size": 64}, FormatConfig("awq", 4, 64, True, "gemm")),
            # AutoAWQ's own quant_config.json
            (
                {"w_bit": 4, "q_group_size": 32, "zero_point": False, "version": "GEMM"},
                FormatConfig("awq", 4, 32, False, "gemm"),
            ),
            # transformers writes GPTQ's defaults into AWQ configs
            (AWQ | {"sym": True, "desc_act": False, "use_exllama": None}, FormatConfig("awq", 4, 128, True, "gemm")),
            (GPTQ, FormatConfig("gptq", 4, 128, False, "gptq")),
            (GPTQ | {"checkpoint_format": "gptq_v2"}, FormatConfig("gptq", 4, 128, False, "gptq_v2")),
            (GPTQ | {"format": "gptq", "sym": False}, FormatConfig("gptq", 4, 128, True, "gptq")),
            # AutoGPTQ's own quantize_config.json of old
            (
                {"bits": 4, "group_size": 128, "damp_percent": 0.01, "sym": False, "true_sequential": True},
                FormatConfig("gptq", 4, 128, True, "gptq"),
            ),
            (GPTQ | {"use_exllama": True, "backend": "auto", "dynamic": {"-:.*lm_head": {}}, "exllama_config": {}},
             FormatConfig("gptq", 4, 128, False, "gptq", rules=(Rule("match", ".*lm_head", keeps_float=True),))),
            (AWQ | {"version": "gemv"}, FormatConfig("awq", 4, 128, True, "gemv")),
            (GPTQ | {"desc_act": True}, FormatConfig("gptq", 4, 128, False, "gptq")),  # each layer's g_idx says it
            (GPTQ | {"checkpoint_format": "gptq_p"}, FormatConfig("gptq", 4, 128, False, "gptq_p")),
        ],
    )  # fmt: skip
    def test_configs_of_every_producer_are_read(self, config: dict[str, Any], wanted: FormatConfig) -> None:
        assert parse(config) == wanted
        assert parse(wanted.to_dict()) == wanted

    def test_transformers_own_config_objects_are_read(self) -> None:
        transformers = pytest.importorskip("transformers")
        awq = transformers.AwqConfig(bits=4, group_size=64, modules_to_not_convert=["visual"]).to_dict()
        assert parse(awq) == FormatConfig("awq", 4, 64, True, "gemm", ("visual",))
        gptq = transformers.GPTQConfig(bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2").to_dict()
        assert parse(gptq) == FormatConfig("gptq", 4, 32, True, "gptq_v2")

    @pytest.mark.parametrize(
        "config, named",
        [
            (AWQ | {"version": "gemv_fast"}, "gemv_fast"),
            (AWQ | {"version": "Marlin"}, "marlin"),
            (AWQ | {"version": "exllama"}, "exllama"),
            (AWQ | {"version": "llm-awq"}, "llm-awq"),
            (AWQ | {"backend": "llm-awq"}, "llm-awq"),
            (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
            (GPTQ | {"is_marlin_format": True}, "marlin"),
            (GPTQ | {"is_exllama_format": True}, "exllama"),
            (GPTQ | {"checkpoint_format": "bitblas"}, "bitblas"),
            (GPTQ | {"checkpoint_format": "qqq"}, "qqq"),
            (GPTQ | {"pack_dtype": "int16"}, "int16"),
            (AWQ | {"bits": 8}, "8 bits"),
            (GPTQ | {"bits": 2}, "2 bits"),
            *[
                ({"quant_method": method, "bits": 4, "group_size": 128}, method)
                for method in (
                    "compressed-tensors", "gptq_marlin", "bitsandbytes", "aqlm", "hqq", "quark", "torchao", "fp8",
                )
            ],
            ({"bits": 4, "group_size": 128}, "names no quant_method"),
            ({}, "names no quant_method"),
        ],
        ids=str,
    )  # fmt: skip
    def test_everything_else_is_refused_by_name(self, config: dict[str, Any], named: str) -> None:
        with pytest.raises(FormatError) as caught:
            parse(config)
        what, remedy = caught.value.args
        assert named in what
        assert "AWQ (version gemm) or GPTQ" in remedy

    @pytest.mark.parametrize(
        "config, problem",
        [
            (GPTQ | {"group_size": 0}, "group_size 0"),
            (GPTQ | {"group_size": "128"}, "group_size='128'"),
            (GPTQ | {"group_size": None}, "no group_size"),
            (GPTQ | {"sym": "yes"}, "sym='yes'"),
            (AWQ | {"zero_point": None}, "zero_point=None"),
            (AWQ | {"w_bit": 8}, "bits=4, w_bit=8"),
            (AWQ | {"format": "gemv"}, "contradicts itself: version=gemm, format=gemv"),
            ({"quant_method": "awq", "group_size": 128}, "no bits"),
        ],
    )
    def test_a_config_that_makes_no_sense_says_where(self, config: dict[str, Any], problem: str) -> None:
        with pytest.raises(FormatError, match=problem):
            parse(config)

    @pytest.mark.parametrize(
        "entry, name, skipped",
        [
            ("model.layers.0.", "model.layers.0.mlp.down_proj", True),
            ("model.layers.1", "model.layers.11.mlp.down_proj", False),
            ("self_attn", "model.layers.3.self_attn.q_proj", True),
            ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
            ("mlp.gate", "model.layers.3.mlp.gate", True),
            ("down_proj", "model.layers.3.mlp.down_proj", True),
            ("lm_head", "lm_head", True),
            ("lm_head.weight", "lm_head", True),
            ("head", "lm_head", False),
        ],
    )
    def test_modules_to_not_convert_matches_whole_parts_of_a_name(self, entry: str, name: str, skipped: bool) -> None:
        assert parse(AWQ | {"modules_to_not_convert": ["visual", entry]}).skips(name) is skipped

    def test_nothing_is_skipped_without_the_list(self) -> None:
        assert not parse(AWQ | {"modules_to_not_convert": None}).skips("lm_head")
