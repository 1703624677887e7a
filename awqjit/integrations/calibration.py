# SPDX-License-Identifier: Apache-2.0
"""Running a model's blocks one after the other on a calibration text, with one block's weights in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from awqjit.errors import ArgumentError, FormatError
from awqjit.integrations.awq_search import Inputs
from awqjit.integrations.conversions import compute_buffers

_LARGEST_CHANGE = 1e-3  # of a block's own contribution, in fp32


def builtin_text(name: str) -> str:
    """A text that comes with the package: "calibration" or "evaluation"."""
    return files("awqjit.data").joinpath(f"{name}.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Calibration:
    """The text that shows which input channels matter, and how much of it is used.

    Attributes:
        text: the text; the longer, the more of ``sequences`` and ``length`` it fills.
        sequences: pieces of it, spread evenly.
        length: tokens of a piece; at most what the model can take.
        sample: tokens, of all pieces together, for whose inputs the searches compare outputs.

    Raises:
        ArgumentError: a number is below 1.
    """

    text: str
    sequences: int = 8
    length: int = 512
    sample: int = 1024

    def __post_init__(self) -> None:
        for name in ("sequences", "length", "sample"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "at least 1")

    def tokens(self, tokenizer: Any, config: Any) -> Tensor:
        """Token ids, int64 [sequences, length]; fewer and shorter if the text is short.

        Raises:
            ArgumentError: the text has fewer than 8 tokens.
        """
        ids, first = encode(tokenizer, self.text), first_tokens(tokenizer)
        longest = int(getattr(config, "max_position_embeddings", None) or self.length)
        length = min(self.length, len(ids), longest) - len(first)
        if len(ids) < 8 or length < 1:
            raise ArgumentError("text", f"{len(ids)} tokens", "a text of at least 8 tokens")
        starts = torch.linspace(0, len(ids) - length, min(self.sequences, len(ids) // length), dtype=torch.float64)
        return torch.stack([torch.cat((first, ids[start : start + length])) for start in starts.long().tolist()])


def encode(tokenizer: Any, text: str) -> Tensor:
    """A text's token ids, int64 [tokens], without special tokens."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def check_tokens(ids: Tensor, embeddings: Any) -> None:
    """Whether a model has embeddings for token ids.

    Raises:
        FormatError: it has not; the tokenizer is not the model's.
    """
    rows = len(embeddings.weight)
    if int(ids.max()) >= rows:
        raise FormatError(
            f"the tokenizer gives the token {int(ids.max())}, and the model knows {rows}",
            "Use the tokenizer that belongs to the model.",
        )


def first_tokens(tokenizer: Any) -> Tensor:
    """The special token that begins every text, as many models need it: int64 [1], or [0] if there is none."""
    ids = tokenizer("", verbose=False)["input_ids"][:1]
    has = bool(ids) and ids[0] == tokenizer.bos_token_id
    return torch.tensor(ids if has else [], dtype=torch.int64)


class _Stop(Exception):
    """Ends a model's forward once every block has been reached."""


