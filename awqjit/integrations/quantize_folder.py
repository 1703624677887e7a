# SPDX-License-Identifier: Apache-2.0
"""``awqjit quantize``: a float transformers folder, or a GGUF file, to an int4 folder in the AWQ or GPTQ form."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from awqjit import progress
from awqjit.checkpoint import FolderWriter, new_folder
from awqjit.errors import ArgumentError, AwqJitWarning, FormatError
from awqjit.formats import Rule
from awqjit.formats.awq import standard_to_awq
from awqjit.formats.gptq import standard_to_gptq
from awqjit.integrations.awq_search import FAMILIES, scale_block
from awqjit.integrations.calibration import BlockRunner, Calibration
from awqjit.integrations.float_source import FloatSource, open_source
from awqjit.quantize import quantize_weight

GROUP_SIZES = (32, 64, 128, -1)
"""Group sizes that readers of AWQ and GPTQ folders agree on."""

SMALLEST_GROUP = 16

FORMATS = ("awq", "gptq")
"""Forms that can be written: AWQ (version gemm) and GPTQ (version 1, without act-order)."""


@dataclass(frozen=True)
class Report:
    """What quantizing a folder did.

    Attributes:
        destination: the new folder.
        quantized: layers that are int4 now.
        kept: layer -> why it stayed float.
        calibrated: the activation-aware search ran.
        bytes_written: size of the new safetensors.
        seconds: wall time.
    """

    destination: Path
    quantized: tuple[str, ...]
    kept: dict[str, str]
    calibrated: bool
    bytes_written: int
    seconds: float


@dataclass(frozen=True)
class Rounding:
    """How each layer is rounded and written.

    Attributes:
        group_size: weights along K that share a scale; -1 for all.
        symmetric: every zero point is 8.
        clip_search: see :func:`awqjit.quantize.quantize_weight`.
        format: one of :data:`FORMATS`.

    Raises:
        ArgumentError: the group size or format is another.
    """

    group_size: int
    symmetric: bool
    clip_search: bool
    format: str

    def __post_init__(self) -> None:
        size = self.group_size
        if size != -1 and (size < SMALLEST_GROUP or size % 8):
            raise ArgumentError(
                "group_size", size, f"one of {', '.join(map(str, GROUP_SIZES))}, or another multiple of 8 from 16 up"
            )
        if self.format not in FORMATS:
            raise ArgumentError("format", repr(self.format), f"one of {', '.join(FORMATS)}")

    def write(self, writer: FolderWriter, layer: str, weight: Tensor, inputs: Tensor | None = None) -> None:
        """Round the weight of one layer, for a sample of its inputs if there is one, and write its tensors."""
        try:
            rounded = quantize_weight(
                weight,
                group_size=self.group_size,
                symmetric=self.symmetric,
                clip_search=self.clip_search,
                inputs=inputs,
                # GPTQ version 1 stores a zero point of 0 as 15, which some readers take for 16.
                lowest_zero=int(self.format == "gptq"),
            )
        except ArgumentError as error:
            raise FormatError(f"the layer {layer} cannot be quantized: {error}", "") from error
        if self.format == "awq":
            named = dict(zip(("qweight", "scales", "qzeros"), standard_to_awq(rounded), strict=True))
        else:
            parts = standard_to_gptq(rounded, v2=False)
            named = dict(zip(("qweight", "scales", "qzeros", "g_idx"), parts, strict=True))
        for part, tensor in named.items():
            writer.add(f"{layer}.{part}", tensor)

    def config(self, kept: Iterable[str], blocks: str) -> dict[str, Any]:
        """The ``quantization_config``, as AutoAWQ and GPTQModel write it.

        Args:
            kept: linear layers that stay float.
            blocks: what the names of layers within blocks begin with.
        """
        common: dict[str, Any] = {"quant_method": self.format, "bits": 4, "group_size": self.group_size}
        if self.format == "awq":
            # Zero points are stored also when all are 8: not every reader can do without.
            return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": sorted(kept)}
        inside = sorted(name for name in kept if name.startswith(blocks))  # GPTQ is about blocks, never about the head
        return common | {
            "checkpoint_format": "gptq",
            "desc_act": False,
            "sym": self.symmetric,
            "lm_head": False,
            "true_sequential": True,
            "damp_percent": 0.01,
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in inside},
        }


def quantize_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    group_size: int = 128,
    symmetric: bool = False,
    clip_search: bool = True,
    calibration: Calibration | None = None,
    format: str = "awq",
    skip: Sequence[str] = (),
    shard_bytes: int = 1 << 30,
    force: bool = False,
    show_progress: bool = True,
) -> Report:
    """Round every linear layer but the head to int4 and write the model as an AWQ or GPTQ folder.

    Layers whose in_features is not a multiple of the group size, or whose out_features is not a multiple of 8, stay
    float, as do embeddings, head and norms. The folder appears under its name only when it is complete. With a
    calibration text one block at a time is in memory as float, beside the text's hidden states.

    Args:
        source: a transformers folder with safetensors, a GGUF file, or a folder with one GGUF file (llama or qwen2).
        destination: a folder that does not exist or is empty.
        group_size: 32, 64, 128, -1 (one group per column), or another multiple of 8 from 16 up.
        symmetric: every zero point is 8.
        clip_search: see :func:`awqjit.quantize.quantize_weight`.
        calibration: the text for the activation-aware search of scales and steps
            (:mod:`awqjit.integrations.awq_search`); None looks at the weights alone. Model types that the search does
            not know, and models without a tokenizer, get the weights-only search, with a warning.
        format: "awq" or "gptq".
        skip: layers to leave as float: whole names, or parts of them between dots (``lm_head``, ``model.layers.0``,
            ``mlp``, ``down_proj``).
        shard_bytes: largest safetensors file in bytes.
        force: replace an existing destination.
        show_progress: a bar over the layers on stderr.

    Raises:
        ArgumentError: the group size or format is another, the destination is in use, an entry of ``skip`` names no
            layer, or no layer can be quantized.
        FormatError: the source is not a complete float model in a form that is read.
        CheckpointMismatchError: the source's tensors do not fit its config.
    """
    started = time.perf_counter()
    rounding = Rounding(group_size, symmetric, clip_search, format)
    replaced = Path(destination).resolve()
    if replaced == Path(source).resolve() or replaced in Path(source).resolve().parents:
        raise ArgumentError("destination", destination, f"a folder that the source {source} is not in")
    with new_folder(destination, shard_bytes=shard_bytes, force=force) as writer:
        model = open_source(Path(source))
        quantizable, kept = _sort_layers(model.model, group_size, format, skip)
        if not quantizable:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:5])
            raise ArgumentError("group_size", group_size, f"one that suits a layer at least ({reasons})")
        ids = None if calibration is None else _tokens(model, calibration)
        with progress.bar("quantizing", len(model.shapes), show_progress) as advance:
            written: set[str] = set()
            if calibration is not None and ids is not None:
                written = _quantize_blocks(writer, model, set(quantizable), rounding, calibration, ids, advance)
            for name in model.shapes:
                if name in written:
                    continue
                layer = name.removesuffix(".weight")
                if name.endswith(".weight") and layer in quantizable:
                    rounding.write(writer, layer, model.read(name))
                else:
                    writer.add(name, model.store(model.read(name)))
                advance()
        blocks = next((name.rpartition(".layers.")[0] + ".layers." for name in quantizable if ".layers." in name), "")
        writer.write_json("config.json", model.config | {"quantization_config": rounding.config(kept, blocks)})
        model.write_side_files(writer.folder)
    size = sum(path.stat().st_size for path in Path(destination).glob("*.safetensors"))
    seconds = time.perf_counter() - started
    return Report(Path(destination), tuple(quantizable), kept, ids is not None, size, seconds)


def _tokens(model: FloatSource, calibration: Calibration) -> Tensor | None:
    """Token ids [sequences, length], or None with a warning where the search cannot run."""
    kind = str(model.model.config.model_type)
    if kind not in FAMILIES:
        reason = f"it does not know models of type {kind!r} (but {', '.join(FAMILIES)})"
    else:
        try:
            return calibration.tokens(model.tokenizer(), model.model.config)
        except FormatError as error:
            reason = str(error)
    warnings.warn(
        f"the activation-aware search cannot run: {reason}. The weights are rounded by a search over themselves alone",
        AwqJitWarning,
        stacklevel=3,
    )
    return None


def _quantize_blocks(
    writer: FolderWriter,
    model: FloatSource,
    quantizable: set[str],
    rounding: Rounding,
    calibration: Calibration,
    ids: Tensor,
    advance: Callable[[], None],
) -> set[str]:
    """Quantize and write block after block; returns the names of the tensors that this took care of."""
    runner = BlockRunner(model.model, model.read)

    def stored(name: str, value: Tensor) -> Tensor:
        return model.store(value.to(runner.dtypes[name]))

    folds = FAMILIES[str(model.model.config.model_type)]
    hidden = runner.start(ids)
    written: set[str] = set()
    for index in range(len(runner.blocks)):
        prefix = f"{runner.prefix}.{index}."
        chosen = {name.removeprefix(prefix) for name in quantizable if name.startswith(prefix)}
        with runner.loaded(index) as block:
            first = hidden[:1].clone()
            inputs = runner.observe(index, hidden, calibration.sample)
            scale_block(
                block,
                folds,
                chosen,
                inputs,
                stored,
                group_size=rounding.group_size,
                symmetric=rounding.symmetric,
            )
            runner.check(index, first, hidden[:1])
            for name, value in block.named_parameters():
                full, layer = prefix + name, name.removesuffix(".weight")
                if layer in chosen and name != layer:
                    rounding.write(writer, prefix + layer, value, inputs[layer].sample)
                else:
                    writer.add(full, stored(name, value))
                written.add(full)
                advance()
    return written


def _sort_layers(
    model: Any, group_size: int, format: str, skip: Sequence[str]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Linear layers that become int4, and those that stay float with the reason."""
    quantizable: dict[str, nn.Linear] = {}
    kept: dict[str, str] = {}
    head = model.get_output_embeddings()
    rules = {entry: Rule("parts", entry) for entry in skip}
    unused = set(rules)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        skipped = {entry for entry, rule in rules.items() if rule.matches(name)}
        unused -= skipped
        if module is head:
            kept[name] = "the head is never quantized"
        elif skipped:
            kept[name] = f"skipped: {', '.join(sorted(skipped))}"
        elif group_size != -1 and module.in_features % group_size:
            fits = ", ".join(str(size) for size in GROUP_SIZES if size > 0 and module.in_features % size == 0)
            hint = f"; --group-size {fits} would do" if fits else ""
            kept[name] = f"in_features {module.in_features} is not a multiple of group size {group_size}{hint}"
        elif module.in_features % 8 and format == "gptq":
            kept[name] = f"in_features {module.in_features} is not a multiple of 8"
        elif module.out_features % 8:
            kept[name] = f"out_features {module.out_features} is not a multiple of 8"
        else:
            quantizable[name] = module
    if unused:
        raise ArgumentError("skip", ", ".join(sorted(unused)), "names of linear layers, or parts of them between dots")
    return quantizable, kept
