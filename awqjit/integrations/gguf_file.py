# SPDX-License-Identifier: Apache-2.0
"""Float tensors of a GGUF file under their transformers names, one at a time (Llama and Qwen2 architectures)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from awqjit.errors import FormatError, MissingDependencyError

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Rows of q and k in GGUF files: llama pairs neighbouring rows for its rotary embedding, transformers the two halves.
_INTERLEAVED = {"llama": True, "qwen2": False}


def find(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a folder without safetensors; else None.

    Raises:
        FormatError: the folder has several, or the file is one part of a split model.
    """
    path = Path(path)
    found = [path] if path.suffix == ".gguf" else []
    if path.is_dir() and not any(path.glob("*.safetensors")):
        found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise FormatError(f"{path} holds several GGUF files: {', '.join(p.name for p in found)}", "Name one of them.")
    if found and re.search(r"-\d{5}-of-\d{5}$", found[0].stem):
        raise FormatError(f"{found[0]} is one part of a split model", "Merge the parts first.")
    return found[0] if found else None


def transformers_name(name: str) -> str | None:
    """The transformers name of a GGUF tensor, or None for one that is not part of these architectures."""
    if name in _TOP:
        return _TOP[name]
    matched = _BLOCK_NAME.fullmatch(name)
    if matched is None or matched[2] not in _BLOCK:
        return None
    return f"model.layers.{matched[1]}.{_BLOCK[matched[2]]}.{matched[3]}"


def pair_halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection [heads * d, ...] from neighbouring pairs to paired halves of each head."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


@dataclass(frozen=True)
class GgufSource:
    """The tensors of a GGUF file.

    Attributes:
        path: the file.
        architecture: "llama" or "qwen2".
        heads: rows per projection are split into this many heads: {"q_proj": ..., "k_proj": ...}.
        tensors: transformers name -> the gguf package's view of the tensor, in the file's order.
    """

    path: Path
    architecture: str
    heads: dict[str, int]
    tensors: dict[str, Any]

    @classmethod
    def open(cls, path: Path, *, heads: dict[str, int]) -> GgufSource:
        """Read the file's header.

        Args:
            path: the file.
            heads: number of heads of "q_proj" and "k_proj".

        Raises:
            MissingDependencyError: the gguf package is not installed.
            FormatError: not a GGUF file, another architecture, or a tensor that has no place in it.
        """
        try:
            import gguf
        except ImportError:
            raise MissingDependencyError("gguf", "reading GGUF files", "pip install gguf") from None
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise FormatError(f"{path} is not a complete GGUF file: {error}", "Fetch it again.") from error
        field = reader.get_field("general.architecture")
        architecture = "unnamed" if field is None else str(field.contents())
        if architecture not in _INTERLEAVED:
            raise FormatError(
                f"GGUF files of architecture {architecture!r} are not read, only {', '.join(_INTERLEAVED)}",
                "Quantize the model's safetensors folder instead.",
            )
        tensors, unknown = {}, []
        for tensor in reader.tensors:
            name = transformers_name(tensor.name)
            if name is None:
                unknown.append(tensor.name)
            else:
                tensors[name] = tensor
        if unknown:
            raise FormatError(
                f"{path} holds tensors without a place in the model: {', '.join(unknown[:10])}",
                "Quantize the model's safetensors folder instead.",
            )
        return cls(path, architecture, heads, tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Transformers name -> shape."""
        return {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, dequantized to fp32."""
        import gguf

        view = self.tensors[name]
        # A copy, for the file is mapped read-only.
        values = torch.from_numpy(gguf.quants.dequantize(view.data, view.tensor_type).copy()).to(torch.float32)
        values = values.reshape(self.shapes[name])
        layer = name.split(".")[-2]
        if layer in self.heads and _INTERLEAVED[self.architecture]:
            return pair_halves(values, self.heads[layer])
        return values
