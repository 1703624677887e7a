# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the PEFT library on int4 layers.

PEFT knows the classes of the layers it puts adapters on. A config tells it of further ones: :func:`register` makes it
wrap :class:`awqjit.modules.Int4Linear` in ``LoraInt4Linear`` below, whose gradients flow through the operator
``int4_linear``. The int4 weight itself gets none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from awqjit.errors import ArgumentError, MissingDependencyError
from awqjit.modules import Int4Linear

if TYPE_CHECKING:
    from peft import LoraConfig

# Settings of a LoraConfig that may read the weight below the adapter, and the values with which they do not.
_WITHOUT_WEIGHT: dict[str, tuple[Any, ...]] = {"use_dora": (False,), "init_lora_weights": (True, False, "gaussian")}


def register(config: LoraConfig) -> LoraConfig:
    """Let a LoRA config apply to int4 layers.

    Call it on a config before ``get_peft_model``, and on the config of a saved adapter before loading it::

        model = get_peft_model(model, register(LoraConfig(target_modules=["q_proj", "v_proj"])))
        config = register(LoraConfig.from_pretrained(folder))
        model = PeftModel.from_pretrained(model, folder, config=config)

    Args:
        config: changed in place; it applies to float layers as before.

    Returns:
        The same config.

    Raises:
        ArgumentError: it asks for ``all-linear`` layers, which int4 layers are not for PEFT (give their names), or for
            a variant that reads or changes the base weight.
        MissingDependencyError: peft is not installed.
    """
    lora_layer = __getattr__("LoraInt4Linear")
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        raise ArgumentError("target_modules", targets, "a list of names: PEFT finds no int4 layer by all-linear")
    _check(config)
    config._register_custom_module({Int4Linear: lora_layer})
    return config


def _check(config: Any) -> None:
    for setting, allowed in _WITHOUT_WEIGHT.items():
        value = getattr(config, setting)
        if value not in allowed:
            raise ArgumentError(setting, value, f"{' or '.join(map(repr, allowed))}: the base weight is int4")


@functools.cache
def _lora_int4_linear() -> type[nn.Module]:
    try:
        from peft.tuners.lora import layer
    except ImportError:
        raise MissingDependencyError("peft", "LoRA on int4 layers", "pip install peft") from None

    class LoraInt4Linear(layer.Linear):
        """x W + bias of an int4 layer, and the adapters' part beside it. It cannot be merged."""

        def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
            _check(config)  # again: a model's second adapter comes with a config of its own
            super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

        @property
        def lora_variants(self) -> dict[tuple[str, ...], None]:
            return {(): None}  # the plain one; PEFT refuses a config that asks for another

        def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
            assert isinstance(module, Int4Linear)
            return module.in_features, module.out_features

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
            raise ArgumentError(
                "merge",
                f"an int4 layer ({self.get_base_layer().extra_repr()})",
                "a float layer: the sum has more values than 4 bits hold. Keep the adapter beside the int4 weight",
            )

    # Where __getattr__ finds it: pickle looks a class up by its name.
    LoraInt4Linear.__qualname__ = LoraInt4Linear.__name__
    return LoraInt4Linear


def __getattr__(name: str) -> Any:
    if name == "LoraInt4Linear":  # its base class is PEFT's, which is imported when an adapter is made
        return _lora_int4_linear()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
