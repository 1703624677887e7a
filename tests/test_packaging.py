# SPDX-License-Identifier: Apache-2.0
"""The sdist, the wheel and an editable install: each finds the templates, which lie outside the package's folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TEMPLATES = {path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("*.jinja")}
MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "awqjit").rglob("*.py")}

# Printed by the installed package: where it is, and every template that its loader can read.
LOOK = """
import json
from importlib.metadata import entry_points, version
from importlib.resources import files
import awqjit

def walk(folder, prefix=""):
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".jinja"):
            assert entry.read_text(encoding="utf-8").strip(), f"{entry} is empty"
            yield prefix + entry.name

command, = entry_points(group="console_scripts", name="awqjit")
print(json.dumps({
    "file": awqjit.__file__,
    "version": [awqjit.__version__, version("awqjit")],
    "templates": sorted(walk(files("awqjit.templates"))),
    "typed": files("awqjit").joinpath("py.typed").is_file(),
    "command": callable(command.load()),
}))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and, built from that sdist, the wheel; neither build can import torch."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"  # a copy: a build leaves egg-info behind
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist"))
    poison = work / "poison"
    poison.mkdir()
    (poison / "torch.py").write_text("raise ImportError('a build must not need torch')\n")
    out = work / "out"
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    run(*command, cwd=work, PYTHONPATH=str(poison))
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (path,) = built.glob("*.tar.gz")
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The Python of a new virtual environment that sees this one's packages but none of its editable installs."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file adds a folder without reading that folder's own .pth files, where editable installs are.
    lines = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "borrowed.pth").write_text("\n".join(lines) + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    # Files of an awqjit in the borrowed folder are not this environment's to remove.
    run(python, "-m", "pip", "install", *options, "--ignore-installed", *what, cwd=python.parent)


def look(python: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(python, "-c", LOOK, cwd=python.parent).splitlines()[-1])
    assert answer["version"][0] == answer["version"][1]
    assert answer["typed"]
    assert answer["command"]
    return answer


def test_there_are_templates() -> None:
    assert TEMPLATES, "an empty set would pass every test below"


def test_an_installed_wheel_finds_its_templates(wheel: Path, environment: Path) -> None:
    install(environment, wheel)
    found = look(environment)
    assert Path(found["file"]).is_relative_to(environment.parents[1])
    assert set(found["templates"]) == TEMPLATES


def test_an_installed_sdist_finds_its_templates(sdist: Path, environment: Path) -> None:
    install(environment, sdist)
    found = look(environment)
    assert Path(found["file"]).is_relative_to(environment.parents[1])
    assert set(found["templates"]) == TEMPLATES


def test_an_editable_install_finds_its_templates_and_sees_new_ones(
    sdist: Path, environment: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkout,) = tmp_path.glob("awqjit-*")
    install(environment, "--editable", checkout)
    (checkout / "templates" / "cpu" / "new.jinja").write_text("new")
    found = look(environment)
    assert Path(found["file"]) == checkout / "awqjit" / "__init__.py"
    assert set(found["templates"]) == TEMPLATES | {"cpu/new.jinja"}


def test_the_wheel_is_pure_and_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"awqjit"}
    assert {name for name in names if name.endswith(".py") and not name.startswith("awqjit/templates/")} == MODULES
    assert {name for name in names if name.endswith(".jinja")} == {f"awqjit/templates/{name}" for name in TEMPLATES}
    assert "awqjit/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_the_tests_and_documents(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "constraints.txt", "tox.ini"):
        assert name in names
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py")} <= names
    assert names >= {f"templates/{name}" for name in TEMPLATES}


def test_installing_brings_five_packages_and_the_rest_are_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    required = metadata.get_all("Requires-Dist") or []
    always = {re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line}
    assert always == {"torch", "jinja2", "filelock", "platformdirs", "numpy"}
    extras = set(metadata.get_all("Provides-Extra") or ())
    assert extras == {"bench", "cli", "transformers", "gguf", "demo", "numba", "zig", "xpu", "triton", "test", "dev"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
