# SPDX-License-Identifier: Apache-2.0
"""The output layer of a language model, which int4 checkpoints leave float, as int4 on request.

In a small model the float head is most of what a decoded token reads. Rounding it costs some accuracy: it is never done
unless asked for.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import nn

from awqjit.errors import ArgumentError
from awqjit.formats import LayerFormat
from awqjit.modules import AWQ_GEMM, Int4Linear
from awqjit.quantize import quantize_weight
from awqjit.spec import act_bits_of

_GROUPS = (128, 64, 32, 16)


def quantize_head(model: Any, *, compute: str = "w4a16", group_size: int | None = None) -> str:
    """Round a model's float output layer to int4, in place, with a search for each group's best step.

    Embeddings stay float: a head that shares their weight gets a weight of its own, and the config says so.
    ``save_pretrained`` writes the head in the form of the model's other int4 layers. A head that is int4 already stays
    as it is.

    Args:
        model: a causal language model of transformers, loaded by :func:`awqjit.from_pretrained`.
        compute: "w4a16" or "w4a8" of the head, whatever the other layers have.
        group_size: weights that share a scale; None takes that of the model's other layers if it divides K, else the
            largest of 128, 64, 32 and 16 that does.

    Returns:
        The head's name, for example "lm_head".

    Raises:
        ArgumentError: the model has no linear output layer, or one that cannot be rounded; ``compute`` or
            ``group_size`` is wrong.
    """
    act_bits_of(compute)
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if isinstance(head, Int4Linear):
        return name
    if type(head) is not nn.Linear or not name:
        raise ArgumentError("model", f"an output layer that is a {type(head).__name__}", "one that is an nn.Linear")
    format = next((layer.format for layer in model.modules() if isinstance(layer, Int4Linear)), AWQ_GEMM.one())
    size = _group_size(head.in_features, format.group_size if group_size is None else group_size, group_size is None)
    if head.out_features % 8:
        raise ArgumentError("model", f"a vocabulary of {head.out_features}", "a multiple of 8, which a word holds")
    weight = quantize_weight(
        head.weight.detach(),
        group_size=size,
        symmetric=format.sym,
        lowest_zero=int(format.method != "awq" and not format.sym),  # their first version cannot say 0
    )
    bias = None if head.bias is None else head.bias.detach()
    layer = Int4Linear.from_quantized(
        weight, bias, compute=compute, format=dataclasses.replace(format, group_size=size)
    )
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer.train(head.training))
    _tell(model, name, format, size)
    return name


def _group_size(k: int, wanted: int, automatic: bool) -> int:
    size = k if wanted == -1 else wanted
    if size >= 1 and k % size == 0:
        return size
    if automatic:
        for size in _GROUPS:
            if k % size == 0:
                return size
    raise ArgumentError("group_size", wanted, f"a divisor of the head's {k} in features, or -1")


def _tell(model: Any, name: str, format: LayerFormat, size: int) -> None:
    """Let the config say what the model is now: a head with an int4 weight of its own."""
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys.pop(f"{name}.weight", None)
    described = copy.deepcopy(getattr(model.config, "quantization_config", None))
    if not isinstance(described, dict):
        return
    if "modules_to_not_convert" in described:
        described["modules_to_not_convert"] = [one for one in described["modules_to_not_convert"] or () if one != name]
    if "ignore" in described:
        described["ignore"] = [one for one in described["ignore"] or () if one != name]
    if format.method == "gptq":
        described["lm_head"] = True
        described["dynamic"] = {
            key: value for key, value in (described.get("dynamic") or {}).items() if name not in key
        }
        if not described["dynamic"]:
            del described["dynamic"]
    if format.method == "auto-round":
        described["extra_config"] = {
            **(described.get("extra_config") or {}),
            name: {"bits": 4, "group_size": size, "sym": format.sym},
        }
    model.config.quantization_config = described