class BlockRunner:
    """The blocks of a causal language model on the meta device, filled and run one at a time.

    Args:
        model: from :func:`awqjit.integrations.transformers.skeleton`.
        read: gives one of its tensors.

    Raises:
        FormatError: it has no list of blocks.
    """

    def __init__(self, model: Any, read: Callable[[str], Tensor]) -> None:
        self.model = model.eval()
        self._read = read
        self.prefix, self.blocks = _find_blocks(model)
        self.dtypes: dict[str, torch.dtype] = {}
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @torch.no_grad()
    def start(self, ids: Tensor) -> Tensor:
        """fp32 [sequences, length, hidden]: what the first block is given for token ids [sequences, length].

        Raises:
            FormatError: the model does not know a token.
        """
        compute_buffers(self.model)  # first: it may initialize the weights of the modules it fills
        embeddings = self.model.get_input_embeddings()
        check_tokens(ids, embeddings)
        used, ids = ids.unique(return_inverse=True)  # only the rows that occur are kept
        (name,) = (name for name, module in self.model.named_modules() if module is embeddings)
        embeddings.padding_idx = None  # it speaks of the row's old place, and matters to gradients alone
        embeddings.weight = nn.Parameter(self._read(f"{name}.weight")[used].float(), requires_grad=False)
        first: list[Tensor] = []

        def recorder(index: int) -> Callable[..., Tensor]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if index == 0:
                    first.append(hidden)
                if len(first) == 1:
                    self._arguments.append((args, kwargs))
                elif index == 0:
                    raise _Stop
                if index == len(self.blocks) - 1:
                    raise _Stop
                return hidden

            return forward

        for index, block in enumerate(self.blocks):
            block.forward = recorder(index)
        try:
            for sequence in ids:
                with suppress(_Stop):
                    self.model(input_ids=sequence[None], use_cache=False)
        finally:
            for block in self.blocks:
                del block.forward
        return torch.cat(first)

    @contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """One block with its weights, in fp32; :attr:`dtypes` holds what they are read in."""
        block = self.blocks[index]
        for name, _ in list(block.named_parameters()):
            parent, _, last = name.rpartition(".")
            value = self._read(f"{self.prefix}.{index}.{name}")
            self.dtypes[name] = value.dtype
            setattr(block.get_submodule(parent), last, nn.Parameter(value.float(), requires_grad=False))
        try:
            yield block
        finally:
            block.to("meta")

    @torch.no_grad()
    def run(self, index: int, sequence: Tensor) -> Tensor:
        """The output of a loaded block, fp32 [1, length, hidden], for the hidden states of one sequence."""
        args, kwargs = self._arguments[index]
        out = self.blocks[index](sequence, *args, **kwargs)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def check(self, index: int, given: Tensor, wanted: Tensor) -> None:
        """Run a block again and compare: what was folded must not have changed it.

        Raises:
            FormatError: it did.
        """
        change = float((self.run(index, given) - wanted).norm() / (wanted - given).norm().clamp(min=1e-30))
        if not change < _LARGEST_CHANGE:
            raise FormatError(
                f"block {index} of {type(self.model).__name__} computes something else once scales are folded into it "
                f"(relative change {change:.2g})",
                "The model is not built as others of its type: quantize it without calibration (--method clip).",
            )

    def observe(self, index: int, hidden: Tensor, sample: int) -> dict[str, Inputs]:
        """Run a loaded block and keep what its linear layers are given.

        Args:
            index: the block.
            hidden: fp32 [sequences, length, hidden]; the block's outputs take its place.
            sample: tokens to keep, spread evenly.

        Returns:
            The inputs of each linear layer; layers that are given the same share one object.
        """
        each = max(1, min(hidden.shape[1], sample // hidden.shape[0]))
        watchers: dict[str, _Watcher] = {}
        latest: list[tuple[Tensor, _Watcher]] = []  # what the layers were given in this sequence

        def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                watcher = next((watcher for tensor, watcher in latest if tensor is args[0]), None)
                if watcher is None:
                    watcher = watchers.get(name) or _Watcher(each)
                    watcher.add(args[0])
                    latest.append((args[0], watcher))
                watchers[name] = watcher

            return hook

        linear = [item for item in self.blocks[index].named_modules() if isinstance(item[1], nn.Linear)]
        hooks = [module.register_forward_pre_hook(watch(name)) for name, module in linear]
        try:
            for i in range(len(hidden)):
                latest.clear()
                hidden[i] = self.run(index, hidden[i : i + 1])[0]
        finally:
            for handle in hooks:
                handle.remove()
        finished = {watcher: watcher.finish() for watcher in dict.fromkeys(watchers.values())}
        return {name: finished[watcher] for name, watcher in watchers.items()}


class _Watcher:
    """Collects the inputs of one or more layers."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._total: Tensor | None = None
        self._count = 0
        self._kept: list[Tensor] = []

    def add(self, given: Tensor) -> None:
        rows = given.reshape(-1, given.shape[-1])
        total = rows.abs().sum(0)
        self._total = total if self._total is None else self._total + total
        self._count += len(rows)
        step = len(rows) / self._each
        self._kept.append(rows[[int((i + 0.5) * step) for i in range(self._each)]])

    def finish(self) -> Inputs:
        assert self._total is not None
        return Inputs(self._total / self._count, torch.cat(self._kept))


def _find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers
    ]
    if len(found) != 1:
        raise FormatError(f"{type(model).__name__} has no single list of blocks", "")
    return found[0]
