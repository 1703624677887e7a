# SPDX-License-Identifier: Apache-2.0
"""Whole models: awqjit's w4a16 and w4a8 beside the same weights dequantized to bf16 in plain torch, in one run.

    python -m benchmarks.models [--quick] [--models smollm2 qwen2-1.5b] [--modes eager compiled frozen] [--output FILE]

Batch 1, a static cache, greedy length: a prefill of 512 tokens, then decoding token by token. The head is float in
every contender. Eager, compiled (`torch.compile` of the whole model) and frozen (the same with inductor's freezing,
which packs float weights ahead: the fastest that dense torch gets) contenders take turns in the same rounds.
Their logits, of the prefill's last token and of every decoded one, are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setuptools  # noqa: F401  (before anything imports distutils, which torch.compile's back end would trip over)
import torch
from torch import nn

import awqjit
from awqjit import jit, progress
from awqjit.cli import demo_weights
from awqjit.integrations.transformers import require_transformers
from benchmarks.common import (
    MODES,
    interleave,
    print_stamp,
    print_table,
    relative_error,
    stamp,
    summary,
    write_result,
)
from benchmarks.random_model import NAME as LARGE
from benchmarks.random_model import large_folder

DENSE = "dense bf16"
KINDS = ("eager", "compiled", "frozen")
TOLERANCE = {"w4a16": 0.05, "w4a8": 0.10}
"""Largest relative error of the logits against the dense model in bf16, whose own rounding is of the same size."""

# Smallest acceptable speed relative to dense, the fastest kind on either side.
TARGETS = {"smollm2": {"decode": 1.5}, LARGE: {"decode": 2.0, "prefill w4a8": 1.0}}


@dataclass(frozen=True)
class Workload:
    """Token counts of one measurement; the tokens are random, and the same for all contenders."""

    prompt: torch.Tensor  # int64 [1, prefill]
    following: torch.Tensor  # int64 [1, decode]

    @classmethod
    def make(cls, vocabulary: int, prefill: int, decode: int) -> Workload:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocabulary, (1, prefill + decode), generator=generator)
        return cls(tokens[:, :prefill], tokens[:, prefill:])


class Contender:
    """One model in one mode, with a static cache of its own that every run starts over."""

    def __init__(self, model: Any, workload: Workload, kind: str) -> None:
        self.model, self.workload = model, workload
        transformers = require_transformers("benchmarking models")
        length = workload.prompt.shape[1] + workload.following.shape[1]
        config = model.config
        self.cache = transformers.StaticCache(config=config, max_cache_len=length)
        # Made ahead: a cache that the first call makes would be compiled into a graph that no later call can use.
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(1, config.num_key_value_heads, head, torch.bfloat16, torch.device("cpu"))
        self.call: Callable[..., Any] = model
        if kind != "eager":
            # Two static graphs, prefill and decode; a whole graph each, or an error.
            options: Any = {"freezing": kind == "frozen"}
            self.call = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        # The argument's name changed within transformers 5.
        names = inspect.signature(model.model.forward).parameters
        self.argument = "cache" if "cache" in names else "past_key_values"

    def step(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Logits [1, vocabulary] of the last of ``tokens``, which start at ``position``."""
        positions = torch.arange(position, position + tokens.shape[1]).unsqueeze(0)
        output = self.call(input_ids=tokens, position_ids=positions, logits_to_keep=1, **{self.argument: self.cache})
        return output.logits[:, -1]

    @torch.inference_mode()
    def run(self) -> tuple[float, float, torch.Tensor]:
        """Seconds of the prefill, seconds of all decoding steps, logits [1 + decode, vocabulary] in bf16."""
        self.cache.reset()
        prompt, following = self.workload.prompt, self.workload.following
        start = time.perf_counter()
        logits = [self.step(prompt, 0)]
        middle = time.perf_counter()
        for i in range(following.shape[1]):
            logits.append(self.step(following[:, i : i + 1], prompt.shape[1] + i))
        end = time.perf_counter()
        return middle - start, end - middle, torch.cat(logits)


