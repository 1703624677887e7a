# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are not read: by name, and with what to do instead."""

from __future__ import annotations

from awqjit.errors import FormatError

REMEDY = (
    "Use an AWQ (version gemm) or GPTQ checkpoint of the model, or one of AutoRound or compressed-tensors "
    "(pack-quantized), with 4 bits; or quantize its float one (awqjit quantize)."
)
"""What can be done about any checkpoint that is not read."""

_REPACKED = f"It is laid out for one GPU kernel: go back to what it was made from. {REMEDY}"

_NOT_INT4 = f"Its weights are not groups of 4-bit integers. {REMEDY}"

REFUSALS: tuple[tuple[str, str], ...] = (
    ("marlin", _REPACKED),
    ("gptq_marlin", _REPACKED),
    ("awq_marlin", _REPACKED),
    ("marlin-24", _REPACKED),
    ("gemv_fast", _REPACKED),
    ("exllama", _REPACKED),
    ("exllamav2", _REPACKED),
    ("bitblas", _REPACKED),
    ("llm-awq", _REPACKED),
    ("ipex", _REPACKED),
    ("qqq", _REPACKED),
    ("bitsandbytes", _NOT_INT4),
    ("fp8", _NOT_INT4),
    ("fbgemm_fp8", _NOT_INT4),
    ("float-quantized", _NOT_INT4),
    ("int-quantized", _NOT_INT4),
    ("naive-quantized", _NOT_INT4),
    ("nvfp4-pack-quantized", _NOT_INT4),
    ("mxfp4-pack-quantized", _NOT_INT4),
    ("mxfp4", _NOT_INT4),
    ("aqlm", _NOT_INT4),
    ("hqq", _NOT_INT4),
    ("vptq", _NOT_INT4),
    ("exl3", _NOT_INT4),
    ("quip", _NOT_INT4),
    ("eetq", _NOT_INT4),
    ("gguf", f"Give the GGUF file to awqjit quantize. {REMEDY}"),
)
"""Names that configs give to methods and versions, and what to do about each. Any other name gets :data:`REMEDY`."""


def remedy_for(name: str) -> str:
    """What to do about a checkpoint of the method or version ``name``."""
    return dict(REFUSALS).get(name.rpartition(":")[2], REMEDY)


def refuse(what: str, name: str = "") -> FormatError:
    """The error for a checkpoint that is not read: what it is, and what to do about ``name``."""
    return FormatError(f"{what} is not read", remedy_for(name))
