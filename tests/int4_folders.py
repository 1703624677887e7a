# SPDX-License-Identifier: Apache-2.0
"""Float folders rounded to int4 and written in every form that producers use, without a line of the library's code.

Beside each int4 folder stands a float one that holds what the int4 one means: q, z and s multiplied out here. What
transformers' own loader makes of that is what the int4 folder has to give.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import packers
import torch
import transformers
from models import tensors
from numpy.typing import NDArray
from safetensors.torch import save_file

IDS = torch.tensor([[1, 17, 99, 4, 56, 23, 120, 64]])
GROUP = 32


@dataclass(frozen=True)
class Rounded:
    """W[k, n] = (q[k, n] - z[g(k), n]) * s[g(k), n]: q [K, N], z and s (fp16) [G, N], g(k) = g_idx[k]."""

    q: NDArray[np.int32]
    z: NDArray[np.int32]
    s: NDArray[np.float16]
    g_idx: NDArray[np.int32]
    group: int

    def weight(self) -> torch.Tensor:
        """float32 [N, K]: exact, for q - z has 5 bits and s has 11."""
        wide = (self.q - self.z[self.g_idx]).astype(np.float32) * self.s.astype(np.float32)[self.g_idx]
        return torch.from_numpy(np.ascontiguousarray(wide.T))


def round_off(weight: torch.Tensor, group: int, levels: int, symmetric: bool, order: NDArray[np.int64]) -> Rounded:
    """A float weight [N, K] to ``levels`` levels; ``order`` lists the rows, the first ``group`` of them group 0."""
    w = weight.float().numpy().T.astype(np.float64)
    k = w.shape[0]
    group = k if group == -1 else group
    g_idx = np.empty(k, dtype=np.int32)
    g_idx[order] = np.arange(k) // group
    groups = -(-k // group)
    low = np.stack([w[g_idx == g].min(axis=0) for g in range(groups)])
    high = np.stack([w[g_idx == g].max(axis=0) for g in range(groups)])
    if symmetric:
        s = (np.maximum(-low, high) / (levels / 2 - 1)).astype(np.float16)
        z = np.full(s.shape, levels // 2)
    else:
        s = ((high - low) / (levels - 1)).astype(np.float16)
        z = np.clip(np.round(-low / s), 0, levels - 1).astype(np.int32)
    q = np.clip(np.round(w / s[g_idx]) + z[g_idx], 0, levels - 1)
    return Rounded(q.astype(np.int32), z.astype(np.int32), s, g_idx, group)


def _words(values: NDArray[np.integer], bits: int = 4) -> torch.Tensor:
    """[..., C] to int32 words of neighbours along the last axis, the first one in the lowest bits; padded with 0."""
    per_word = 32 // bits
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per_word)])
    lanes = padded.reshape(*values.shape[:-1], -1, per_word).astype(np.uint64)
    words = sum(lanes[..., i] * 2 ** (bits * i) for i in range(per_word))
    return torch.from_numpy(np.ascontiguousarray(np.asarray(words).astype(np.uint32).view(np.int32)))


def _of(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _awq_gemm(r: Rounded) -> dict[str, torch.Tensor]:
    qweight, qzeros = packers.pack_awq(r.q, r.z)
    return {"qweight": _of(qweight), "qzeros": _of(qzeros), "scales": _of(r.s)}


def _awq_gemv(r: Rounded) -> dict[str, torch.Tensor]:
    """AutoAWQ's WQLinear_GEMV: rows are columns of W; groups are padded so that the zeros fill whole words."""
    multiple = {32: 4, 64: 2}.get(r.group, 1) * 8
    pad = ((0, 0), (0, -r.z.shape[0] % multiple))
    return {"qweight": _words(r.q.T), "qzeros": _words(np.pad(r.z.T, pad)), "scales": _of(np.pad(r.s.T, pad))}


def _gptq(v2: bool) -> Callable[[Rounded], dict[str, torch.Tensor]]:
    def pack(r: Rounded) -> dict[str, torch.Tensor]:
        qweight, qzeros = packers.pack_gptq(r.q, r.z, v2=v2)
        return {"qweight": _of(qweight), "qzeros": _of(qzeros), "scales": _of(r.s), "g_idx": _of(r.g_idx)}

    return pack


def _gptq_8bit(r: Rounded) -> dict[str, torch.Tensor]:
    stored = (r.z - 1) & 255
    return {
        "qweight": _words(r.q.T, 8).T.contiguous(), "qzeros": _words(stored, 8), "scales": _of(r.s),
        "g_idx": _of(r.g_idx),
    }  # fmt: skip


def _compressed(symmetric: bool) -> Callable[[Rounded], dict[str, torch.Tensor]]:
    def pack(r: Rounded) -> dict[str, torch.Tensor]:
        """compressed-tensors' pack-quantized: weights along K, zero points along N."""
        found = {
            "weight_packed": _words(r.q.T),
            "weight_scale": _of(r.s.T),
            "weight_shape": torch.tensor([r.q.shape[1], r.q.shape[0]]),
        }
        if not symmetric:
            found["weight_zero_point"] = _words(r.z).T.contiguous()
        return found

    return pack


def _awq_config(version: str) -> Callable[[int, bool], dict[str, Any]]:
    return lambda group, symmetric: {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version,
    }  # fmt: skip


