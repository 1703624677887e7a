# SPDX-License-Identifier: Apache-2.0
"""The float models that `awqjit quantize` starts from: a transformers folder, or a GGUF file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from awqjit.checkpoint import Checkpoint
from awqjit.errors import CheckpointMismatchError, FormatError
from awqjit.integrations import gguf_file
from awqjit.integrations.transformers import read_config, read_tokenizer, require_transformers, skeleton

# Everything that belongs to the model and does not depend on its weights' form.
_SIDE_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    "generation_config.json", "*.model", "LICENSE*", "NOTICE*",
)  # fmt: skip

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class FloatSource:
    """A float model.

    Attributes:
        path: the folder or file.
        shapes: transformers name -> shape of each tensor.
        read: gives a tensor.
        store: rounds a tensor that stays float, in the dtype it was read in, to the one it is stored in.
        config: for config.json.
        model: the model, every tensor on the meta device.
        write_side_files: writes tokenizer and other files into a folder.
        load_tokenizer: makes the tokenizer.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    store: Callable[[Tensor], Tensor]
    config: dict[str, Any]
    model: Any
    write_side_files: Callable[[Path], None]
    load_tokenizer: Callable[[], Any]

    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            FormatError: there is none that transformers can make.
        """
        return self.load_tokenizer()


def open_source(path: Path) -> FloatSource:
    """Read the headers of a float model.

    Args:
        path: a transformers folder with safetensors, a GGUF file, or a folder with one GGUF file (llama or qwen2).

    Raises:
        FormatError: the source is not a complete float model in a form that is read.
        CheckpointMismatchError: its tensors do not fit its config.
    """
    gguf = gguf_file.find(path)
    source = _open_folder(path) if gguf is None else _open_gguf(gguf)
    _check_names(source)
    return source


def _open_folder(folder: Path) -> FloatSource:
    checkpoint = Checkpoint.open(folder)
    if checkpoint.config.get("quantization_config"):
        raise FormatError(f"{folder} is quantized already", "Give the folder of the float model.")

    def write_side_files(target: Path) -> None:
        for pattern in _SIDE_FILES:
            for file in sorted(folder.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, target / file.name)

    computed = "rotary_emb.inv_freq"  # old folders store what is computed from the config
    return FloatSource(
        path=folder,
        shapes={name: shape for name, shape in checkpoint.shapes.items() if not name.endswith(computed)},
        read=lambda name: _checked(name, checkpoint.read(name)[name]),
        store=lambda tensor: tensor,
        config=checkpoint.config,
        model=skeleton(read_config(folder), torch.float32),
        write_side_files=write_side_files,
        load_tokenizer=lambda: read_tokenizer(folder),
    )


def _checked(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, once it is found to hold finite floats.

    Raises:
        FormatError: integers or fp8 (a quantized form whose scales are elsewhere), NaN or infinity.
    """
    if tensor.dtype not in _FLOATS:
        raise FormatError(f"the tensor {name} is stored as {tensor.dtype}", "Give the folder of the float model.")
    if tensor.numel() and not all(bool(torch.isfinite(bound)) for bound in tensor.aminmax()):
        what = f"{name.removesuffix('.weight')} cannot be quantized: {name} holds NaN or infinity"
        raise FormatError(what, "The model is damaged: fetch it again.")
    return tensor


def _open_gguf(path: Path) -> FloatSource:
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

    def load_tokenizer() -> Any:
        return read_tokenizer(path.parent, gguf_file=path.name)

    def write_side_files(target: Path) -> None:
        load_tokenizer().save_pretrained(target)
        transformers.GenerationConfig.from_model_config(config).save_pretrained(target)

    return FloatSource(path, source.shapes, source.read, store, described, model, write_side_files, load_tokenizer)


def _check_names(source: FloatSource) -> None:
    """Names and shapes must be those of the model; a tied tensor may be there or not."""
    wanted = {name: tuple(tensor.shape) for name, tensor in source.model.state_dict().items()}
    tied: dict[str, str] = dict(source.model.all_tied_weights_keys)
    missing = sorted(name for name in wanted.keys() - source.shapes.keys() if tied.get(name, name) not in source.shapes)
    unexpected = sorted(source.shapes.keys() - wanted.keys())
    other = [
        f"{name} {list(shape)}, wanted {list(wanted[name])}"
        for name, shape in source.shapes.items()
        if name in wanted and shape != wanted[name]
    ]
    if missing or unexpected or other:
        raise CheckpointMismatchError(tuple(missing), tuple(unexpected), tuple(other))
