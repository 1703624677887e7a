# SPDX-License-Identifier: Apache-2.0
"""20,000 damaged configs and safetensors headers: each is read, or refused with an error that says what is wrong."""

from __future__ import annotations

import copy
import json
import random
import struct
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

from awqjit.checkpoint import INDEX, SINGLE, Checkpoint
from awqjit.errors import AwqJitError
from awqjit.formats import find_config, parse

CONFIGS = 14_000
HEADERS = 6_000
LAYER = "model.layers.0.mlp.down_proj"

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True,
       "modules_to_not_convert": ["lm_head", "model.layers.0."]}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True, "format": "gptq",
        "checkpoint_format": "gptq", "dynamic": {"-:.*head": {}, "+:.*down.*": {"bits": 8, "group_size": 32}},
        "pack_dtype": "int32"}  # fmt: skip
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "data_type": "int",
         "packing_format": "auto_round:auto_gptq", "act_bits": 16,
         "extra_config": {"lm_head": {"bits": 16}, ".*up.*": {"bits": 8, "group_size": 32, "sym": True}}}  # fmt: skip
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear", "re:.*down.*"], "input_activations": None, "format": "pack-quantized",
         "weights": WEIGHTS}  # fmt: skip
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*gate"],
              "quantization_status": "compressed", "kv_cache_scheme": None, "sparsity_config": {},
              "config_groups": {"group_0": GROUP}}  # fmt: skip
