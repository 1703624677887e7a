# SPDX-License-Identifier: Apache-2.0
"""A hundred thousand calls of the operators with arguments that are wrong in one or more ways, drawn at random.

Each call either is refused with an error that names what is wrong, or gives a result of the right shape and dtype.
Nothing else may happen: no crash, no error of Python's own, no memory of others read or written.
"""

from __future__ import annotations

import collections
import json
import math
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compilers
import pytest
import test_ops
import torch
from torch import Tensor

from awqjit import jit
from awqjit.errors import ArgumentError, AwqJitWarning, FormatError

CALLS, SEED = 100_000, 20
PROCESSES = 2

INTS = (0, 1, -1, 2, 7, 8, 15, 16, 17, 24, 25, 31, 32, 47, 48, 49, 64, 1 << 20, 1 << 30, 1 << 31, -(1 << 31), 1 << 32)
INTS += (1 << 62, (1 << 63) - 1, -(1 << 63))
BEYOND = (1 << 63, -(1 << 63) - 1, 1 << 64, 1 << 200)  # do not fit the operator's int64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)
DTYPES += (torch.int8, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn)
NOT_TENSORS = (None, 3, 2.5, "x", [1, 2], (), {}, b"x", float("nan"), object())


def _reshaped(tensor: Tensor, rng: random.Random) -> Tensor:
    size = [rng.choice((0, 1, 2, 3, 5, 16, 24, 47, 48, 49)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 3, 4)))]
    return torch.zeros(size).to(tensor.dtype)


def _one_dim_changed(tensor: Tensor, rng: random.Random) -> Tensor:
    if not tensor.dim():
        return tensor[None]
    dim = rng.randrange(tensor.dim())
    size = list(tensor.shape)
    size[dim] = max(0, size[dim] + rng.choice((-16, -8, -1, 1, 8, 16)))
    return torch.zeros(size).to(tensor.dtype)


def _restrided(tensor: Tensor, rng: random.Random) -> Tensor:
    if tensor.dim() < 2:
        return torch.stack([tensor] * 2, dim=-1)[..., rng.randrange(2)]
    kind = rng.randrange(5)
    if kind == 0:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == 1:
        return tensor[:, :1].expand(tensor.shape)  # strides of 0
    if kind == 2:
        return torch.cat([tensor] * 2, dim=-1)[..., : tensor.shape[-1]]
    if kind == 3:
        return torch.stack([tensor] * 2, dim=-1)[..., 0]
    return tensor.flip(0).transpose(0, -1)


