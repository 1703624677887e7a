# SPDX-License-Identifier: Apache-2.0
"""The quantizer "awqjit" of the transformers library: int4 layers inside the library's own ``from_pretrained``.

The library makes the model and reads everything that is float; the int4 layers are empty places meanwhile. They are
read and packed by :mod:`awqjit.loader` after the library has finished: it converts floating tensors to the model's
dtype (scales included) and replaces buffers that are not saved by memory with made-up contents.

Importing this module imports transformers and registers the quantizer, which serves configs that name it;
:mod:`awqjit.integrations.transformers_takeover` makes it serve int4 folders as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging as library_logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from awqjit import formats, loader, select
from awqjit.checkpoint import Checkpoint
from awqjit.errors import ArgumentError, FormatError
from awqjit.integrations import conversions
from awqjit.integrations.transformers import described_now, resolve_dtype
from awqjit.plan import FUSED, LINEAR_CLASSES, Plan, make_plan
from awqjit.spec import act_bits_of

NAME = "awqjit"
DEVICES = ("cpu", "xpu")

_PLACED_BY_LIBRARY = ("auto", "balanced", "balanced_low_0", "sequential")


@register_quantization_config(NAME)
class AwqJitConfig(QuantizationConfigMixin):
    """What ``from_pretrained(folder, quantization_config=...)`` may be given once awqjit is enabled.

    Attributes:
        compute: "w4a16" or "w4a8".
        checkpoint: the folder's own quantization config; filled in while loading.
    """

    def __init__(
        self, compute: str = "w4a16", checkpoint: Mapping[str, Any] | None = None, quant_method: str = NAME
    ) -> None:
        """Raises:
        ArgumentError: ``compute`` or ``quant_method`` is unknown.
        """
        act_bits_of(compute)
        if quant_method != NAME:
            raise ArgumentError("quant_method", quant_method, NAME)
        self.quant_method: Any = NAME  # the library's own methods are an enumeration
        self.compute = compute
        self.checkpoint = None if checkpoint is None else dict(checkpoint)


class _Place(nn.Module):
    """Where an int4 layer will be. It has no tensors, so that the library neither reads nor makes up any."""


@dataclass(frozen=True)
class _Job:
    """What one load has found out before the library reads weights, for afterwards."""

    checkpoint: Checkpoint
    plan: Plan
    method: str
    unexpected: set[str] | None  # the model's own list, which is lengthened meanwhile
    device: torch.device


@register_quantizer(NAME)
class AwqJitQuantizer(HfQuantizer):
    """Puts :class:`awqjit.modules.Int4Linear` where the checkpoint holds an int4 layer. One object per load."""

    requires_calibration = True  # reads int4 folders, makes none
    quantization_config: AwqJitConfig

    def __init__(self, quantization_config: AwqJitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._dtype: torch.dtype | None = None
        self._job: _Job | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises:
        ArgumentError: the model is to go elsewhere than to one device that there are kernels for.
        """
        if device_of(device_map) is None:
            raise ArgumentError("device_map", device_map, f"one device: {' or '.join(_devices())}")

    def update_device_map(self, device_map: Any) -> Any:
        # The library would weigh layers that are still empty.
        return {"": device_of(device_map)} if device_map in _PLACED_BY_LIBRARY else device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, *, device_map: Any = None, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Find every int4 layer's tensors, and make places for the layers.

        Raises:
            FormatError: the weights are no safetensors beside each other in one folder, or a layer is in a form that
                is not read.
            CheckpointMismatchError: an int4 layer's tensors are missing, left over or of another shape.
        """
        resolve_dtype(self._dtype or torch.float32, None)
        format = formats.parse(self.quantization_config.checkpoint or {})
        checkpoint = _open(checkpoint_files)
        plan = _plan(model, checkpoint, format)
        for layer in plan.quantized:
            path, _, last = layer.name.rpartition(".")
            setattr(model.get_submodule(path), last, _Place())
        for target in [name for name in model.all_tied_weights_keys if name.removesuffix(".weight") in _names(plan)]:
            del model.all_tied_weights_keys[target]  # a quantized head shares nothing
            model.config.tie_word_embeddings = False
        unexpected = model.__dict__.get("_keys_to_ignore_on_load_unexpected")
        self._job = _Job(checkpoint, plan, format.method, unexpected, device_of(device_map) or torch.device("cpu"))
        ours = {rf"^{re.escape(name)}\." for name in _names(plan, stored=True)}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ours}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        job, self._job = self._job, None
        assert job is not None and self._dtype is not None
        del model._keys_to_ignore_on_load_unexpected
        if job.unexpected is not None:
            model._keys_to_ignore_on_load_unexpected = job.unexpected
        refused = loader.load(
            model,
            job.checkpoint,
            job.plan,
            dtype=self._dtype,
            compute=self.quantization_config.compute,
            show_progress=library_logging.is_progress_bar_enabled(),
        )
        if job.device.type != "cpu":
            for layer in job.plan.quantized:
                model.get_submodule(layer.name).to(job.device)
        # As the checkpoint has it: a saved model is one of that method again, for whoever reads it.
        model.config.quantization_config = described_now(self.quantization_config.checkpoint or {}, job.method, refused)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top are; the int4 weights themselves are not."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _devices() -> tuple[str, ...]:
    served = {row.device for row in select.ROWS}
    return tuple(device for device in DEVICES if device in served)


def device_of(device_map: Any) -> torch.device | None:
    """The one device that a ``device_map`` puts a model on; None if it is not one that there are kernels for."""
    if device_map is None:
        return torch.device("cpu")
    if isinstance(device_map, str) and device_map in _PLACED_BY_LIBRARY:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_map = {"": "cpu" if accelerator is None else accelerator}
    values = set(device_map.values()) if isinstance(device_map, Mapping) else {device_map}
    try:
        devices = {torch.device(value) for value in values}
    except RuntimeError:  # "disk", or a number where there is no accelerator
        return None
    (device,) = devices if len(devices) == 1 else (None,)
    return device if device is not None and device.type in _devices() else None


def _open(files: list[str] | None) -> Checkpoint:
    paths = {Path(file) for file in files or ()}
    folders = {path.parent for path in paths}
    if len(folders) == 1 and all(path.suffix == ".safetensors" for path in paths):
        (folder,) = folders
        checkpoint = Checkpoint.open(folder)
        if set(checkpoint.files.values()) <= paths:
            return checkpoint
    raise FormatError(
        f"the weights ({', '.join(sorted(path.name for path in paths)[:3]) or 'none'}) are not the safetensors of one "
        "model folder",
        "Load a folder without variants.",
    )


def _names(plan: Plan, *, stored: bool = False) -> set[str]:
    """The model's names of the int4 layers, and the checkpoint's."""
    names = {layer.name for layer in plan.quantized}
    return names | {part.name for layer in plan.quantized for part in layer.parts} if stored else names


def _plan(model: Any, checkpoint: Checkpoint, format: formats.FormatConfig) -> Plan:
    """Where the int4 layers go. Everything else is the library's to read, and to report on."""
    places = _Places(model)
    renamed = conversions.renamed(model, checkpoint.files, format.tensor_names)
    names = {source: places.find(renamed.get(source, source)) for source in checkpoint.files}
    layers = {name.rpartition(".")[0] for name in names.values() if name.rpartition(".")[2] in formats.MARKS}
    # What is beside the model, such as a head where only the decoder is loaded, the library reports.
    layers = {layer for layer in layers if layer.partition(".")[0] in model._modules}
    ours = {source: name for source, name in names.items() if name.rpartition(".")[0] in layers}
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).__name__ in LINEAR_CLASSES
        and (name in layers or places.parts(name) & layers)
    }
    part = dataclasses.replace(
        checkpoint,
        files={source: checkpoint.files[source] for source in ours},
        shapes={source: checkpoint.shapes[source] for source in ours},
    )
    plan = make_plan(_tree(linears), part, format, ties={}, names=ours)
    joined = [name for name, sources in plan.dense.items() if len(sources) > 1]
    if joined:
        raise FormatError(
            f"float weights that transformers does not put together: {', '.join(joined[:10])}",
            "Load the folder with awqjit.from_pretrained, which does.",
        )
    return dataclasses.replace(plan, dense={})  # float weights of layers that are stored in both ways


class _Places:
    """Which names of a checkpoint are names in a model that holds more, or less, than the checkpoint's decoder."""

    def __init__(self, model: Any) -> None:
        self.prefix = f"{model.base_model_prefix}."
        self.paths = {name for name, _ in model.named_modules()}

    def find(self, name: str) -> str:
        """A tensor's name with the decoder's name put before it, or taken away, where the model has it otherwise."""
        for candidate in (name, name.removeprefix(self.prefix), self.prefix + name):
            if candidate.rpartition(".")[0].rpartition(".")[0] in self.paths:
                return candidate
        return name

    @staticmethod
    def parts(name: str) -> set[str]:
        parent, _, last = name.rpartition(".")
        return {f"{parent}.{part}" for part in FUSED.get(last, ())}


def _tree(modules: Mapping[str, nn.Module]) -> nn.Module:
    """A module that has these at their paths, and nothing else."""
    root = nn.Module()
    for name, module in modules.items():
        parent = root
        *path, last = name.split(".")
        for step in path:
            if step not in parent._modules:
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        parent.add_module(last, module)
    return root
