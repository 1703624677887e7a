# SPDX-License-Identifier: Apache-2.0
"""``awqjit quantize``: a float transformers folder, or a GGUF file, to an AWQ folder (version gemm)."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from awqjit import progress
from awqjit.checkpoint import Checkpoint, FolderWriter, new_folder
from awqjit.errors import ArgumentError, CheckpointMismatchError, FormatError
from awqjit.formats.awq import standard_to_awq
from awqjit.integrations import gguf_file
from awqjit.integrations.transformers import read_config, require_transformers, skeleton
from awqjit.quantize import quantize_weight

GROUP_SIZES = (32, 64, 128, -1)
"""Group sizes that readers of AWQ folders agree on."""

# Everything that belongs to the model and does not depend on its weights' form.
_SIDE_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    "generation_config.json", "*.model", "LICENSE*", "NOTICE*",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What quantizing a folder did.

    Attributes:
        destination: the new folder.
        quantized: layers that are int4 now.
        kept: layer -> why it stayed float.
        bytes_written: size of the new safetensors.
        seconds: wall time.
    """

    destination: Path
    quantized: tuple[str, ...]
    kept: dict[str, str]
    bytes_written: int
    seconds: float


@dataclass(frozen=True)
class _Source:
    """A float model: names and shapes of its tensors, how one is read and, if it stays float, in what dtype it is
    stored, its config, and how its other files are written."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    store: Callable[[Tensor], Tensor]
    config: dict[str, Any]
    model: nn.Module
    write_side_files: Callable[[Path], None]


def quantize_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    group_size: int = 128,
    symmetric: bool = False,
    clip_search: bool = True,
    shard_bytes: int = 1 << 30,
    force: bool = False,
    show_progress: bool = True,
) -> Report:
    """Round every linear layer but the head to int4 and write the model as an AWQ folder.

    Layers whose in_features is not a multiple of the group size, or whose out_features is not a multiple of 8, stay
    float, as do embeddings, head and norms. The folder appears under its name only when it is complete.

    Args:
        source: a transformers folder with safetensors, a GGUF file, or a folder with one GGUF file (llama or qwen2).
        destination: a folder that does not exist or is empty.
        group_size: 32, 64, 128 or -1 (one group per column).
        symmetric: every zero point is 8.
        clip_search: see :func:`awqjit.quantize.quantize_weight`.
        shard_bytes: largest safetensors file in bytes.
        force: replace an existing destination.
        show_progress: a bar over the tensors on stderr.

    Raises:
        ArgumentError: the group size is another, the destination is in use, or no layer can be quantized.
        FormatError: the source is not a complete float model in a form that is read.
        CheckpointMismatchError: the source's tensors do not fit its config.
    """
    started = time.perf_counter()
    if group_size not in GROUP_SIZES:
        raise ArgumentError("group_size", group_size, f"one of {', '.join(map(str, GROUP_SIZES))}")
    replaced = Path(destination).resolve()
    if replaced == Path(source).resolve() or replaced in Path(source).resolve().parents:
        raise ArgumentError("destination", destination, f"a folder that the source {source} is not in")
    with new_folder(destination, shard_bytes=shard_bytes, force=force) as writer:
        model = _open(Path(source))
        _check_names(model)
        quantizable, kept = _sort_layers(model.model, group_size)
        if not quantizable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:5])
            raise ArgumentError("group_size", group_size, f"one that suits a layer at least ({reasons})")
        with progress.bar("quantizing", len(model.shapes), show_progress) as advance:
            for name in model.shapes:
                layer = name.removesuffix(".weight")
                if name.endswith(".weight") and layer in quantizable:
                    _quantize(writer, layer, model.read(name), group_size, symmetric, clip_search)
                else:
                    writer.add(name, model.store(model.read(name)))
                advance()
        writer.write_json(
            "config.json",
            model.config
            | {
                "quantization_config": {
                    "quant_method": "awq",
                    "bits": 4,
                    "group_size": group_size,
                    "zero_point": True,  # stored also when all are 8: not every reader can do without
                    "version": "gemm",
                    "modules_to_not_convert": sorted(kept),
                }
            },
        )
        model.write_side_files(writer.folder)
    written = sum(path.stat().st_size for path in Path(destination).glob("*.safetensors"))
    return Report(Path(destination), tuple(quantizable), kept, written, time.perf_counter() - started)


def _quantize(
    writer: FolderWriter, layer: str, weight: Tensor, group_size: int, symmetric: bool, clip_search: bool
) -> None:
    try:
        rounded = quantize_weight(weight, group_size=group_size, symmetric=symmetric, clip_search=clip_search)
    except ArgumentError as error:
        raise FormatError(f"the layer {layer} cannot be quantized: {error}", "") from error
    qweight, scales, qzeros = standard_to_awq(rounded)
    writer.add(f"{layer}.qweight", qweight)
    writer.add(f"{layer}.qzeros", qzeros)
    writer.add(f"{layer}.scales", scales)


def _sort_layers(model: Any, group_size: int) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Linear layers that become int4, and those that stay float with the reason."""
    quantizable: dict[str, nn.Linear] = {}
    kept: dict[str, str] = {}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module is head:
            kept[name] = "the head is never quantized"
        elif group_size != -1 and module.in_features % group_size:
            fits = ", ".join(str(size) for size in GROUP_SIZES if size > 0 and module.in_features % size == 0)
            hint = f"; --group-size {fits} would do" if fits else ""
            kept[name] = f"in_features {module.in_features} is not a multiple of group size {group_size}{hint}"
        elif module.out_features % 8:
            kept[name] = f"out_features {module.out_features} is not a multiple of 8"
        else:
            quantizable[name] = module
    return quantizable, kept


