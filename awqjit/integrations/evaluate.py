# SPDX-License-Identifier: Apache-2.0
"""``awqjit eval``: what the two compute modes cost in accuracy, against the same int4 weights dequantized to fp32."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from awqjit import progress
from awqjit.errors import ArgumentError
from awqjit.integrations.calibration import check_tokens, encode, first_tokens
from awqjit.integrations.transformers import from_pretrained, local_folder, read_tokenizer
from awqjit.modules import Int4Linear
from awqjit.spec import act_bits_of

REFERENCE = "dequantized"
MODES = ("w4a16", "w4a8")


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text.

    Attributes:
        mode: "dequantized" (the int4 weights as fp32, run by torch), "w4a16" or "w4a8".
        nll: mean negative log-likelihood of a token, in nats.
        agreement: share of the tokens for which the likeliest one is that of the dequantized model.
    """

    mode: str
    nll: float
    agreement: float

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite where that is beyond a float."""
        try:
            return math.exp(self.nll)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Evaluation:
    """The scores of one folder.

    Attributes:
        folder: the folder or hub id.
        tokens: tokens that were predicted.
        context: the most tokens that one was predicted from.
        dtype: of the activations of the compute modes.
        scores: "dequantized" first, then the modes.
    """

    folder: str
    tokens: int
    context: int
    dtype: str
    scores: tuple[Score, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the attributes, with ``perplexity`` and ``nll_difference`` (to the first score) in each score.

        What is NaN or infinite, which JSON cannot say, is None.
        """
        reference = self.scores[0].nll
        extra = [{"perplexity": score.perplexity, "nll_difference": score.nll - reference} for score in self.scores]
        scores = [asdict(score) | more for score, more in zip(self.scores, extra, strict=True)]
        return asdict(self) | {"scores": [{key: _finite(value) for key, value in one.items()} for one in scores]}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class DequantizedLinear(nn.Module):
    """A layer with the weight of an int4 one, dequantized at each call: only one such weight is in memory at a time."""

    def __init__(self, layer: Int4Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to y [..., N], both fp32."""
        bias: Any = self.layer.bias
        weight = self.layer.quantized().dequantize(x.dtype).T
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def dequantize_layers(model: nn.Module) -> None:
    """Replace every :class:`Int4Linear` of a model by a :class:`DequantizedLinear`, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Int4Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, DequantizedLinear(module))


def evaluate(
    folder: str | os.PathLike[str],
    text: str,
    *,
    tokens: int = 2048,
    context: int = 512,
    dtype: torch.dtype | str = torch.bfloat16,
    show_progress: bool = True,
) -> Evaluation:
    """Predict a text with both compute modes and with the dequantized weights.

    The text is read in windows of ``context`` tokens, each on its own; the first token of a window is not predicted,
    unless the tokenizer begins every text with a special one.

    Args:
        folder: a folder or hub id that :func:`awqjit.from_pretrained` loads.
        text: the text.
        tokens: how many of its tokens to use at most.
        context: tokens of a window, at least 2; at most what the model can take.
        dtype: of activations in the compute modes; the dequantized model runs in fp32.
        show_progress: bars on stderr.

    Raises:
        ArgumentError: ``tokens`` or ``context`` is below 2, or the text has fewer than 2 tokens.
        FormatError: the folder is in a form that is not read, or has no tokenizer or another model's.
    """
    for name, value in (("tokens", tokens), ("context", context)):
        if value < 2:
            raise ArgumentError(name, value, "at least 2")
    tokenizer = _tokenizer(folder)
    ids = encode(tokenizer, text)[:tokens]
    if len(ids) < 2:
        raise ArgumentError("text", f"{len(ids)} tokens", "a text of at least 2 tokens")

    def load(dtype: torch.dtype | str, show: bool) -> Any:
        # From one line, so that Python shows a warning about the folder once.
        return from_pretrained(folder, dtype=dtype, progress=show)

    model = load(torch.float32, show_progress)
    check_tokens(ids, model.get_input_embeddings())
    dequantize_layers(model)
    context = min(context, int(getattr(model.config, "max_position_embeddings", None) or context))
    windows = _windows(ids, first_tokens(tokenizer), context)
    with progress.bar("evaluating", len(windows) * (1 + len(MODES)), show_progress) as advance:
        reference, likeliest = _predict(model, windows, advance)
        scores = [Score(REFERENCE, reference, 1.0)]
        del model
        model = load(dtype, False)
        for mode in MODES:
            for module in model.modules():
                if isinstance(module, Int4Linear):
                    module.act_bits = act_bits_of(mode)  # one packed weight serves both
            nll, found = _predict(model, windows, advance)
            scores.append(Score(mode, nll, float((found == likeliest).double().mean())))
    count = len(likeliest)
    return Evaluation(os.fspath(folder), count, context, str(model.dtype).removeprefix("torch."), tuple(scores))


def _tokenizer(folder: str | os.PathLike[str]) -> Any:
    return read_tokenizer(local_folder(folder))


def _windows(ids: Tensor, first: Tensor, context: int) -> list[Tensor]:
    """int64 [1, tokens] each; the last may be short, and one without anything to predict is left out."""
    size = context - len(first)
    if size < 1:
        raise ArgumentError("context", context, f"more than the {len(first)} tokens that begin every text")
    return [torch.cat((first, part))[None] for part in ids.split(size) if len(first) + len(part) > 1]


@torch.inference_mode()
def _predict(model: Any, windows: list[Tensor], advance: Callable[[], None]) -> tuple[float, Tensor]:
    """Mean negative log-likelihood, and the likeliest token at each place, int64 [tokens]."""

    def results() -> Iterator[tuple[Tensor, Tensor]]:
        for window in windows:
            logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
            yield F.cross_entropy(logits, window[0, 1:], reduction="none").double(), logits.argmax(-1)
            advance()

    losses, likeliest = zip(*results(), strict=True)
    return float(torch.cat(losses).mean()), torch.cat(likeliest)
