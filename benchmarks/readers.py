# SPDX-License-Identifier: Apache-2.0
"""Do others read what `awqjit quantize` writes? Next-token log-probabilities against the dequantized weights.

    python -m benchmarks.readers [--python gptqmodel=PYTHON] [--python vllm=PYTHON]
                                 [--model FLOAT ...] [--form FORM ...] [--directory FOLDER]

Without a model, a small random one is quantized, in every form that the command writes; GGUF files and float folders
are given with --model. Each reader is a fresh process in its own environment, and loads the folder as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import awqjit
from awqjit.errors import AwqJitError
from awqjit.integrations.quantize_folder import quantize_folder
from awqjit.modules import Int4Linear
from benchmarks.common import print_table
from benchmarks.loading import ENVIRONMENT

PROMPT = (1, 17, 99, 4, 56, 23, 120, 64)
TOP = 10
TOLERANCE = 0.25
"""Of a log-probability, in nats. Readers compute in bf16, of 8 bits: with logits of up to 30 a few hundredths are
rounding, and a zero point that is off by one changes them by whole units."""

FORMS: dict[str, dict[str, Any]] = {
    f"{form} {'symmetric' if symmetric else 'asymmetric'} g{group}": {
        "format": form, "symmetric": symmetric, "group_size": group,
    }
    for form in ("awq", "gptq")
    for symmetric in (False, True)
    for group in (32, 64, 128, -1)
}  # fmt: skip

READERS: dict[str, str] = {
    "gptqmodel": """
import gptqmodel, torch, transformers
if json.load(open(folder + "/config.json"))["quantization_config"]["quant_method"] == "gptq":
    # transformers reads GPTQ by way of the package optimum; GPTQModel itself does without.
    model = gptqmodel.GPTQModel.load(folder, device="cpu", dtype=torch.bfloat16).model
else:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
with torch.inference_mode():
    logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()
found = logits.log_softmax(-1).topk(top)
result = dict(zip(found.indices.tolist(), found.values.tolist()))
""",
    "vllm": """
import vllm
model = vllm.LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64,
                 max_num_seqs=1, kv_cache_memory_bytes=32 << 20)
sampling = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=top, detokenize=False)
out = model.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0]
result = {token: entry.logprob for token, entry in out.logprobs[0].items()}
""",
}

_CHILD = """
import json, sys
if __name__ == "__main__":
    folder, prompt, top = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
{code}
    print("RESULT " + json.dumps(result), flush=True)
"""


def tiny(folder: Path) -> Path:
    """A random Llama whose layers every group size divides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.1)
    model.to(torch.float16).save_pretrained(folder)
    return folder


@torch.no_grad()
def expected(folder: Path) -> torch.Tensor:
    """Log-probabilities of the next token, each int4 weight dequantized, in fp32."""
    model = awqjit.from_pretrained(folder, dtype=torch.float32, progress=False)
    for name, module in list(model.named_modules()):
        if isinstance(module, Int4Linear):
            weight = module.quantized().dequantize().T.contiguous()
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None)
            linear.weight.data = weight
            if module.bias is not None:
                linear.bias.data = module.bias.float()
            model.set_submodule(name, linear)
    return model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1].log_softmax(-1)


def read(name: str, python: str, folder: Path) -> dict[int, float] | str:
    """What a reader makes of a folder: log-probabilities of its likeliest tokens, or the last line of its error."""
    with tempfile.TemporaryDirectory(prefix="awqjit-readers-") as work:
        script = Path(work) / f"read_{name}.py"
        script.write_text(_CHILD.format(code=READERS[name].replace("\n", "\n    ")), encoding="utf-8")
        done = subprocess.run(
            [python, str(script), str(folder), json.dumps(PROMPT), str(TOP)],
            cwd=work, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        said = [line.strip() for line in done.stderr.splitlines() if "Error" in line or "Value error" in line]
        return (said or done.stderr.strip().splitlines() or ["no result"])[-1][:300]
    return {int(token): value for token, value in json.loads(lines[-1].removeprefix("RESULT ")).items()}


def verdict(found: dict[int, float] | str, wanted: torch.Tensor) -> tuple[bool, str]:
    """Whether a reader agrees, and how far off its likeliest tokens are."""
    if isinstance(found, str):
        return False, found
    apart = max(abs(value - float(wanted[token])) for token, value in found.items())
    first = max(found, key=lambda token: found[token])
    right = apart < TOLERANCE and float(wanted.max() - wanted[first]) < 2 * apart + 1e-6
    return right, f"{'right' if right else 'WRONG'}, {apart:.3f} apart"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(READERS))
    parser.add_argument("--model", action="append", default=[], type=Path, help="float folder or GGUF file")
    parser.add_argument("--form", action="append", choices=tuple(FORMS), help="only these (default: all)")
    parser.add_argument("--directory", type=Path, help="keep the folders here")
    options = parser.parse_args()
    pythons = dict(entry.partition("=")[::2] for entry in options.python)
    if not pythons or not set(pythons) <= set(READERS):
        parser.error(f"--python NAME=PYTHON is needed, with a name of {', '.join(READERS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="awqjit-readers-") as temporary:
        root = options.directory or Path(temporary)
        for source in options.model or [tiny(root / "tiny")]:
            rows = []
            for number, (form, settings) in enumerate(FORMS.items()):
                if options.form and form not in options.form:
                    continue
                folder = root / f"{source.stem}-{number}"
                try:
                    quantize_folder(source, folder, clip_search=False, show_progress=False, force=True, **settings)
                except AwqJitError as error:
                    rows.append((form, *(f"not written: {error}"[:80] for _ in pythons)))
                    continue
                wanted = expected(folder)
                verdicts = [verdict(read(name, python, folder), wanted) for name, python in pythons.items()]
                failed |= not all(right for right, _ in verdicts)
                rows.append((form, *(text for _, text in verdicts)))
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
            print_table(f"{source.name}: log-probabilities of the {TOP} likeliest tokens", ("form", *pythons), rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
