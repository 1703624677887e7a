# SPDX-License-Identifier: Apache-2.0
"""`generate` of the transformers library on one AWQ folder: awqjit beside what transformers itself runs on a CPU.

    python -m benchmarks.generate --python PATH [--quick] [--rounds N] [--tokens N] [--directory FOLDER] [--output FILE]

PATH is the Python of an environment with transformers and gptqmodel, which transformers asks for to load an AWQ folder;
the layer class that it picks there by default is recorded. Contenders are processes of their own, each with the same
model of Qwen2-0.5B's shape in bf16, loaded by ``AutoModelForCausalLM.from_pretrained``; they take turns in the same
rounds, and all but the one at work are idle. Batch 1, greedy, the library's default cache, nothing compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awqjit import progress
from awqjit.cli import demo_weights
from benchmarks.common import interleave, print_stamp, print_table, stamp, summary, write_result
from benchmarks.loading import ENVIRONMENT, PROMPT, TOP
from benchmarks.random_model import random_folder

MODEL = "qwen2-0.5b"
TARGET = 5.0
"""Smallest acceptable ratio of awqjit's tokens per second (w4a16, the default) to transformers' own."""

_CHILD = """
import json, os, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries print what they like
import torch, transformers
{setup}
folder, prompt, top, tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
ids = torch.tensor([prompt])
with torch.inference_mode():
    likeliest = model(ids, use_cache=False).logits[0, -1].topk(top).indices.tolist()
layer = type(model.model.layers[0].mlp.down_proj).__name__
print(json.dumps({{"likeliest": likeliest, "layer": layer, "versions": versions}}), file=answers, flush=True)
options = {{"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}}
for line in sys.stdin:
    start = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    seconds = time.perf_counter() - start
    print(json.dumps({{"seconds": seconds, "tokens": out[0, ids.shape[1]:].tolist()}}), file=answers, flush=True)
"""

_OURS = """
import awqjit
from awqjit.integrations.transformers import enable
enable("{compute}")
versions = {{m.__name__: m.__version__ for m in (torch, transformers, awqjit)}}
"""
_THEIRS = """
import gptqmodel
versions = {m.__name__: m.__version__ for m in (torch, transformers, gptqmodel)}
"""

STOCK = "transformers + gptqmodel"


@dataclass(frozen=True)
class Contender:
    """What a process runs before it loads the model; ``python`` is None where it is this one's."""

    label: str
    setup: str
    python: str | None = None


class Process:
    """One contender at work, or waiting."""

    def __init__(self, contender: Contender, folder: Path, tokens: int, work: Path) -> None:
        self.label = contender.label
        self.log = work / f"{contender.label.replace(' ', '-')}.log"
        script = self.log.with_suffix(".py")  # a file: some libraries start processes that import it again
        script.write_text(_CHILD.format(setup=contender.setup), encoding="utf-8")
        root = str(Path(__file__).parents[1])
        self.process = subprocess.Popen(
            [contender.python or sys.executable, str(script), str(folder), json.dumps(PROMPT), str(TOP), str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=os.environ | ENVIRONMENT | ({"PYTHONPATH": root} if contender.python is None else {}),
            text=True,
        )
        self.loaded = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(f"{self.label} failed ({self.process.returncode}):\n{self.log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self) -> dict[str, Any]:
        """Seconds and tokens of one call."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def same_start(one: list[int], other: list[int]) -> int:
    """How many tokens two answers share from the first on: rounding may part them later."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, metavar="PATH", help="of an environment with gptqmodel")
    parser.add_argument("--quick", action="store_true", help="2 blocks, 2 rounds; writes no result by default")
    parser.add_argument("--rounds", type=int, help="calls of each contender (default: 5)")
    parser.add_argument("--tokens", type=int, help="new tokens of a call (default: 64)")
    parser.add_argument("--directory", type=Path, help="where the random model is kept (default: the demo's cache)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 5)
    tokens = options.tokens or (8 if options.quick else 64)
    directory = options.directory or demo_weights.models_directory()
    directory.mkdir(parents=True, exist_ok=True)
    folder = random_folder(MODEL, directory, 2 if options.quick else None)
    contenders = (
        Contender("awqjit w4a16", _OURS.format(compute="w4a16")),
        Contender("awqjit w4a8", _OURS.format(compute="w4a8")),
        Contender(STOCK, _THEIRS, options.python),
    )
    processes: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="awqjit-generate-") as work:
        try:
            for contender in contenders:
                processes.append(Process(contender, folder, tokens, Path(work)))
            calls = {process.label: process.generate for process in processes}
            interleave(calls, 1)  # compiles kernels, packs what is packed at the first call: not counted
            before = stamp()
            with progress.bar("generating", rounds * len(calls)) as step:
                results = interleave(calls, rounds, step)
            after = stamp()
        finally:
            for process in processes:
                process.close()
    stock = results[STOCK][0]["tokens"]
    found: dict[str, Any] = {}
    for process in processes:
        runs = results[process.label]
        found[process.label] = {
            "seconds": summary([run["seconds"] for run in runs]),
            "tokens_per_second": summary([tokens / run["seconds"] for run in runs]),
            "layer": process.loaded["layer"],
            "versions": process.loaded["versions"],
            "likeliest_first_tokens": process.loaded["likeliest"],
            "first_token": runs[0]["tokens"][0],
            "tokens_like_stock": same_start(runs[0]["tokens"], stock),
        }
    ratios = {
        label: row["tokens_per_second"]["median"] / found[STOCK]["tokens_per_second"]["median"]
        for label, row in found.items()
        if label != STOCK
    }
    print_table(
        f"{MODEL}, greedy, {len(PROMPT)} tokens in, {tokens} out: median (most) of {rounds}",
        ("contender", "layer", "tokens/s", "of transformers' own", "first tokens alike"),
        [
            (
                label,
                row["layer"],
                f"{row['tokens_per_second']['median']:.1f} ({row['tokens_per_second']['max']:.1f})",
                f"{ratios[label]:.1f}x" if label in ratios else "1",
                str(row["tokens_like_stock"]),
            )
            for label, row in found.items()
        ],
    )
    print_stamp(before, after)
    met = ratios["awqjit w4a16"] >= TARGET
    print(f"wanted: {TARGET:.0f}x in w4a16: {'met' if met else 'MISSED'}")
    if options.output or not options.quick:
        payload = {
            "machine": before,
            "machine_after": after,
            "folder": folder.name,
            "prompt_tokens": len(PROMPT),
            "new_tokens": tokens,
            "rounds": rounds,
            "contenders": found,
            "ratios": ratios,
            "target": TARGET,
            "met": met,
        }
        print(f"written: {write_result('generate', payload, options.output)}")
    likeliest = found["awqjit w4a16"]["likeliest_first_tokens"]
    wrong = [label for label, row in found.items() if row["first_token"] not in likeliest]
    if wrong:
        print(f"another first token than awqjit's {likeliest}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
