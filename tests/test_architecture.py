# SPDX-License-Identifier: Apache-2.0
"""Rules about the source itself: who imports whom, what importing may do, what every file starts with."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "awqjit"

# A module imports only from its own row and the rows above it. A new module goes into the highest row that serves it.
ROWS: tuple[tuple[str, ...], ...] = (
    ("version", "errors", "config", "progress", "data"),
    ("weight", "pages", "formats", "shards", "checkpoint", "inspect_folder", "quantize"),
    ("reference",),
    ("target", "fragments", "layout", "spec", "cpuid", "hwcap", "machine", "select", "tiles"),
    ("render", "child", "slots", "toolchain", "places", "store", "records"),
    ("cache", "upkeep", "launch", "backends", "xpu"),
    ("packer", "jit", "ops", "bake", "tune"),
    ("modules", "fusion", "plan", "loader"),
    ("integrations",),
    ("cli",),
)
RANK = {module: rank for rank, row in enumerate(ROWS) for module in row}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def part_of(dotted: str) -> str:
    """``awqjit.formats.awq`` -> ``formats``; ``awqjit`` itself -> the empty string."""
    return dotted.partition(".")[2].partition(".")[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import from awqjit, those inside functions and type-checking blocks included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "awqjit":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if source.split(".")[0] == "awqjit":
                for alias in node.names:
                    yield node.lineno, f"{source}.{alias.name}"


def test_every_module_has_a_place_in_the_order() -> None:
    unplaced = {part_of(module_of(path)) for path in SOURCES} - RANK.keys() - {""}
    assert not unplaced, f"not in ROWS: {sorted(unplaced)}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_module_imports_only_from_those_before_it(path: Path) -> None:
    module = module_of(path)
    if module == "awqjit":
        return  # the front door shows what the others define
    own = RANK.get(part_of(module), len(ROWS))  # a module without a place fails in the test above
    wrong = []
    for line, name in imports_of(path, module):
        part = part_of(name)
        if part not in RANK:
            wrong.append(f"{path}:{line}: {name} is not a module below the front door")
        elif RANK[part] > own:
            wrong.append(f"{path}:{line}: {name} comes after {module}")
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        module = module_of(path)
        part = part_of(module)
        if part:
            used = {part_of(name) for _, name in imports_of(path, module)}
            graph.setdefault(part, set()).update((used & RANK.keys()) - {part})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_version_is_a_literal_that_needs_no_import() -> None:
    _, *statements = ast.parse((PACKAGE / "version.py").read_text(encoding="utf-8")).body  # after the docstring
    (assignment,) = statements
    assert isinstance(assignment, ast.Assign)
    assert ast.unparse(assignment.targets[0]) == "__version__"
    assert isinstance(ast.literal_eval(assignment.value), str)


# Runs in a process of its own: imports every module of a package, and records what the package's code does while it is
# imported. An act belongs to the package if, going up the stack, its code comes before the import of another module.
PROBE = r"""
import importlib, json, os, pkgutil, sys
from pathlib import Path

name, folder = sys.argv[1:]
sys.path.insert(0, folder)
inside = str(Path(folder, name)) + os.sep
found = []
on = False

def blame():
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(inside):
            return f"{file[len(inside):]}:{frame.f_lineno}"
        if file == "<frozen importlib._bootstrap>":
            return None
        frame = frame.f_back
    return None

def note(what):
    if on and (place := blame()):
        found.append(f"{place} {what}")

def hook(event, args):
    if event == "open":
        mode, flags = args[1], args[2]
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            note(f"writes {args[0]}")
    elif event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec", "os.mkdir", "os.remove",
                   "os.rename", "os.putenv", "os.unsetenv", "ctypes.dlopen", "socket.connect", "tempfile.mkdtemp",
                   "tempfile.mkstemp"):
        note(event)

def watched(method):
    plain = getattr(os._Environ, method)
    def call(self, *args):
        note("reads the environment")
        return plain(self, *args)
    setattr(os._Environ, method, call)

for method in ("__getitem__", "__contains__", "__iter__"):
    watched(method)
sys.addaudithook(hook)

before = set()
if name == "awqjit":
    import torch
    before = set(sys.modules)
on = True
package = importlib.import_module(name)
brought = {module.split(".")[0] for module in set(sys.modules) - before}
modules = [name]
for module in pkgutil.walk_packages(package.__path__, name + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        modules.append(module.name)
on = False
print(json.dumps({"found": found, "brought": sorted(brought), "modules": modules}))
"""


def probe(name: str, folder: Path, cwd: Path) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, name, str(folder)], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return probe("awqjit", ROOT, tmp_path_factory.mktemp("elsewhere"))


def test_importing_reads_no_environment_starts_nothing_and_writes_nothing(imported: dict[str, list[str]]) -> None:
    everything = {module_of(path) for path in SOURCES if path.name != "__main__.py"}
    assert everything <= set(imported["modules"])
    assert imported["found"] == []


def test_importing_awqjit_brings_no_optional_package(imported: dict[str, list[str]]) -> None:
    optional = {"typer", "rich", "transformers", "tokenizers", "safetensors", "gguf", "numba", "triton", "vllm", "peft"}
    assert not optional & set(imported["brought"])


def test_the_probe_sees_what_it_looks_for(tmp_path: Path) -> None:
    guilty = tmp_path / "guilty"
    guilty.mkdir()
    (guilty / "__init__.py").write_text(
        "import os, subprocess, pathlib\n"
        "os.environ.get('HOME')\n"
        "pathlib.Path('made').mkdir()\n"
        "subprocess.run(['true'], check=True)\n"
        "pathlib.Path('written').write_text('x')\n"
    )
    found = probe("guilty", tmp_path, tmp_path)["found"]
    for line, what in ((2, "reads the environment"), (3, "os.mkdir"), (4, "subprocess.Popen"), (5, "writes written")):
        assert f"__init__.py:{line} {what}" in found


HEADED = [
    path
    for folder, pattern in (
        ("awqjit", "*.py"),
        ("templates", "*.py"),
        ("templates", "*.jinja"),
        ("tests", "*.py"),
        ("benchmarks", "*.py"),
    )
    for path in sorted((ROOT / folder).rglob(pattern))
]


@pytest.mark.parametrize("path", HEADED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_and_template_names_its_licence(path: Path) -> None:
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    assert "SPDX-License-Identifier: Apache-2.0" in first_line


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_every_module_parses_as_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))
