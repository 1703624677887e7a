# SPDX-License-Identifier: Apache-2.0
"""int4 folders of the transformers library: the skeleton and its computed parts here, the weights by `awqjit.loader`.

The library's own ``from_pretrained`` is not used for the weights: it converts every floating tensor to the model's
dtype (scales included), fills what a checkpoint lacks with random values, and holds all unpacked layers at once.
"""

from __future__ import annotations

import copy
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from awqjit import formats, loader
from awqjit.checkpoint import Checkpoint
from awqjit.errors import ArgumentError, AwqJitWarning, FormatError, MissingDependencyError
from awqjit.integrations import conversions
from awqjit.integrations.head import quantize_head
from awqjit.plan import make_plan
from awqjit.spec import act_bits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Written by old versions of the library; the values are computed from the config.
_IGNORED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")

_LONGEST = 300  # characters of another library's message: some list every model type there is

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


class _Making:
    """The library changes torch's default dtype while it makes a model: two threads would leave each other's behind."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_making = _Making()


def _after_fork_in_child() -> None:
    _making.lock = threading.Lock()  # another thread may have held it at the fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def require_transformers(feature: str = "loading a transformers folder") -> Any:
    """The transformers package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError("transformers", feature, "pip install transformers safetensors") from None
    return transformers


def resolve_dtype(dtype: torch.dtype | str, config: Any) -> torch.dtype:
    """A torch dtype from a dtype, its name, or "auto" for the config's own.

    Raises:
        ArgumentError: it is not bfloat16, float16 or float32.
    """
    wanted: Any = dtype
    if dtype == "auto":
        wanted = getattr(config, "dtype", None) or torch.float32
    if isinstance(wanted, str):
        wanted = DTYPES.get(wanted.removeprefix("torch."), wanted)
    if wanted not in DTYPES.values():
        raise ArgumentError("dtype", dtype, f"auto or one of {', '.join(DTYPES)}")
    return wanted


def read_config(folder: str | os.PathLike[str], **options: Any) -> Any:
    """The transformers config of a folder. Code that comes with a model is not run.

    Raises:
        FormatError: transformers does not know the model's type.
    """
    library = require_transformers()
    with _as_format_error(f"transformers cannot read the config of {folder}"):
        return library.AutoConfig.from_pretrained(os.fspath(folder), trust_remote_code=False, **options)


def read_tokenizer(folder: str | os.PathLike[str], **options: Any) -> Any:
    """The tokenizer of a folder. Code that comes with a model is not run.

    Raises:
        FormatError: there is none that transformers can make.
    """
    library = require_transformers("reading a tokenizer")
    with _as_format_error(f"{folder} has no tokenizer that transformers can use"):
        return library.AutoTokenizer.from_pretrained(os.fspath(folder), trust_remote_code=False, **options)


def skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model that a config describes, every tensor on the meta device.

    Raises:
        FormatError: transformers has no such model, or the config's values make none.
    """
    library = require_transformers()
    with (
        _making.lock,
        _as_format_error("transformers makes no causal language model of this config"),
        torch.device("meta"),
    ):
        return library.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


@contextmanager
def _as_format_error(what: str) -> Iterator[None]:
    """Say what failed where the library meets a damaged file: it then raises whatever its code happens to."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        kind = "" if isinstance(error, ValueError) and said else f"{type(error).__name__} "
        raise FormatError(f"{what}: {kind}{said if len(said) <= _LONGEST else said[:_LONGEST] + ' ...'}", "") from error


def _open(folder: Path) -> tuple[Checkpoint, dict[str, Any], formats.FormatConfig]:
    checkpoint = Checkpoint.open(folder)
    if not any(name.rpartition(".")[2] in formats.MARKS for name in checkpoint.files):
        raise FormatError(f"{folder} holds no int4 layer", "Quantize it first: awqjit quantize FOLDER DESTINATION.")
    described = formats.find_config(folder, checkpoint.config)
    return checkpoint, described, formats.parse(described)


