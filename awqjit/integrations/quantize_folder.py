# SPDX-License-Identifier: Apache-2.0
"""``awqjit quantize``: a float transformers folder, or a GGUF file, to an int4 folder in the AWQ or GPTQ form."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from awqjit import progress
from awqjit.checkpoint import FolderWriter, new_folder
from awqjit.errors import ArgumentError, AwqJitWarning, FormatError
from awqjit.formats.awq import standard_to_awq
from awqjit.formats.gptq import standard_to_gptq
from awqjit.integrations.awq_search import FAMILIES, scale_block
from awqjit.integrations.calibration import BlockRunner, Calibration
from awqjit.integrations.float_source import FloatSource, open_source
from awqjit.integrations.quantize_plan import AUTOMATIC_SIZES, GROUP_SIZES, SMALLEST_GROUP, Plan, make_plan
from awqjit.quantize import quantize_weight

FORMATS = ("awq", "gptq")
"""Forms that can be written: AWQ (version gemm) and GPTQ (version 1, without act-order)."""


@dataclass(frozen=True)
class Report:
    """What quantizing a folder did.

    Attributes:
        destination: the new folder.
        plan: group size, layers that are int4 now, and those that stayed float.
        calibrated: the activation-aware search ran.
        bytes_written: size of the new safetensors.
        seconds: wall time.
    """

    destination: Path
    plan: Plan
    calibrated: bool
    bytes_written: int
    seconds: float

    @property
    def group_size(self) -> int:
        """Weights along K that share a scale; -1 for all."""
        return self.plan.group_size

    @property
    def quantized(self) -> tuple[str, ...]:
        """Layers that are int4 now."""
        return self.plan.quantized

    @property
    def kept(self) -> dict[str, str]:
        """Linear layer -> why it stayed float; the head is among them."""
        return self.plan.kept


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
    group_size: int | None = None,
    symmetric: bool = False,
    clip_search: bool = True,
    calibration: Calibration | None = None,
    format: str = "awq",
    skip: Sequence[str] = (),
    shard_bytes: int = 1 << 30,
    force: bool = False,
    show_progress: bool = True,
    announce: Callable[[Plan], None] | None = None,
) -> Report:
    """Round every linear layer but the head to int4 and write the model as an AWQ or GPTQ folder.

    Layers whose in_features is not a multiple of the group size, or whose out_features is not a multiple of 8, stay
    float, as do embeddings, head and norms. The folder appears under its name only when it is complete. With a
    calibration text one block at a time is in memory as float, beside the text's hidden states.

    Args:
        source: a transformers folder with safetensors, a GGUF file, or a folder with one GGUF file (llama or qwen2).
        destination: a folder that does not exist or is empty.
        group_size: 32, 64, 128, -1 (one group per column), or another multiple of 8 from 16 up. None is the largest of
            128, 64, 32 and 16 that divides the in_features of every layer to be quantized.
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
        announce: called with what will be done, before any weight is read.

    Raises:
        ArgumentError: the group size or format is another, the destination is in use, an entry of ``skip`` names no
            layer, or no layer can be quantized.
        FormatError: the source is not a complete float model in a form that is read.
        CheckpointMismatchError: the source's tensors do not fit its config.
    """
    started = time.perf_counter()
    first = AUTOMATIC_SIZES[0] if group_size is None else group_size
    rounding = Rounding(first, symmetric, clip_search, format)
    _check_apart(Path(source), Path(destination))
    with new_folder(destination, shard_bytes=shard_bytes, force=force) as writer:
        model = open_source(Path(source))
        plan = make_plan(model.model, group_size, format, skip)
        rounding = replace(rounding, group_size=plan.group_size)
        quantizable = set(plan.quantized)
        if announce is not None:
            announce(plan)
        ids = None if calibration is None else _tokens(model, calibration)
        with progress.bar("quantizing", len(model.shapes), show_progress) as advance:
            written: set[str] = set()
            if calibration is not None and ids is not None:
                written = _quantize_blocks(writer, model, quantizable, rounding, calibration, ids, advance)
            for name in model.shapes:
                if name in written:
                    continue
                layer = name.removesuffix(".weight")
                if name.endswith(".weight") and layer in quantizable:
                    rounding.write(writer, layer, model.read(name))
                else:
                    writer.add(name, model.store(model.read(name)))
                advance()
        inside = [name for name in plan.quantized if ".layers." in name]
        blocks = inside[0].rpartition(".layers.")[0] + ".layers." if inside else ""
        writer.write_json("config.json", model.config | {"quantization_config": rounding.config(plan.kept, blocks)})
        model.write_side_files(writer.folder)
    size = sum(path.stat().st_size for path in Path(destination).glob("*.safetensors"))
    seconds = time.perf_counter() - started
    return Report(Path(destination), plan, ids is not None, size, seconds)


def _check_apart(source: Path, destination: Path) -> None:
    """Replacing the destination must not delete the source."""
    replaced, kept = destination.resolve(), source.resolve()
    if replaced == kept:
        raise ArgumentError("destination", destination, "another folder: the destination is the source")
    if replaced in kept.parents:
        raise ArgumentError("destination", destination, f"another folder: the source {source} is in it")


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
            size, symmetric = rounding.group_size, rounding.symmetric
            try:
                scale_block(block, folds, chosen, inputs, stored, group_size=size, symmetric=symmetric)
            except ArgumentError as error:
                raise FormatError(f"a layer of {prefix.removesuffix('.')} cannot be quantized: {error}", "") from error
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
