# SPDX-License-Identifier: Apache-2.0
"""Loading a model: seconds and peak memory of awqjit, transformers with GPTQModel, and vLLM, on one AWQ folder.

    python -m benchmarks.loading [--python gptqmodel=PYTHON] [--python vllm=PYTHON] [--python awqjit=PYTHON]
                                 [--quick] [--rounds N] [--directory FOLDER] [--output FILE]

Each load is a fresh process, in the environment whose interpreter the options name (awqjit's is this one's by default;
a contender without an option does not run). Contenders take turns, round by round. Memory is the kernel's own count of
the process's largest resident set (VmHWM), libraries and mapped files included, read after loading and again after the
first token: some contenders go on preparing weights in their first run, so that "load" alone compares little, and the
time from the start of the process to the first token all. Their first tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from awqjit import config, progress
from awqjit.cli import demo_weights
from benchmarks.common import interleave, print_stamp, print_table, stamp, summary, write_result
from benchmarks.random_model import large_folder

ROOT = Path(__file__).parents[1]
PROMPT = (1, 17, 99, 4, 56, 23, 120, 64)
TOP = 5
"""Each contender's next token has to be among this many of awqjit's likeliest: rounding may swap neighbours."""

PHASES = ("start", "import", "load", "first")
"""From the start of the process to its first token: the interpreter, imports, the model, one pass."""

COMPARED = ("load_seconds", "ready_seconds", "total_seconds", "load_peak_bytes", "peak_bytes")
"""Ready: loaded, and the first token computed. Total: from the start of the process."""

# What comes before and after each contender's own code. IMPORT, LOAD and FIRST set `tokens`, likeliest first.
_CHILD = """
import json, sys, time

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))

if __name__ == "__main__":
    folder, prompt, top = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    started, start = float(sys.argv[4]), time.perf_counter()
{import_}
    imported = time.perf_counter()
    imported_bytes = memory("VmHWM")
{load}
    loaded = time.perf_counter()
    loaded_bytes = memory("VmHWM")
{first}
    end = time.perf_counter()
    print("RESULT " + json.dumps({{
        "start_seconds": start - started,
        "import_seconds": imported - start, "load_seconds": loaded - imported, "first_seconds": end - loaded,
        "import_bytes": imported_bytes, "load_peak_bytes": loaded_bytes, "peak_bytes": memory("VmHWM"),
        "resident_bytes": memory("VmRSS"), "tokens": tokens, "versions": versions,
    }}), flush=True)
"""

_TORCH_FIRST = """
with torch.inference_mode():
    logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
