# SPDX-License-Identifier: Apache-2.0
"""What other projects' packers write is read bit for bit, and their models give the logits of what they hold.

The fixtures and the scripts that make them are described in fixtures/README.md. Nothing in them was made by awqjit.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402

import awqjit  # noqa: E402
from awqjit import config  # noqa: E402
from awqjit.errors import AwqJitWarning  # noqa: E402
from awqjit.formats import parse  # noqa: E402
from awqjit.formats.layer import LayerFormat  # noqa: E402
from awqjit.jit import forget  # noqa: E402
from awqjit.modules import Int4Linear  # noqa: E402
from awqjit.weight import SYMMETRIC_ZERO  # noqa: E402

FIXTURES = Path(__file__).parent / "fixtures"
LAYERS = sorted(path.stem for path in (FIXTURES / "packing").glob("*.safetensors"))
MODELS = sorted(path.name for path in (FIXTURES / "models").iterdir())
NAME = "model.layers.0.mlp.down_proj"
WARNINGS = {"llama-auto-round-mixed": (f"{NAME}: it has 8 bits",)}
"""What loading a model says; the others load in silence."""


@dataclass(frozen=True)
class Packed:
    """One packed layer: the packer's tensors, and the integers that it was given."""

    format: LayerFormat
    tensors: dict[str, torch.Tensor]
    q: torch.Tensor  # uint8 [K, N]
    z: torch.Tensor  # uint8 [G, N]
    s: torch.Tensor  # [G, N]
    g_idx: torch.Tensor  # int32 [K]

    @classmethod
    def load(cls, name: str) -> Packed:
        with safe_open(str(FIXTURES / "packing" / f"{name}.safetensors"), framework="pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            format = parse(json.loads(file.metadata()["quantization_config"])).layer(NAME)
        tensors = {key.removeprefix("packed."): value for key, value in found.items() if key.startswith("packed.")}
        return cls(format, tensors, *(found[f"true.{part}"] for part in ("q", "z", "s", "g_idx")))


@pytest.mark.parametrize("name", LAYERS)
def test_a_packers_layer_is_read_bit_for_bit(name: str) -> None:
    packed = Packed.load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = packed.format.read(packed.tensors, *packed.q.shape)
    zeros = torch.full_like(packed.z, SYMMETRIC_ZERO) if weight.zeros is None else weight.zeros
    g = packed.g_idx.long()
    assert torch.equal(weight.values(), packed.q)
    assert torch.equal(zeros, packed.z)
    assert weight.scales.dtype == packed.s.dtype and torch.equal(weight.scales, packed.s)
    assert torch.equal(weight.row_groups(), g)
    exact = (packed.q.double() - packed.z.double()[g]) * packed.s.double()[g]
    assert torch.equal(weight.dequantize(torch.float64), exact)


@pytest.mark.parametrize("name", LAYERS)
def test_a_packers_layer_has_the_tensors_that_its_format_announces(name: str) -> None:
    packed = Packed.load(name)
    shapes = {part: tuple(tensor.shape) for part, tensor in packed.tensors.items()}
    announced = packed.format.shapes(*packed.q.shape)
    assert packed.format.mark in shapes and set(shapes) <= set(packed.format.tensor_names)
    for part, shape in shapes.items():
        assert shape in announced[part].allowed, part
    assert {part for part, entry in announced.items() if entry.required} <= set(shapes)
    assert packed.format.fit(shapes, *packed.q.shape) == (packed.format, None)


@pytest.mark.parametrize("name", LAYERS)
def test_a_packers_layer_is_written_as_the_packer_wrote_it(name: str) -> None:
    packed = Packed.load(name)
    written = packed.format.write(packed.format.read(packed.tensors, *packed.q.shape))
    for part in packed.tensors:
        assert torch.equal(written[part], packed.tensors[part]), part


def test_the_packed_layers_are_hard_to_read_by_luck() -> None:
    layers = [Packed.load(name) for name in LAYERS]
    asymmetric = [layer for layer in layers if not bool((layer.z == SYMMETRIC_ZERO).all())]
    assert len(asymmetric) >= 15
    for layer in asymmetric:
        assert int(layer.z.max()) == 15 and len(layer.z[0].unique()) >= 12  # zero points differ from column to column
    assert sum(bool((layer.z == 0).any()) for layer in asymmetric) >= 10
    assert sum(bool((layer.s < 0).any()) for layer in layers) >= 5
    assert sum(not torch.equal(layer.g_idx, layer.g_idx.sort().values) for layer in layers) >= 3
    for layer in layers:
        assert int(layer.q.min()) == 0 and int(layer.q.max()) == 15


@pytest.fixture
def reference_kernels() -> Iterator[None]:
    """Loading is tested here, not the kernels: the row in plain torch needs no compiler."""
    with config.override(kernel="torch"):
        forget()
        yield
    forget()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_logits_of_its_dequantized_weights(name: str, reference_kernels: Any) -> None:
    folder = FIXTURES / "models" / name
    recorded = safetensors_torch.load_file(FIXTURES / "logits" / f"{name}.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AwqJitWarning)
        model = awqjit.from_pretrained(folder, dtype=torch.float32, progress=False)
    said = [str(warning.message) for warning in caught if warning.category is AwqJitWarning]
    assert len(said) == len(WARNINGS.get(name, ())) and all(map(str.__contains__, said, WARNINGS.get(name, ())))
    assert sum(isinstance(module, Int4Linear) for module in model.modules()) >= 5
    with torch.no_grad():
        logits = model(recorded["input_ids"]).logits.double()
    # The weights are the same numbers exactly: only the order of float32 sums may differ from that of the float32 run
    # whose largest error against float64 was recorded. The largest error of another order scatters: 8 times is allowed.
    assert (logits - recorded["logits"]).abs().max() <= 8 * recorded["rounding"]
