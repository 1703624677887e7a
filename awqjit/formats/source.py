# SPDX-License-Identifier: Apache-2.0
"""Where a model folder keeps its quantization config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from awqjit.errors import FormatError

KEYS = ("quantization_config", "compression_config")
FILES = ("quantize_config.json", "quant_config.json")


def find_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A model folder's quantization config.

    It is looked for in config.json (``quantization_config``, ``compression_config``, either one also in
    ``text_config``, where models of several parts have it), then in the files that AutoGPTQ (quantize_config.json) and
    AutoAWQ (quant_config.json) wrote before transformers knew them.

    Args:
        folder: the folder.
        config: the contents of its config.json.

    Raises:
        FormatError: there is none, or a file is not JSON.
    """
    text = config.get("text_config")
    for source in (config, text if isinstance(text, Mapping) else {}):
        for key in KEYS:
            if isinstance(source.get(key), Mapping):
                return dict(source[key])
    for name in FILES:
        path = folder / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise FormatError(f"{path} is not valid JSON ({error})", "Fetch the file again.") from None
        if not isinstance(found, dict):
            raise FormatError(f"{path} holds a {type(found).__name__}, not an object", "Fetch the file again.")
        return found
    raise FormatError(
        f"{folder} has no quantization_config in config.json, nor {' or '.join(FILES)}",
        "Add what the producer wrote.",
    )
