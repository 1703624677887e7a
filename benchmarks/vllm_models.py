# SPDX-License-Identifier: Apache-2.0
"""Whole models in vLLM's real engine: with the plugin, with vLLM's own kernels, and with its W4A8 operator forced in.

    python -m benchmarks.vllm_models --python PATH [--quick] [--models qwen2-0.5b qwen2-1.5b] [--output FILE]

PATH is the Python of an environment with vLLM and awqjit (docs/vllm.md). Each contender is an engine in a process of
its own, compiled as vLLM does by default; they take turns in the same rounds, and all but the one at work are idle.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from awqjit import progress
from awqjit.cli import demo_weights
from benchmarks.common import interleave, print_stamp, print_table, stamp, summary, write_result
from benchmarks.random_model import SHAPES, random_folder

BATCHES = (1, 8)


@dataclass(frozen=True)
class Contender:
    """An engine's settings.

    Attributes:
        label: what tables call it.
        variables: environment variables on top of the caller's.
        force_w4a8: vLLM's own W4A8 operator on a CPU where it does not pick it.
    """

    label: str
    variables: dict[str, str]
    force_w4a8: bool = False


OWN = {"VLLM_DISABLED_KERNELS": "AwqJitLinearKernel"}
CONTENDERS: tuple[Contender, ...] = (
    Contender("awqjit w4a8 (default)", {}),
    Contender("awqjit w4a16", {"VLLM_CPU_INT4_W4A8": "0"}),
    Contender("vLLM's own", OWN),
    Contender("vLLM's own, W4A8 forced", OWN, force_w4a8=True),
)
STOCK, FORCED = CONTENDERS[2].label, CONTENDERS[3].label


class Engine:
    """The process of one contender."""

    def __init__(self, contender: Contender, python: str, folder: Path, log: Path) -> None:
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "AWQJIT_K"))}
        settings = {"folder": str(folder), "dtype": "bfloat16", "force_w4a8": contender.force_w4a8}
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                [python, str(Path(__file__).with_name("vllm_worker.py")), json.dumps(settings)],
                env=inherited
                | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
                | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for a look at the layers of its own model
                | contender.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended, its log ({self.log}):\n{self.log.read_text()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(folder: Path, python: str, logs: Path, prefill: int, decode: int, rounds: int) -> dict[str, Any]:
    """All contenders of one model."""
    engines: dict[str, Engine] = {}
    try:
        with progress.bar("starting engines", len(CONTENDERS)) as step:
            for number, contender in enumerate(CONTENDERS):
                engines[contender.label] = Engine(contender, python, folder, logs / f"{folder.name}-{number}.log")
                step()
        request = {"prefill": prefill, "decode": decode, "batches": BATCHES, "seed": 0}
        for engine in engines.values():
            engine.measure(request | {"decode": 2})  # what is compiled or allocated on first use
        with progress.bar("rounds", rounds * len(engines)) as step:
            timed = interleave(
                {label: lambda engine=engine: engine.measure(request) for label, engine in engines.items()},
                rounds,
                step,
            )
        found = {}
        for label, runs in timed.items():
            found[label] = {
                "kernels": engines[label].ready["kernels"],
                "threads": engines[label].ready["threads"],
                "load_seconds": engines[label].ready["load_seconds"],
                "prefill_seconds": summary([run["prefill"] for run in runs]),
                "decode_seconds_per_step": {
                    str(batch): summary([run["decode"][str(batch)] for run in runs]) for batch in BATCHES
                },
                "tokens": runs[0]["tokens"],
            }
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "folder": folder.name,
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "rounds": rounds,
        "head": "float",
        "contenders": found,
        "ratios": ratios(found),
    }


def _seconds(row: dict[str, Any], phase: str) -> float:
    """Median seconds of a prefill, or of a decoding step."""
    times = row["prefill_seconds"] if phase == "prefill" else row["decode_seconds_per_step"][phase.split()[1]]
    median: float = times["median"]
    return median


PHASES = ("prefill", *(f"decode {batch}" for batch in BATCHES))


def ratios(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Speed of each contender relative to each of vLLM's own two, by medians."""
    return {
        f"{label} / {base}": {phase: _seconds(found[base], phase) / _seconds(found[label], phase) for phase in PHASES}
        for label in found
        for base in (STOCK, FORCED)
        if label not in (STOCK, FORCED)
    }


def show(name: str, result: dict[str, Any]) -> None:
    rows = []
    for label, row in result["contenders"].items():
        speeds = [result["prefill_tokens"] / _seconds(row, "prefill")]
        speeds += [batch / _seconds(row, f"decode {batch}") for batch in BATCHES]
        rows.append((label, *(f"{speed:.1f}" for speed in speeds), f"{row['load_seconds']:.0f}", str(row["kernels"])))
    print_table(
        f"{name} in vLLM: tokens/s, median of {result['rounds']} rounds",
        (
            "contender",
            f"prefill {result['prefill_tokens']}",
            *(f"decode, batch {b}" for b in BATCHES),
            "load, s",
            "kernels",
        ),
        rows,
    )
    print_table(
        f"{name}: relative speed",
        ("contenders", *PHASES),
        [(pair, *row.values()) for pair, row in result["ratios"].items()],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="Python of an environment with vLLM and awqjit")
    parser.add_argument("--quick", action="store_true", help="the smaller model, 2 rounds; writes no result by default")
    parser.add_argument("--models", nargs="+", choices=SHAPES, help="default: all")
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--prefill", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--decode", type=int, default=32, help="tokens (default: 32)")
    parser.add_argument("--directory", type=Path, help="where the random models are kept (default: the demo's cache)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    directory = options.directory or demo_weights.models_directory()
    directory.mkdir(parents=True, exist_ok=True)
    before = stamp()
    results = {}
    for name in options.models or (list(SHAPES)[:1] if options.quick else SHAPES):
        folder = random_folder(name, directory)
        rounds = options.rounds or (2 if options.quick else 5)
        results[name] = measure(folder, options.python, directory, options.prefill, options.decode, rounds)
        show(name, results[name])
    after = stamp()
    print_stamp(before, after)
    if options.output or not options.quick:
        payload = {"machine": before, "machine_after": after, "models": results}
        print(f"written: {write_result('vllm', payload, options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