def dense_model(folder: Path) -> Any:
    """The folder's model with every int4 layer dequantized to an ``nn.Linear`` in bf16."""
    model = awqjit.from_pretrained(folder, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if not isinstance(module, awqjit.Int4Linear):
            continue
        linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        weight = module.quantized().dequantize(torch.bfloat16).T.contiguous()
        linear.weight = nn.Parameter(weight, requires_grad=False)
        bias = module.get_parameter("bias") if module.bias is not None else None
        if bias is not None:
            linear.bias = nn.Parameter(bias.to(torch.bfloat16), requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)
    return model


def smollm2_folder(directory: Path) -> Path:
    """The demo's model: real weights at group size 32. ``directory`` is not used: the demo keeps them in its cache."""
    return demo_weights.prepare()


FOLDERS: dict[str, Callable[[Path], Path]] = {"smollm2": smollm2_folder, LARGE: large_folder}


def measure(name: str, folder: Path, kinds: list[str], prefill: int, decode: int, rounds: int) -> dict[str, Any]:
    """All contenders of one model: errors first, then times."""
    models = {DENSE: dense_model(folder)}
    for mode in MODES:
        models[mode] = awqjit.from_pretrained(folder, dtype=torch.bfloat16, compute=mode)
        jit.warm(models[mode])
    workload = Workload.make(models[DENSE].config.vocab_size, prefill, decode)
    # Dynamo keeps the graphs of all contenders under one code object, two for each.
    torch._dynamo.config.recompile_limit = max(8, 2 * len(models) * len(kinds))
    contenders: dict[str, Contender] = {}
    warm_up: dict[str, float] = {}
    errors: dict[str, float] = {}
    reference = torch.empty(0)  # the first contender's logits: dense, in the first kind
    with progress.bar(f"{name}: first runs", len(kinds) * len(models)) as step:
        for kind in kinds:
            for label, model in models.items():
                key = f"{label}, {kind}"
                contenders[key] = Contender(model, workload, kind)
                start = time.perf_counter()
                contenders[key].run()
                warm_up[key] = time.perf_counter() - start
                _, _, logits = contenders[key].run()
                reference = reference if reference.numel() else logits
                errors[key] = relative_error(logits, reference)
                step()
    with (
        torch._dynamo.config.patch(error_on_recompile=True),  # no round may hold the time of a compilation
        progress.bar(f"{name}: rounds", rounds * len(contenders)) as step,
    ):
        timed = interleave({key: contender.run for key, contender in contenders.items()}, rounds, step)
    found: dict[str, Any] = {}
    for key, runs in timed.items():
        label = key.partition(",")[0]
        bound = TOLERANCE.get(label, TOLERANCE["w4a16"])
        error = max(errors[key], relative_error(runs[-1][2], reference))
        found[key] = {
            "prefill_seconds": summary([run[0] for run in runs]),
            "decode_seconds_per_token": summary([run[1] / decode for run in runs]),
            "first_run_seconds": warm_up[key],
            "logits_error": error,
            "logits_tolerance": bound,
            "right": error <= bound,  # False for NaN too
        }
    return {
        "folder": folder.name,
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "rounds": rounds,
        "batch": 1,
        "cache": "static",
        "head": "float",
        "contenders": found,
        "ratios": ratios(found, name, kinds),
    }


def ratios(found: dict[str, Any], name: str, kinds: list[str]) -> dict[str, Any]:
    """Speed relative to dense by medians: in each kind, and the fastest kind of either side."""

    def best(label: str, what: str, among: list[str]) -> float:
        return min(found[f"{label}, {kind}"][what]["median"] for kind in among)

    result: dict[str, Any] = {}
    for mode in MODES:
        for phase, what in (("prefill", "prefill_seconds"), ("decode", "decode_seconds_per_token")):
            row = {kind: best(DENSE, what, [kind]) / best(mode, what, [kind]) for kind in kinds}
            row["best"] = best(DENSE, what, kinds) / best(mode, what, kinds)
            targets = TARGETS.get(name, {})
            target = targets.get(f"{phase} {mode}", targets.get(phase))
            if target is not None:
                row |= {"target": target, "met": row["best"] >= target}
            result[f"{phase} {mode}"] = row
    return result


def show(name: str, result: dict[str, Any], kinds: list[str]) -> None:
    prefill, decode = result["prefill_tokens"], result["decode_tokens"]
    rows = []
    for key, row in result["contenders"].items():
        first, later = row["prefill_seconds"], row["decode_seconds_per_token"]
        rows.append(
            (
                key,
                f"{prefill / first['median']:.1f} ({prefill / first['min']:.1f})",
                f"{1 / later['median']:.1f} ({1 / later['min']:.1f})",
                row["logits_error"],
                "yes" if row["right"] else "NO",
                f"{row['first_run_seconds']:.1f}",
            )
        )
    print_table(
        f"{name}: tokens/s, median (best) of {result['rounds']} rounds; batch 1, static cache, float head",
        ("contender", f"prefill {prefill}", f"decode {decode}", "logits error", "right", "first run, s"),
        rows,
    )
    print_table(
        f"{name}: speed relative to dense bf16",
        ("phase and mode", *kinds, "best of each", "target", "met"),
        [
            (phase, *(row[kind] for kind in kinds), row["best"], row.get("target", ""), met(row))
            for phase, row in result["ratios"].items()
        ],
    )


def met(row: dict[str, Any]) -> str:
    return "" if "met" not in row else "yes" if row["met"] else "no"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="SmolLM2, eager, few tokens; writes no result by default")
    parser.add_argument("--models", nargs="+", choices=FOLDERS, help="models (default: all)")
    parser.add_argument("--modes", nargs="+", choices=KINDS, help="default: all")
    parser.add_argument("--rounds", type=int, help="timed runs of each contender (default: 7)")
    parser.add_argument("--prefill", type=int, help="tokens (default: 512)")
    parser.add_argument("--decode", type=int, help="tokens (default: 64)")
    parser.add_argument("--directory", type=Path, help="where the random model is kept (default: the demo's cache)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args()
    quick = options.quick
    names = options.models or (["smollm2"] if quick else list(FOLDERS))
    kinds = options.modes or (["eager"] if quick else list(KINDS))
    rounds = options.rounds or (2 if quick else 7)
    prefill = options.prefill or (32 if quick else 512)
    decode = options.decode or (4 if quick else 64)
    directory = options.directory or demo_weights.models_directory()
    directory.mkdir(parents=True, exist_ok=True)

    before = stamp()
    results: dict[str, Any] = {}
    for name in names:
        folder = FOLDERS[name](directory)
        results[name] = measure(name, folder, kinds, prefill, decode, rounds)
        show(name, results[name], kinds)
        torch._dynamo.reset()  # compiled graphs keep the models alive
    after = stamp()
    print_stamp(before, after)
    if options.output or not quick:
        payload = {"machine": before, "machine_after": after, "models": results}
        print(f"written: {write_result('models', payload, options.output)}")
    wrong = [
        f"{name}: {key}"
        for name, result in results.items()
        for key, row in result["contenders"].items()
        if not row["right"]
    ]
    if wrong:
        print(f"wrong logits: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
