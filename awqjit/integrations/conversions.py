# SPDX-License-Identifier: Apache-2.0
"""What the transformers library changes while it loads a checkpoint, done here with its own rules.

Some model classes name or fuse weights otherwise than their checkpoints do, and all of them compute some buffers from
their config instead of storing them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from awqjit.errors import FormatError

_POISON = (0.0, 1.0)  # a buffer that ends up the same whichever it held before has been computed


def renamed(model: Any, tensors: Collection[str], last_names: Collection[str]) -> dict[str, str]:
    """The model's names for a checkpoint's tensors, where they differ.

    The rules are remembered in the model: ``save_pretrained`` then writes the checkpoint's names again.

    Args:
        model: the skeleton.
        tensors: the checkpoint's names.
        last_names: last names of the tensors that stand for the weight of an int4 layer.

    Raises:
        FormatError: int4 layers, or float ones, that the model holds fused into one parameter (mixture of experts).
    """
    from transformers import conversion_mapping, core_model_loading

    rules = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    fusions = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    names: dict[str, str] = {}
    fused = []
    for tensor in tensors:
        layer, _, last = tensor.rpartition(".")
        # The rules are written for float checkpoints.
        float_name = f"{layer}.weight" if last in last_names else tensor
        name = core_model_loading.apply_renamings(float_name, renamings)
        if core_model_loading.apply_converters(name, fusions)[1] is not None:
            fused.append(tensor)
        if float_name != tensor:
            name = f"{name.removesuffix('.weight')}.{last}" if name.endswith(".weight") else tensor
        if name != tensor:
            names[tensor] = name
    if fused:
        more = f", ... ({len(fused)} in all)" if len(fused) > 10 else ""
        raise FormatError(
            f"{type(model).__name__} fuses these weights into others while loading, which is not supported "
            f"(mixture-of-experts models with int4 experts are not): {', '.join(fused[:10])}{more}",
            "Use a model without experts.",
        )
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return names


@torch.no_grad()
def compute_buffers(model: Any) -> None:
    """Compute what is neither a parameter nor on disk, such as the rotary frequencies, as the library does.

    The model's other tensors stay on the meta device, where initializing them costs nothing.

    Raises:
        FormatError: the library does not compute a buffer.
    """
    for name, module, owner in _with_owners(model, "", model):
        buffers = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
        wanted = {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.is_meta}
        if not wanted:
            continue
        results = []
        for poison in _POISON:
            module._buffers |= {key: torch.full_like(buffer, poison, device="cpu") for key, buffer in wanted.items()}
            owner._init_weights(module)
            results.append({key: module.get_buffer(key) for key in wanted})
        untouched = [key for key in wanted if not _same(results[0][key], results[1][key])]
        if untouched:
            raise FormatError(
                f"the buffers {', '.join(untouched)} of {name} ({type(module).__name__}) cannot be computed from the "
                "model's config",
                "This model type is not supported.",
            )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _with_owners(module: nn.Module, name: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module with its name and the innermost model of the library that it is part of."""
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    yield name, module, owner
    for child_name, child in module.named_children():
        yield from _with_owners(child, f"{name}.{child_name}" if name else child_name, owner)