def _gptq_config(version: str, act_order: bool = False) -> Callable[[int, bool], dict[str, Any]]:
    return lambda group, symmetric: {
        "quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": act_order,
        "checkpoint_format": version,
    }  # fmt: skip


def _compressed_config(group: int, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None, "observer": "minmax",
        "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip


def _auto_round_config(packing: str) -> Callable[[int, bool], dict[str, Any]]:
    return lambda group, symmetric: {
        "quant_method": "auto-round", "bits": 4, "group_size": group, "sym": symmetric, "data_type": "int",
        "packing_format": packing,
    }  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How one producer writes: ``config(group, symmetric)`` and ``pack(rounded)``."""

    config: Callable[[int, bool], dict[str, Any]]
    pack: Callable[[Rounded], dict[str, torch.Tensor]]
    symmetric: bool = False
    act_order: bool = False
    group: int = GROUP


FORMS: dict[str, Form] = {
    "awq-gemm": Form(_awq_config("gemm"), _awq_gemm),
    "awq-gemm-channel": Form(_awq_config("gemm"), _awq_gemm, group=-1),
    "awq-gemv": Form(_awq_config("gemv"), _awq_gemv),
    "gptq-v1": Form(_gptq_config("gptq"), _gptq(False)),
    "gptq-v1-sym": Form(_gptq_config("gptq"), _gptq(False), symmetric=True),
    "gptq-v1-act-order": Form(_gptq_config("gptq", True), _gptq(False), act_order=True),
    "gptq-v2": Form(_gptq_config("gptq_v2"), _gptq(True)),
    "gptq-v2-act-order": Form(_gptq_config("gptq_v2", True), _gptq(True), act_order=True),
    "compressed-sym": Form(_compressed_config, _compressed(True), symmetric=True),
    "compressed-asym": Form(_compressed_config, _compressed(False)),
    "compressed-channel": Form(_compressed_config, _compressed(True), symmetric=True, group=-1),
    "auto-round-gptq": Form(_auto_round_config("auto_round:auto_gptq"), _gptq(False)),
    "auto-round-awq": Form(_auto_round_config("auto_round:auto_awq"), _awq_gemm),
}


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a decoder's float folder is the weight of a linear layer other than the head."""
    others = ("embed", "lm_head", "wte", "wpe", "norm", ".gate.")
    return name.endswith(".weight") and tensor.dim() == 2 and not any(part in name for part in others)


def write_int4(
    source: Path,
    destination: Path,
    form: str = "awq-gemm",
    *,
    quantizes: Callable[[str, torch.Tensor], bool] = is_linear,
    overrides: Mapping[str, tuple[int, int]] | None = None,
    settings: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write the int4 folder of a float one, and ``<destination>-float`` with the same weights multiplied out.

    Args:
        source: the float folder.
        destination: the int4 folder.
        form: a key of :data:`FORMS`.
        quantizes: which tensors become int4, by name and float tensor.
        overrides: part of a layer's name -> its bits (4 or 8) and group size.
        settings: more keys of the quantization config.
        shards: files, with an index if there are several.
    """
    row = FORMS[form]
    stored: dict[str, torch.Tensor] = {}
    multiplied: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(sorted(tensors(source).items())):
        if not quantizes(name, tensor):
            stored[name] = multiplied[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        special = [value for part, value in (overrides or {}).items() if part in name]
        bits, group = special[0] if special else (4, row.group)
        k = tensor.shape[1]
        order = np.random.default_rng(seed).permutation(k) if row.act_order else np.arange(k)
        rounded = round_off(tensor, group, 2**bits, row.symmetric, order)
        pack = row.pack if bits == 4 else _gptq_8bit
        stored |= {f"{layer}.{last}": part for last, part in pack(rounded).items()}
        multiplied[name] = rounded.weight()
    for folder, found in ((destination, stored), (Path(f"{destination}-float"), multiplied)):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_shards(folder, found, shards)
    config = json.loads((destination / "config.json").read_text())
    config["quantization_config"] = row.config(row.group, row.symmetric) | dict(settings or {})
    (destination / "config.json").write_text(json.dumps(config))
    return destination


def save_shards(folder: Path, found: dict[str, torch.Tensor], shards: int) -> None:
    """Write tensors as one file, or as several and an index; a layer's tensors end up in different files."""
    if shards == 1:
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: found[name] for name in sorted(found)[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def logits_of(model: Any) -> torch.Tensor:
    """float64 [1, 8, vocabulary]."""
    with torch.no_grad():
        return model(IDS).logits.double()


def float_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """What transformers' own loader makes of the float folder beside an int4 one, computing in ``dtype``."""
    return logits_of(transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-float", dtype=dtype).eval())


def assert_logits(found: torch.Tensor, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """As near to the logits computed in float64 as the float model is when it computes in ``dtype``, times 8.

    Both round the same quantities to ``dtype``, but not the same sums in the same order (the float model rounds its
    weights too): the errors are two draws from one distribution, whose largest value over 1,000 logits varies far less.
    """
    exact = float_logits(folder, torch.float64)
    noise = (float_logits(folder, dtype) - exact).abs().max()
    assert exact.std() > 0.05, "these logits would hide an error"
    assert noise < 0.1 * exact.std()
    error = (found - exact).abs().max()
    assert error <= 8 * noise, f"error {error:.2e}, arithmetic in {dtype} explains {noise:.2e}"