def _moved(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.to("meta")


def _cast(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.real.to(rng.choice(DTYPES))


def _huge(tensor: Tensor, rng: random.Random) -> Tensor:
    """More elements than memory, in one row of it."""
    return tensor.reshape(-1)[:1].expand(1 << rng.choice((40, 50)), max(1, tensor.shape[-1] if tensor.dim() else 1))


def _other_values(tensor: Tensor, rng: random.Random) -> Tensor:
    if tensor.dtype.is_floating_point:
        return torch.full_like(tensor, rng.choice((math.nan, math.inf, -math.inf, 1e30, 1e-40, 0.0)))
    return torch.full_like(tensor, rng.choice((0, 15, 16, 47, 48, 127)))


def _exotic(tensor: Tensor, rng: random.Random) -> Tensor:
    kind = rng.randrange(5)
    if kind == 0 and tensor.dtype.is_floating_point:
        return tensor.detach().clone().requires_grad_()
    if kind == 1:
        return tensor.to_sparse()
    if kind == 2:
        return torch.nn.Parameter(tensor.clone(), requires_grad=False)
    if kind == 3:
        return tensor.clone().reshape(-1)[1:]  # starts off the alignment
    return tensor.new_empty(0)


TENSOR_FAULTS: tuple[Callable[[Tensor, random.Random], Tensor], ...] = (
    _reshaped,
    _one_dim_changed,
    _restrided,
    _moved,
    _cast,
    _huge,
    _other_values,
    _exotic,
)

INT_ARGUMENTS = {"in_features", "out_features", "group_size", "act_bits", "layout"}


def spoiled(name: str, value: Any, rng: random.Random) -> Any:
    """A value that may or may not do instead of a right one."""
    if name in INT_ARGUMENTS:
        kind = rng.random()
        if kind < 0.9:
            return rng.choice(INTS) if kind < 0.7 else value + rng.choice((-16, -8, -1, 1, 8, 16))
        return rng.choice(BEYOND) if kind < 0.95 else rng.choice(NOT_TENSORS)
    if rng.random() < 0.05:
        return rng.choice(NOT_TENSORS)
    if value is None:  # an optional tensor
        value = rng.choice((torch.zeros(48, dtype=torch.int32), torch.arange(48, dtype=torch.int32), torch.zeros(24)))
    return rng.choice(TENSOR_FAULTS)(value, rng)


def is_clear(error: Exception, operator: str) -> bool:
    """Whether an error tells its reader what to change: ours does, and so do torch's own about types and memory."""
    if isinstance(error, (ArgumentError, FormatError)):
        return "got" in str(error) or "wanted" in str(error) or isinstance(error, FormatError)
    text = str(error)
    return isinstance(error, (TypeError, RuntimeError)) and (
        # the dispatcher's, of an argument that the schema has no place for
        f"awqjit::{operator}() Expected a value of type" in text
        or (f"awqjit::{operator}" in text and "argument" in text)
        or "memory: you tried to allocate" in text
        or "Storage size calculation overflowed" in text
    )


def checked(operator: str, given: dict[str, Any], result: Any) -> bool:
    """Whether an accepted call's result is of the right form."""
    if operator in ("int4_mm", "int4_linear"):
        x = given["x"]
        return result.dtype == x.dtype and result.shape == (*x.shape[:-1], given["out_features"])
    if operator == "int4_mm_backward":
        grad = given["grad"]
        return result.dtype == grad.dtype and result.shape == (*grad.shape[:-1], given["in_features"])
    return all(isinstance(one, Tensor) for one in result)


def fuzz(calls: int, seed: int) -> dict[str, Any]:
    """Make the calls; how many ended how, and what should not have happened."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    good = {name: make() for name, make in test_ops.GOOD.items()}
    good["int4_mm_w4a8"] = test_ops.mm_arguments(act_bits=8)
    names = ["int4_mm"] * 4 + ["int4_mm_w4a8"] * 3 + ["int4_linear"] * 2 + ["int4_mm_backward", "pack"] * 1
    names += ["pack_awq", "unpack"]
    wanted = test_ops.OPS.int4_mm(*good["int4_mm"].values()), test_ops.OPS.int4_mm(*good["int4_mm_w4a8"].values())
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    # The kernels of the right calls are there; what else turns out to be possible runs in plain torch, not compiled.
    os.environ["AWQJIT_CXX"] = "/nonexistent/compiler"
    for _ in range(calls):
        name = rng.choice(names)
        operator = "int4_mm" if name == "int4_mm_w4a8" else name
        given = dict(good[name])
        for argument in rng.sample(sorted(given), rng.choice((1, 1, 1, 2, 2, 3))):
            given[argument] = spoiled(argument, given[argument], rng)
        try:
            result = getattr(test_ops.OPS, operator)(*given.values())
        except Exception as error:
            clear, ended = is_clear(error, operator), f"{type(error).__name__}: {error}"
            counts[type(error).__name__] += 1
        else:
            clear, ended = checked(operator, given, result), f"gave {_shown(result)}"
            counts["accepted"] += 1
        if not clear and len(wrong) < 20:
            shown = {key: _shown(value) for key, value in given.items()}
            wrong.append(f"{operator}({shown}): {ended}")
    again = test_ops.OPS.int4_mm(*good["int4_mm"].values()), test_ops.OPS.int4_mm(*good["int4_mm_w4a8"].values())
    if not all(map(torch.equal, wanted, again)):
        wrong.append("the right calls give other bits than before")
    return {"counts": counts, "wrong": wrong}


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {list(value.shape)} on {value.device}, {value.layout}"


def main(calls: int, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AwqJitWarning)
        warnings.simplefilter("ignore", UserWarning)
        print(json.dumps(fuzz(calls, seed)))


@pytest.mark.skipif(not compilers.REAL, reason="no g++ or clang++")
def test_a_hundred_thousand_wrong_calls_are_refused_clearly_or_answered() -> None:
    for act_bits in (16, 8):
        test_ops.OPS.int4_mm(*test_ops.mm_arguments(act_bits=act_bits).values())  # fills the cache
    assert {choice.origin for choice in jit.choices()} <= {"built", "cache"}
    # In processes of their own: a crash is then a result, and there is a core for each.
    runs = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", f"import test_fuzz_ops as f; f.main({CALLS // 2}, {seed})"],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(SEED, SEED + PROCESSES)
    ]
    total: collections.Counter[str] = collections.Counter()
    for one in runs:
        out, errors = one.communicate(timeout=400)
        assert one.returncode == 0, errors
        answer = json.loads(out.splitlines()[-1])
        assert answer["wrong"] == []
        total.update(answer["counts"])
    assert sum(total.values()) == CALLS
    assert total["ArgumentError"] > CALLS // 3
    assert total["accepted"] > CALLS // 50  # the draw is not so wild that the first check stops every call
