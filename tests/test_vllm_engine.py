# SPDX-License-Identifier: Apache-2.0
"""vLLM's real engine on the plugin: folders of several packers answer as the model that their weights describe.

Runs in an environment with vLLM (``tox run -e vllm``). Engines start in processes of their own, see `vllm_engine.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from int4_folders import write_int4
from models import edit_config, write_float
from vllm_checks import Engine, assert_answers_as_the_weights_do

from awqjit.integrations.vllm import NAME

ROOT = Path(__file__).parents[1]
FIXTURES = Path(__file__).parent / "fixtures" / "models"
# vLLM's attention on CPUs takes no heads of 16, which these models have: the same tensors make half as many of 32.
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@dataclass(frozen=True)
class Case:
    """A folder, how vLLM is to run it, and how many layers are int4 there (q, k and v are one, gate and up too)."""

    source: str
    dtype: str
    layers: int = 8
    wide_heads: bool = True


CASES: dict[str, Case] = {
    "awq": Case("mistral-awq-asym", "float16", wide_heads=False),
    "awq-qk-norm": Case("qwen3-awq-asym", "float16", wide_heads=False),
    "awq-channel": Case("form awq-gemm-channel", "float16"),
    "awq-auto-round": Case("mistral-auto-round-asym", "float16", layers=4),
    "gptq": Case("llama-gptq-sym", "float16"),
    "compressed-asym-bias": Case("qwen2-compressed-awq-asym", "float32"),
    "compressed-sym": Case("phi3-compressed-gptq-sym", "float32"),
    "compressed-channel": Case("form compressed-channel", "float32"),
    "compressed-half": Case("qwen2-compressed-awq-asym", "float16"),
}
W4A8 = {"awq": CASES["awq"], "compressed-asym-bias": CASES["compressed-asym-bias"]}
STOCK = {name: CASES[name] for name in ("awq", "gptq", "compressed-half")}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each case."""
    base = tmp_path_factory.mktemp("folders")
    source = write_float(base / "float", head_dim=32, intermediate_size=128)
    found = {}
    for name, case in CASES.items():
        if case.source.startswith("form "):
            found[name] = write_int4(source, base / name, case.source.removeprefix("form "))
        else:
            found[name] = Path(shutil.copytree(FIXTURES / case.source, base / name))
            if case.wide_heads:
                edit_config(found[name], lambda described: described.update(WIDE_HEADS))
    return found


def runs_of(cases: Mapping[str, Case], folders: Mapping[str, Path], dtype: str | None = None) -> dict[str, Any]:
    return {name: {"folder": str(folders[name]), "dtype": dtype or case.dtype} for name, case in cases.items()}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine"), kernel_cache)


@pytest.fixture(scope="session")
def exact(engine: Engine, folders: dict[str, Path]) -> tuple[dict[str, Any], str]:
    """Every case in its dtype, activations as they are."""
    return engine.ask_in_process(runs_of(CASES, folders), VLLM_CPU_INT4_W4A8="0")


@pytest.fixture(scope="session")
def rounded(engine: Engine, folders: dict[str, Path]) -> tuple[dict[str, Any], str]:
    """bf16, as vLLM runs it unless it is told otherwise: activations rounded to int8."""
    return engine.ask_in_process(runs_of(W4A8, folders, "bfloat16"))


@pytest.fixture(scope="session")
def stock(engine: Engine, folders: dict[str, Path]) -> tuple[dict[str, Any], str]:
    """Without the plugin's kernel."""
    return engine.ask_in_process(runs_of(STOCK, folders), VLLM_CPU_INT4_W4A8="0", VLLM_DISABLED_KERNELS=NAME)


@pytest.mark.parametrize("name", CASES)
def test_an_engine_answers_as_the_weights_of_its_folder(name: str, exact: Any, folders: dict[str, Path]) -> None:
    assert_answers_as_the_weights_do(exact[0][name], folders[name], CASES[name].dtype)


@pytest.mark.parametrize("name", CASES)
def test_every_int4_layer_has_the_plugins_kernel(name: str, exact: Any) -> None:
    kernels = exact[0][name]["kernels"]
    assert len(kernels) == CASES[name].layers and set(map(tuple, kernels.values())) == {(NAME, 16)}


def test_the_log_names_the_kernel_and_the_row(exact: Any) -> None:
    assert f"Using {NAME} for mixed-precision linear" in exact[1]
    assert re.search(r"awqjit: int4 layers with torch.float16 activations run as w4a16 on the row \w+", exact[1])


@pytest.mark.parametrize("name", W4A8)
def test_bf16_runs_as_w4a8_as_vllm_is_set_by_default(name: str, rounded: Any, folders: dict[str, Path]) -> None:
    assert set(map(tuple, rounded[0][name]["kernels"].values())) == {(NAME, 8)}
    assert_answers_as_the_weights_do(rounded[0][name], folders[name], "bfloat16", "w4a8")


@pytest.mark.parametrize("name", STOCK)
def test_vllms_own_kernel_gives_the_same_tokens(name: str, exact: Any, stock: Any) -> None:
    kernels = {kernel for kernel, _ in stock[0][name]["kernels"].values()}
    assert kernels and NAME not in kernels
    assert stock[0][name]["tokens"] == exact[0][name]["tokens"]


def test_a_compiled_engine_in_worker_processes_gives_the_same_tokens(
    engine: Engine, folders: dict[str, Path], exact: Any
) -> None:
    runs = {"awq": {"folder": str(folders["awq"]), "dtype": "float16", "enforce_eager": False}}
    answers, log = engine.ask(runs, VLLM_CPU_INT4_W4A8="0")
    assert answers["awq"]["tokens"] == exact[0]["awq"]["tokens"]
    assert re.search(rf"\(Worker\S* pid=\d+\).*Using {NAME} for mixed-precision linear", log)
    assert "DYNAMO_TRACE_ONCE" in log and "Enforce eager set" not in log


@pytest.mark.parametrize("name", ["awq-qk-norm", "compressed-channel"])
def test_two_workers_with_half_of_each_layer_give_the_same_tokens(
    name: str, engine: Engine, folders: dict[str, Path], exact: Any
) -> None:
    answers, log = engine.ask(
        {name: {"folder": str(folders[name]), "dtype": CASES[name].dtype, "tensor_parallel_size": 2}},
        VLLM_CPU_INT4_W4A8="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    assert answers[name]["tokens"] == exact[0][name]["tokens"]
    assert len(set(re.findall(r"\((Worker_TP\d) pid=\d+\).*awqjit: int4 layers", log))) == 2


SNIPPET = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_documents_snippet_runs(engine: Engine, folders: dict[str, Path], tmp_path: Path) -> None:
    (code,) = SNIPPET.findall((ROOT / "docs" / "vllm.md").read_text())
    shutil.copytree(folders["awq"], tmp_path / "my-awq-model")
    (tmp_path / "snippet.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=tmp_path,
        env=os.environ | {"AWQJIT_CACHE_DIR": str(engine.cache), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"Using {NAME} for mixed-precision linear" in done.stdout