def _check_names(source: _Source) -> None:
    """Names and shapes must be those of the model; a tied tensor may be there or not."""
    wanted = {name: tuple(tensor.shape) for name, tensor in source.model.state_dict().items()}
    tied: dict[str, str] = dict(source.model.all_tied_weights_keys)  # type: ignore[arg-type]
    missing = sorted(name for name in wanted.keys() - source.shapes.keys() if tied.get(name, name) not in source.shapes)
    unexpected = sorted(source.shapes.keys() - wanted.keys())
    other = [
        f"{name} {list(shape)}, wanted {list(wanted[name])}"
        for name, shape in source.shapes.items()
        if name in wanted and shape != wanted[name]
    ]
    if missing or unexpected or other:
        raise CheckpointMismatchError(tuple(missing), tuple(unexpected), tuple(other))


def _open(path: Path) -> _Source:
    gguf = gguf_file.find(path)
    return _open_folder(path) if gguf is None else _open_gguf(gguf)


def _open_folder(folder: Path) -> _Source:
    checkpoint = Checkpoint.open(folder)
    if checkpoint.config.get("quantization_config"):
        raise FormatError(f"{folder} is quantized already", "Give the folder of the float model.")

    def write_side_files(target: Path) -> None:
        for pattern in _SIDE_FILES:
            for file in sorted(folder.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, target / file.name)

    computed = "rotary_emb.inv_freq"  # old folders store what is computed from the config
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if not name.endswith(computed)}
    model = skeleton(read_config(folder), torch.float32)
    return _Source(
        shapes,
        lambda name: checkpoint.read(name)[name],
        lambda tensor: tensor,
        checkpoint.config,
        model,
        write_side_files,
    )


def _open_gguf(path: Path) -> _Source:
    transformers = require_transformers("quantizing a GGUF file")
    if not path.is_file():
        raise FormatError(f"{path} does not exist", "Give a GGUF file.")
    config = read_config(path.parent, gguf_file=path.name)
    # `quantization_config` speaks of the GGUF file itself.
    config.__dict__.pop("quantization_config", None)
    model = skeleton(config, torch.float16)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    source = gguf_file.GgufSource.open(path, heads=heads)
    config.architectures = [type(model).__name__]
    described = {key: value for key, value in config.to_dict().items() if key not in ("_name_or_path",)}

    def store(tensor: Tensor) -> Tensor:
        # fp16 keeps more of a dequantized value than bf16, where it fits.
        return tensor if bool(tensor.abs().max() > torch.finfo(torch.float16).max) else tensor.to(torch.float16)

    def write_side_files(target: Path) -> None:
        transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)
        transformers.GenerationConfig.from_model_config(config).save_pretrained(target)

    return _Source(source.shapes, source.read, store, described, model, write_side_files)
