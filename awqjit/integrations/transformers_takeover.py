# SPDX-License-Identifier: Apache-2.0
"""int4 folders as they are, loaded by the transformers library itself through the quantizer "awqjit".

The library asks one function which quantizer a config calls for. While awqjit is enabled another one stands in for it,
which names ours in configs of int4 folders and hands everything else on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import modeling_utils

from awqjit import formats
from awqjit.errors import AwqJitWarning, FormatError
from awqjit.integrations.transformers_quantizer import NAME, AwqJitConfig, device_of

METHODS = ("awq", "gptq", "compressed-tensors", "auto-round")
"""``quant_method`` of the folders that are taken over."""


@dataclass(frozen=True)
class Takeover:
    """The library's ``get_hf_quantizer``, with int4 folders on their way to a CPU or XPU sent to the quantizer above.

    Attributes:
        original: the function it stands in for.
        compute: the mode of models loaded without an :class:`AwqJitConfig` of their own.
    """

    original: Any
    compute: str

    def __call__(self, config: Any, quantization_config: Any, device_map: Any, *rest: Any, **named: Any) -> Any:
        described = _described(config)
        ours = quantization_config is None or isinstance(quantization_config, AwqJitConfig)
        if described is None or not ours or named.get("gguf_file") is not None or device_of(device_map) is None:
            return self.original(config, quantization_config, device_map, *rest, **named)
        try:
            formats.parse(described)
        except FormatError as error:
            if quantization_config is not None:
                raise
            warnings.warn(f"awqjit leaves this model to transformers: {error}", AwqJitWarning, stacklevel=4)
            return self.original(config, quantization_config, device_map, *rest, **named)
        compute = self.compute if quantization_config is None else quantization_config.compute
        # A dict, as config.json would hold it: the library makes the objects.
        config.quantization_config = {"quant_method": NAME, "compute": compute, "checkpoint": described}
        return self.original(config, None, device_map, *rest, **named)


def take_over(compute: str) -> None:
    """Stand in for the library's choice of a quantizer; see :func:`awqjit.integrations.transformers.enable`."""
    modeling_utils.get_hf_quantizer = Takeover(_original(), compute)


def give_back() -> None:
    modeling_utils.get_hf_quantizer = _original()


def _original() -> Any:
    current = modeling_utils.get_hf_quantizer
    return current.original if isinstance(current, Takeover) else current


def _described(config: Any) -> dict[str, Any] | None:
    """The quantization config in a model's config, if its method is one of :data:`METHODS`."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            described = dict(found) if isinstance(found, Mapping) else found.to_dict()
            method = described.get("quant_method")
            return described if getattr(method, "value", method) in METHODS else None
    return None
