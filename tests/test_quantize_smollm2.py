# SPDX-License-Identifier: Apache-2.0
"""Calibration on a real model, SmolLM2-135M-Instruct at group size 64, against the float model and plain rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_smollm2 import TEXT, dequantized, gguf, mean_nll  # noqa: F401  (gguf is a fixture)

from awqjit.integrations.calibration import Calibration, builtin_text
from awqjit.integrations.float_source import open_source
from awqjit.integrations.quantize_folder import quantize_folder

CLOSER = 0.7  # of the distance that plain rounding leaves


def float_model(path: Path) -> Any:
    """The file's own values in fp32."""
    source = open_source(path)
    model = type(source.model)(source.model.config).to(torch.float32).eval()
    state = {name: source.read(name).float() for name in source.shapes}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) == {"lm_head.weight"}  # tied to the embeddings
    model.tie_weights()
    return model


def test_calibration_brings_the_likelihood_of_a_text_closer_to_the_float_model(
    gguf: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    tokenizer = open_source(gguf).tokenizer()
    text = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    assert text.shape[1] > 2000
    assert TEXT.read_text(encoding="utf-8")[:200] not in builtin_text("calibration")
    exact = mean_nll(float_model(gguf), text)
    quantize_folder(gguf, tmp_path / "round", group_size=64, clip_search=False, show_progress=False)
    rounded = mean_nll(dequantized(tmp_path / "round"), text) - exact
    report = quantize_folder(
        gguf, tmp_path / "awq", group_size=64, calibration=Calibration(builtin_text("calibration")), show_progress=False
    )
    assert report.calibrated
    assert len(report.quantized) == 210
    calibrated = mean_nll(dequantized(tmp_path / "awq"), text) - exact
    measured = (
        f"mean NLL over {text.shape[1] - 1} tokens: float {exact:.5f}, rounding {rounded:+.5f}, "
        f"calibrated {calibrated:+.5f} in {report.seconds:.0f} s"
    )
    print(measured)
    assert rounded > 0, measured
    assert abs(calibrated) <= CLOSER * rounded, measured
