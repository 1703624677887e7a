# SPDX-License-Identifier: Apache-2.0
"""The AWQJIT_* variables: typed, read on use, refused clearly."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from awqjit import config
from awqjit.errors import ConfigError

EXAMPLES = {
    "AWQJIT_KERNEL": ("portable", "portable"),
    "AWQJIT_MAX_ISA": ("avx2", "avx2"),
    "AWQJIT_JIT": ("off", False),
    "AWQJIT_CXX": ("g++ -pipe", "g++ -pipe"),
    "AWQJIT_JOBS": ("3", 3),
    "AWQJIT_CACHE_DIR": ("/a b", Path("/a b")),
    "AWQJIT_CACHE_PATH": (f"/a{os.pathsep}{os.pathsep}/b", (Path("/a"), Path("/b"))),
    "AWQJIT_DISPATCHER": ("no", False),
    "AWQJIT_COMPILE_TIMEOUT": ("7", 7),
}


def test_there_are_at_most_ten_variables_each_with_a_name_of_ours_and_a_help_text() -> None:
    assert len(config.VARIABLES) <= 10
    assert all(variable.name.startswith("AWQJIT_") and variable.help for variable in config.VARIABLES)
    assert len({variable.name for variable in config.VARIABLES}) == len(config.VARIABLES)


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.name)
def test_a_variable_is_parsed(variable: config.Variable) -> None:
    text, value = EXAMPLES[variable.name]
    assert variable.read({variable.name: f" {text} "}) == value


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("environ", [{}, {"": ""}, "empty", "blank"], ids=["unset", "others", "empty", "blank"])
def test_unset_and_empty_mean_the_default(variable: config.Variable, environ: dict[str, str] | str) -> None:
    if isinstance(environ, str):
        environ = {variable.name: "" if environ == "empty" else "  "}
    assert variable.read(environ) == variable.default


@pytest.mark.parametrize(
    ("name", "text"),
    [("AWQJIT_JIT", "maybe"), ("AWQJIT_JOBS", "0"), ("AWQJIT_JOBS", "-1"), ("AWQJIT_JOBS", "two")]
    + [(name, "~no-such-user/x") for name in ("AWQJIT_CACHE_DIR", "AWQJIT_CACHE_PATH")]
    + [("AWQJIT_COMPILE_TIMEOUT", text) for text in ("0", "1.5", "1e3", "∞", "²")],
)
def test_a_bad_value_names_the_variable_the_text_and_what_is_wanted(name: str, text: str) -> None:
    variable = next(variable for variable in config.VARIABLES if variable.name == name)
    with pytest.raises(ConfigError) as caught:
        variable.read({name: text})
    assert name in str(caught.value) and repr(text) in str(caught.value) and "wanted" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_variable_is_read_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_JOBS", "2")
    assert config.JOBS.read() == 2
    monkeypatch.setenv("AWQJIT_JOBS", "5")
    assert config.JOBS.read() == 5


def test_a_path_may_start_at_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config.CACHE_DIR.read({"AWQJIT_CACHE_DIR": "~/kernels"}) == Path("/home/somebody/kernels")


def test_override_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWQJIT_KERNEL", "portable")
    monkeypatch.delenv("AWQJIT_JIT", raising=False)
    with pytest.raises(RuntimeError), config.override(kernel=None, jit="0"):
        assert config.KERNEL.read() is None
        assert config.JIT.read() is False
        raise RuntimeError
    assert os.environ["AWQJIT_KERNEL"] == "portable"
    assert "AWQJIT_JIT" not in os.environ


def test_override_refuses_an_unknown_name_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWQJIT_JIT", raising=False)
    with pytest.raises(ConfigError, match="AWQJIT_NO_SUCH"), config.override(jit="0", no_such="1"):
        pass
    assert "AWQJIT_JIT" not in os.environ


def test_bad_values_do_not_break_the_import() -> None:
    environment = {**os.environ, **{variable.name: "\x01nonsense" for variable in config.VARIABLES}}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    code = "import awqjit.config, awqjit.toolchain, awqjit.cache"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