def from_pretrained(
    folder_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = torch.bfloat16,
    compute: str = "w4a16",
    lm_head: str | None = None,
    progress: bool = True,
) -> PreTrainedModel:
    """Load an int4 causal language model that transformers knows (Llama, Qwen2 and models built like them).

    Which layers are int4 is read off the checkpoint's tensors. The model is in eval mode, no parameter requires a
    gradient, and ``save_pretrained`` writes the checkpoint's own tensors again. Hints for GPU kernels in the config are
    ignored.

    Args:
        folder_or_id: a folder with config.json and safetensors, or the id of such a model on the Hugging Face hub.
        dtype: of activations and of everything that is not int4: bfloat16, float16, float32 or "auto" (the config's).
            Scales keep the checkpoint's dtype.
        compute: "w4a16" (activations as they are) or "w4a8" (activations rounded to int8 per row and group).
        lm_head: "w4a16" or "w4a8": round a float output layer to int4 too (:func:`awqjit.quantize_head`); None leaves
            it as the checkpoint has it.
        progress: show progress bars on stderr.

    Returns:
        The model, its int4 layers being :class:`awqjit.modules.Int4Linear`.

    Raises:
        ArgumentError: ``dtype`` or ``compute`` is unknown.
        FormatError: the folder is not a complete model in a form that is read.
        CheckpointMismatchError: its tensors do not fit its config.
        MissingDependencyError: transformers is not installed.
    """
    transformers = require_transformers()
    act_bits_of(compute)
    if lm_head is not None:
        act_bits_of(lm_head)
    folder = local_folder(folder_or_id)
    checkpoint, described, format = _open(folder)
    config = read_config(folder)
    target_dtype = resolve_dtype(dtype, config)
    model = skeleton(config, target_dtype)
    conversions.compute_buffers(model)
    plan = make_plan(
        model,
        checkpoint,
        format,
        ties=dict(model.all_tied_weights_keys),
        ignored=(*_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ())),
        names=conversions.renamed(model, checkpoint.files, format.tensor_names),
    )
    half = (*(model._keep_in_fp32_modules or ()),) if target_dtype == torch.float16 else ()
    refused = loader.load(
        model,
        checkpoint,
        plan,
        dtype=target_dtype,
        compute=compute,
        keep_fp32={*half, *(model._keep_in_fp32_modules_strict or ())},
        show_progress=progress,
    )
    _untie(model, plan.untied)
    model.config.quantization_config = described_now(described, format.method, refused)
    if (folder / "generation_config.json").exists():
        with _as_format_error(f"transformers cannot read {folder / 'generation_config.json'}"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.config._name_or_path = os.fspath(folder_or_id)
    _check_complete(model)
    if lm_head is not None:
        quantize_head(model, compute=lm_head)
    return model.eval()


def enable(compute: str = "w4a16") -> None:
    """Let the library's own ``from_pretrained`` load int4 folders through awqjit, until :func:`disable`.

    AWQ, GPTQ, compressed-tensors and AutoRound folders on their way to a CPU (or XPU) become what
    :func:`from_pretrained` makes of them; neither gptqmodel nor autoawq has to be installed. A load that names a
    ``quantization_config`` of another library, or another device, is left alone. In a form that awqjit does not read a
    folder is left to the library, with a warning. May be called again, to change ``compute``, and from any thread.

    Args:
        compute: "w4a16" or "w4a8". One load may differ: ``from_pretrained(..., quantization_config=AwqJitConfig(...))``
            with :class:`awqjit.integrations.transformers_quantizer.AwqJitConfig`.

    Raises:
        ArgumentError: ``compute`` is unknown.
        MissingDependencyError: transformers is not installed.
    """
    act_bits_of(compute)
    require_transformers()
    from awqjit.integrations import transformers_takeover

    transformers_takeover.take_over(compute)


def disable() -> None:
    """Undo :func:`enable`. Models that are loaded stay as they are."""
    require_transformers()
    from awqjit.integrations import transformers_takeover

    transformers_takeover.give_back()


def local_folder(folder_or_id: str | os.PathLike[str]) -> Path:
    """The folder itself, or a hub model's, downloaded."""
    folder = Path(folder_or_id).expanduser()
    text = os.fspath(folder_or_id)
    if folder.is_dir():
        return folder
    if isinstance(folder_or_id, Path) or text.startswith((".", "~", os.sep)) or text.count("/") > 1 or not text:
        raise FormatError(f"{text or repr(text)} is not a folder", "Give a folder, or the id of a model on the hub.")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        raise FormatError(f"{text} is neither a folder nor a hub model that can be fetched: {error}", "") from error


def described_now(described: dict[str, Any], method: str, refused: tuple[str, ...]) -> dict[str, Any]:
    """The quantization config of a model some of whose layers have become float, as that method's readers expect it."""
    changed = copy.deepcopy(described)
    if not refused:
        return changed
    if method == "gptq":
        changed["dynamic"] = {**(changed.get("dynamic") or {}), **{f"-:^{re.escape(name)}$": {} for name in refused}}
    elif method == "auto-round":
        changed["extra_config"] = {**(changed.get("extra_config") or {}), **{name: {"bits": 16} for name in refused}}
    else:
        key = "ignore" if method == "compressed-tensors" else "modules_to_not_convert"
        changed[key] = [*(changed.get(key) or ()), *refused]
    return changed


def _untie(model: Any, names: tuple[str, ...]) -> None:
    """Record that parameters which the config ties have weights of their own."""
    if not names:
        return
    for name in names:
        model.all_tied_weights_keys.pop(name, None)
    model.config.tie_word_embeddings = False
    kept = [name for name in names if name in dict(model.named_parameters())]
    if kept:
        warnings.warn(
            f"the config ties {', '.join(kept)} to the embeddings, but the checkpoint gives them weights of their own, "
            "which are used",
            AwqJitWarning,
            stacklevel=3,
        )


def _check_complete(model: nn.Module) -> None:
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    for path, module in model.named_modules():  # made on the meta device, but registered nowhere
        left += [f"{path}.{key}" for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
    if left:
        raise FormatError(f"no values for {', '.join(left[:20])}", "This model type is not supported.")
