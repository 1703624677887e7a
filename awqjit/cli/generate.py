# SPDX-License-Identifier: Apache-2.0
"""Greedy text generation that streams its text and takes its own time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from awqjit import jit
from awqjit.errors import ArgumentError
from awqjit.fusion import fuse
from awqjit.integrations.transformers import from_pretrained, local_folder, read_tokenizer, require_transformers


@dataclass(frozen=True)
class Run:
    """One answer.

    Attributes:
        text: the new text, without special tokens.
        prompt_tokens: tokens of the prompt, chat template included.
        new_tokens: tokens generated, an end token included.
        first_token_seconds: from the start to the first new token.
        rest_seconds: from the first new token to the last.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    rest_seconds: float

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Speed after the first token; None when there was only one."""
        return (self.new_tokens - 1) / self.rest_seconds if self.new_tokens > 1 else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"decode_tokens_per_second": self.decode_tokens_per_second}


def load(folder: str, dtype: str, compute: str, *, lm_head: str | None = None, fused: bool = False) -> tuple[Any, Any]:
    """A model with its kernels ready, and its tokenizer.

    Args:
        folder: or hub id.
        dtype: of activations.
        compute: mode of the int4 layers.
        lm_head: mode in which to round a float output layer to int4, or None.
        fused: run gate and up projections as one layer.
    """
    tokenizer = load_tokenizer(folder)
    model = from_pretrained(folder, dtype=dtype, compute=compute, lm_head=lm_head)
    if fused:
        fuse(model)
    jit.warm(model)
    return model, tokenizer


def load_tokenizer(folder_or_id: str) -> Any:
    """The tokenizer of a folder or hub model.

    Raises:
        FormatError: it has none that transformers can make.
    """
    require_transformers("generating text")
    return read_tokenizer(local_folder(folder_or_id))


def encode(tokenizer: Any, prompt: str, raw: bool = False) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [1, tokens] of a prompt, through the chat template if there is one.

    Raises:
        ArgumentError: the prompt has no tokens.
    """
    if tokenizer.chat_template and not raw:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ArgumentError("prompt", repr(prompt), "a text of at least one token")
    return {name: inputs[name].long() for name in ("input_ids", "attention_mask")}


def greedy(model: Any, max_new_tokens: int, **settings: Any) -> Any:
    """The model's generation config with sampling off and a bound on new tokens."""
    config = copy.deepcopy(model.generation_config)
    config.update(
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max_new_tokens,
        max_length=None,
        **settings,
    )
    return config


def stream(
    model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int, write: Callable[[str], None], raw: bool = False
) -> Run:
    """Answer a prompt greedily.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompt: the question.
        max_new_tokens: bound on the answer.
        write: called with each piece of text as soon as it is complete.
        raw: do not use the chat template.
    """
    transformers = require_transformers("generating text")
    ticks: list[float] = []
    pieces: list[str] = []

    class Streamer(transformers.TextStreamer):  # type: ignore[name-defined]
        def put(self, value: torch.Tensor) -> None:
            ticks.append(time.perf_counter())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)
            write(text)

    inputs = encode(tokenizer, prompt, raw)
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.inference_mode():
        model.generate(**inputs, generation_config=greedy(model, max_new_tokens), streamer=streamer)
    # The first tick is the prompt's.
    return Run(
        text="".join(pieces),
        prompt_tokens=inputs["input_ids"].shape[1],
        new_tokens=len(ticks) - 1,
        first_token_seconds=ticks[1] - ticks[0],
        rest_seconds=ticks[-1] - ticks[1],
    )