OLD = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "gemv"}
SEEDS: tuple[dict[str, Any], ...] = (AWQ, GPTQ, ROUND, COMPRESSED, OLD)

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 4, 8, 16, 128, 2**31, 2**70, -(2**63), 0.5, float("nan"), float("inf"), 1e400, "",
    "4", "gemm", "gptq_v2", "marlin", "int", "float", "re:(", "re:[a", "(?i)x(?i)", "*", "\x00", "\ud800", "x" * 300,
    [], [[]],
    [None], ["re:*"], ["Linear", 3], {}, {"bits": "8"}, {"": {}}, {"-:(": {}}, {"+:a": None}, {"weights": []},
    [[[[[[]]]]]], {"a": {"b": {"c": {}}}},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a config."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(config: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def damaged_config(rng: random.Random) -> dict[str, Any]:
    config = copy.deepcopy(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        spots = list(places(config))
        if not spots:
            break
        *parents, key = rng.choice(spots)
        holder = at(config, tuple(parents))
        kind = rng.random()
        if kind < 0.6:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind < 0.75:
            del holder[key]
        elif kind < 0.9:  # another config's part
            other = rng.choice(SEEDS)
            holder[key] = copy.deepcopy(at(other, rng.choice(list(places(other)))))
        elif isinstance(holder, dict):
            holder[rng.choice(("bits", "format", "sym", "dynamic", "ignore", "", "\x00", key * 2))] = holder.pop(key)
        else:
            holder.append(copy.deepcopy(rng.choice(VALUES)))
    return config


def check_message(error: AwqJitError, source: object) -> None:
    text = str(error)
    assert 20 <= len(text) < 2000, (source, text)
    assert "Traceback" not in text and "object at 0x" not in text, (source, text)


def test_damaged_configs_are_read_or_refused_with_a_reason(tmp_path: Path) -> None:
    rng, outcomes = random.Random(20), Counter()  # type: ignore[var-annotated]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Python's own, about odd regular expressions
        for number in range(CONFIGS):
            config = damaged_config(rng)
            nested: dict[str, Any] = {"quantization_config": config}
            if number % 3 == 0:
                nested = {"text_config": nested}
            try:
                format = parse(find_config(tmp_path, nested))
                for name in (LAYER, "lm_head", ""):
                    layer = format.layer(name)
                    format.skips(name)
                    assert layer.refused or layer.bits == 4
                    assert set(layer.shapes(64, 32)) == set(layer.tensor_names)
                    layer.fit({part: (64, 4) for part in layer.tensor_names}, 64, 32)
                assert parse(format.to_dict()).layer(LAYER).group_size == format.layer(LAYER).group_size
                outcomes["read"] += 1
            except AwqJitError as error:
                check_message(error, config)
                outcomes["refused"] += 1
    assert outcomes["read"] > CONFIGS // 20 and outcomes["refused"] > CONFIGS // 3, outcomes


HEADER = {
    "__metadata__": {"format": "pt"},
    f"{LAYER}.qweight": {"dtype": "I32", "shape": [8, 2], "data_offsets": [0, 64]},
    f"{LAYER}.scales": {"dtype": "F16", "shape": [2, 16], "data_offsets": [64, 128]},
    f"{LAYER}.qzeros": {"dtype": "I32", "shape": [2, 2], "data_offsets": [128, 144]},
}
DATA = bytes(range(144))
NUMBERS = (None, True, -1, 0, 1, 2, 63, 145, 2**31, 2**63, 2**64, -(2**63), 0.5, "8", [], {}, [2, 2], 1e400)
DTYPES = (None, "", "I32", "F16", "BF16", "F64", "I4", "F8_E4M3", "BOOL", "U64", "i32", 3, [], "X" * 50)


def damaged_file(rng: random.Random) -> bytes:
    header: Any = copy.deepcopy(HEADER)
    kind = rng.random()
    if kind < 0.55:
        for _ in range(rng.choice((1, 1, 2, 4))):
            name = rng.choice([name for name in header if name != "__metadata__"] or ["x"])
            entry = header.setdefault(name, {})
            key = rng.choice(("dtype", "shape", "data_offsets", "entry", "inside", "metadata", "drop"))
            if key == "dtype":
                entry["dtype"] = rng.choice(DTYPES)
            elif key == "inside":
                row = (
                    entry[rng.choice(("shape", "data_offsets"))] if isinstance(entry, dict) and len(entry) == 3 else []
                )
                if isinstance(row, list) and row:
                    row[rng.randrange(len(row))] = rng.choice(NUMBERS)
            elif key == "entry":
                header[name] = rng.choice((None, [], {}, 3, "x", {"dtype": "I32"}))
                break
            elif key == "metadata":
                header["__metadata__"] = rng.choice((None, [], 3, {"a": 1}, {"format": "np"}, {}))
            elif key == "drop":
                del header[name]
            else:
                entry[key] = rng.choice(
                    (None, [], [1], [2, 2], [0, 64], [64, 0], [0, 0, 0], 3, "x", [[1]], [2**40, 2**40])
                )
    elif kind < 0.6:
        header = rng.choice((None, [], [HEADER], 3, "x", True, {"": {}}, {"__metadata__": {}}))
    text = json.dumps(header).encode()
    if kind > 0.7:
        text = bytearray(text)
        for _ in range(rng.choice((1, 1, 2, 5, 20))):
            text[rng.randrange(len(text))] = rng.choice((rng.randrange(256), *b'{}[]",:0-'))
        text = bytes(text)
    elif kind > 0.65:
        text = rng.choice(
            (b"", b"{", text[: rng.randrange(len(text))], b"[" * 100_000, text * 2, b" " * 50, b"9" * 5000)
        )
    size = len(text)
    if rng.random() < 0.15:
        size = rng.choice((0, 1, size - 1, size + 1, size + len(DATA), size + len(DATA) + 1, 2**31, 2**63, 2**64 - 1))
    file = struct.pack("<Q", max(size, 0)) + text + DATA
    return file[: rng.randrange(len(file) + 1)] if rng.random() < 0.1 else file


def test_damaged_safetensors_files_are_read_or_refused_with_a_reason(tmp_path: Path) -> None:
    rng, outcomes = random.Random(30), Counter()  # type: ignore[var-annotated]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AWQ}))
    index = {"weight_map": {f"{LAYER}.qweight": SINGLE}}
    for number in range(HEADERS):
        file = damaged_file(rng)
        (tmp_path / SINGLE).write_bytes(file)
        if number % 500 == 0:
            (tmp_path / INDEX).write_text(json.dumps(index))
        elif number % 500 == 250:
            (tmp_path / INDEX).unlink()
        try:
            checkpoint = Checkpoint.open(tmp_path)
            assert all(size >= 0 for shape in checkpoint.shapes.values() for size in shape)
            tensors = checkpoint.read(*checkpoint.files)
            assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == checkpoint.shapes
            outcomes["read"] += 1
        except AwqJitError as error:
            check_message(error, file)
            outcomes["refused"] += 1
    assert outcomes["read"] > HEADERS // 50 and outcomes["refused"] > HEADERS // 3, outcomes


@pytest.mark.parametrize(
    "name, content",
    [
        ("config.json", b"[" * 100_000),
        ("config.json", b"9" * 5000),
        ("config.json", b"\xff\xfe"),
        ("config.json", b""),
        ("config.json", None),
        (INDEX, b"[]"),
        (INDEX, b"{}"),
        (INDEX, b'{"weight_map": []}'),
        (INDEX, b'{"weight_map": {"a": 3}}'),
        (INDEX, b'{"weight_map": {"a": ""}}'),
        (INDEX, b'{"weight_map": {"a": ".."}}'),
        (INDEX, b'{"weight_map": {"a": "../model.safetensors"}}'),
        (INDEX, b'{"weight_map": {"a": "b\\u0000"}}'),
        (INDEX, b'{"weight_map": {"a": "\\ud800"}}'),
        (INDEX, b'{"weight_map": {"a": "' + b"x" * 500 + b'"}}'),
        (INDEX, b'{"weight_map": {"a": "model.safetensors"}}'),
        (SINGLE, None),
        (SINGLE, b""),
    ],
)  # fmt: skip
def test_damaged_files_of_a_folder_are_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    text = json.dumps(HEADER).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + DATA)
    (tmp_path / "config.json").write_text("{}")
    assert len(Checkpoint.open(tmp_path).shapes) == 3
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AwqJitError) as caught:
        Checkpoint.open(tmp_path)
    check_message(caught.value, content)