tokens = logits.topk(top).indices.tolist()
"""

# name -> (import, load, first token). Libraries that import a model's classes, or their own, when they are first named
# are made to do so as part of the import.
CONTENDERS: dict[str, tuple[str, str, str]] = {
    "awqjit": (
        "import torch, transformers, awqjit\n"
        "transformers.AutoModelForCausalLM, transformers.Qwen2ForCausalLM\n"
        "versions = {m.__name__: m.__version__ for m in (torch, transformers, awqjit)}",
        "model = awqjit.from_pretrained(folder, dtype=torch.bfloat16, progress=False)",
        _TORCH_FIRST,
    ),
    "gptqmodel": (
        "import torch, transformers, gptqmodel\n"
        "transformers.AutoModelForCausalLM, transformers.Qwen2ForCausalLM\n"
        "versions = {m.__name__: m.__version__ for m in (torch, transformers, gptqmodel)}",
        "model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)",
        _TORCH_FIRST,
    ),
    "vllm": (
        "import torch, transformers, vllm\n"
        "vllm.LLM, vllm.SamplingParams\n"
        "import vllm.model_executor.models.qwen2\n"
        "versions = {m.__name__: m.__version__ for m in (torch, transformers, vllm)}",
        # Eager, and the smallest cache that holds the prompt: what is left is the model.
        "model = vllm.LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype='bfloat16', max_model_len=64,\n"
        "                 max_num_seqs=1, kv_cache_memory_bytes=32 << 20)",
        "sampling = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)\n"
        "tokens = list(model.generate({'prompt_token_ids': prompt}, sampling, use_tqdm=False)[0].outputs[0].token_ids)",
    ),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its memory is seen
    "VLLM_LOGGING_LEVEL": "ERROR",
    "GPTQMODEL_CPU_WORKERS": "2",  # its own default on two cores, 1, is refused by its thread pool
}


def child_source(name: str) -> str:
    parts = [part.strip().replace("\n", "\n    ") for part in CONTENDERS[name]]
    import_, load, first = ("    " + part for part in parts)
    return _CHILD.format(import_=import_, load=load, first=first)


def run(name: str, python: str, folder: Path, cache: Path) -> dict[str, Any]:
    """One load in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="awqjit-loading-") as work:
        script = Path(work) / f"load_{name}.py"  # a file: some libraries start processes that import it again
        script.write_text(child_source(name), encoding="utf-8")
        done = subprocess.run(
            [python, str(script), str(folder), json.dumps(PROMPT), str(TOP), repr(time.perf_counter())],
            cwd=work,
            env=os.environ | ENVIRONMENT | {config.CACHE_DIR.name: str(cache)},
            capture_output=True,
            text=True,
            timeout=1800,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{name} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def digest(runs: list[dict[str, Any]], folder_bytes: int) -> dict[str, Any]:
    """Medians, minima and maxima of one contender's rounds."""
    seconds = tuple(f"{part}_seconds" for part in PHASES)
    measured = (*seconds, "import_bytes", "load_peak_bytes", "peak_bytes")
    found: dict[str, Any] = {key: summary([one[key] for one in runs]) for key in (*measured, "resident_bytes")}
    found["ready_seconds"] = summary([one["load_seconds"] + one["first_seconds"] for one in runs])
    found["total_seconds"] = summary([sum(one[name] for name in seconds) for one in runs])
    found["peak_over_folder"] = found["peak_bytes"]["median"] / folder_bytes
    return found | {"versions": runs[0]["versions"], "tokens": [one["tokens"] for one in runs]}


def compare(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """awqjit's medians over each other contender's: at most 1 is wanted, of time and of memory."""
    ours = found["awqjit"]
    return {
        name: {
            key: {"ratio": ratio, "target": 1.0, "met": ratio <= 1.0}
            for key in COMPARED
            for ratio in [ours[key]["median"] / theirs[key]["median"]]
        }
        for name, theirs in found.items()
        if name != "awqjit"
    }


def show(found: dict[str, dict[str, Any]], ratios: dict[str, Any], folder_bytes: int, rounds: int) -> None:
    def cell(row: dict[str, Any], unit: float = 1) -> str:
        return f"{row['median'] / unit:.2f} ({row['min'] / unit:.2f})"

    print_table(
        f"Loading {folder_bytes / 1e9:.2f} GB in fresh processes: median (least) of {rounds}, files in the page cache",
        (
            "contender",
            "import, s",
            "load, s",
            "first token, s",
            "all, s",
            "peak, loaded, GB",
            "peak, GB",
            "peak / folder",
        ),
        [
            (
                name,
                cell(row["import_seconds"]),
                cell(row["load_seconds"]),
                cell(row["first_seconds"]),
                cell(row["total_seconds"]),
                cell(row["load_peak_bytes"], 1e9),
                cell(row["peak_bytes"], 1e9),
                f"{row['peak_over_folder']:.2f}",
            )
            for name, row in found.items()
        ],
    )
    print_table(
        "awqjit relative to the others, by medians",
        ("what", *ratios),
        [
            (what, *(f"{row[what]['ratio']:.2f} {'met' if row[what]['met'] else 'MISSED'}" for row in ratios.values()))
            for what in COMPARED
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 blocks, 2 rounds; writes no result by default")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, help="loads of each contender (default: 5)")
    parser.add_argument("--directory", type=Path, help="where the random model is kept (default: the demo's cache)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args()
    pythons = {"awqjit": sys.executable}
    for entry in options.python:
        name, separator, python = entry.partition("=")
        if name not in CONTENDERS or not separator:
            parser.error(f"--python {entry}: wanted NAME=PYTHON with a name of {', '.join(CONTENDERS)}")
        pythons[name] = python
    rounds = options.rounds or (2 if options.quick else 5)
    directory = options.directory or demo_weights.models_directory()
    directory.mkdir(parents=True, exist_ok=True)
    folder = large_folder(directory, **({"blocks": 2} if options.quick else {}))
    folder_bytes = sum(path.stat().st_size for path in folder.iterdir())

    before = stamp()
    with tempfile.TemporaryDirectory(prefix="awqjit-loading-cache-") as temporary:
        cache = Path(temporary)
        loads = {name: lambda n=name, p=python: run(n, p, folder, cache) for name, python in pythons.items()}
        with progress.bar("loading", (rounds + 1) * len(loads)) as step:
            # Reads the files into the page cache, compiles kernels and bytecode: not counted.
            interleave(loads, 1, step)
            results = interleave(loads, rounds, step)
    after = stamp()
    found = {name: digest(runs, folder_bytes) for name, runs in results.items()}
    ratios = compare(found)
    show(found, ratios, folder_bytes, rounds)
    print_stamp(before, after)
    if options.output or not options.quick:
        payload = {
            "machine": before,
            "machine_after": after,
            "folder": folder.name,
            "folder_bytes": folder_bytes,
            "contenders": found,
            "awqjit_relative": ratios,
        }
        print(f"written: {write_result('loading', payload, options.output)}")
    likeliest = found["awqjit"]["tokens"][0]
    wrong = [name for name, row in found.items() if any(tokens[0] not in likeliest for tokens in row["tokens"])]
    if wrong:
        print(f"another first token than awqjit's {likeliest}: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
