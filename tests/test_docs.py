# SPDX-License-Identifier: Apache-2.0
"""The documentation is right: its code runs, its links lead somewhere, its table and commands agree with the source."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from awqjit.select import ROWS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    return [code for marked, code in FENCE.findall(page.read_text(encoding="utf-8")) if marked == language]


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def write_awq_model(folder: Path) -> None:
    """A Llama folder as AWQ publishes them, with two small layers of random int4 weights and a tokenizer of bytes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    group = 32
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    tensors: dict[str, torch.Tensor] = {}
    for key, value in LlamaForCausalLM(config).to(torch.float16).state_dict().items():
        layer = key.removesuffix(".weight")
        if layer.endswith("_proj"):
            n, k = value.shape
            words = {"qweight": (k, n // 8), "qzeros": (k // group, n // 8)}
            for part, shape in words.items():
                tensors[f"{layer}.{part}"] = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
            tensors[f"{layer}.scales"] = torch.rand(k // group, n, dtype=torch.float16) / 50
        else:
            tensors[key] = value.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": quantization}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    write_awq_model(tmp_path / "my-awq-model")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{script.read_text()}\n{done.stderr}"


def test_there_is_python_code_to_run() -> None:
    assert blocks(README, "python")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue  # another site: not looked up
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_readme_lists_every_kernel_row_in_order_with_its_modes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    stated = [(row, sorted(re.findall(r"w4a(\d+)", modes))) for row, modes in rows]
    both = (8, 16)
    assert stated == [(row.name, sorted(map(str, row.target.act_bits if row.target else both))) for row in ROWS]


def test_the_readme_opens_with_one_sentence() -> None:
    first, second = README.read_text(encoding="utf-8").splitlines()[:2]
    assert first.startswith("awqjit ")
    assert first.endswith(".")
    assert first.count(". ") == 0
    assert second == ""


def test_two_commands_do_all_the_set_up() -> None:
    (block,) = blocks(README, "sh")
    install, test = block.splitlines()
    assert install.endswith("&& .venv/bin/awqjit demo")
    assert test.endswith("&& .venv/bin/tox run")
    for command in (install, test):
        assert " -c constraints.txt " in command
        assert (ROOT / "constraints.txt").is_file()


def test_ci_runs_the_second_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("an sdist holds the tests, but not CI's script")
    pattern = re.search(r"grep -E '([^']+)' README.md", script.read_text(encoding="utf-8"))
    assert pattern
    found = re.findall(pattern[1], README.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == [blocks(README, "sh")[0].splitlines()[1]]
    assert os.access(script, os.X_OK)


def test_figures_in_the_documents_come_from_the_results() -> None:
    if not (ROOT / "benchmarks" / "results").exists():
        pytest.skip("an sdist holds the tests, but not the benchmarks")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
