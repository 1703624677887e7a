# SPDX-License-Identifier: Apache-2.0
"""Where the contenders run: one virtual environment each, its packages pinned by ``locks/<name>.txt``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

ROOT = Path(__file__).parents[2]
LOCKS = Path(__file__).with_name("locks")


@dataclass(frozen=True)
class Environment:
    """One virtual environment.

    Attributes:
        name: of its folder and of its lock file.
        own: it also holds this checkout, to run awqjit in the same process as those peers.
        from_source: packages built here instead of taken as a wheel, after all others, because only then they use what
            this CPU has.
        build: environment variables of those builds.
        run: environment variables of its processes; ``{folder}`` stands for the environment's folder.
    """

    name: str
    own: bool = False
    from_source: tuple[str, ...] = ()
    build: tuple[tuple[str, str], ...] = ()
    run: tuple[tuple[str, str], ...] = ()

    @property
    def lock(self) -> Path:
        return LOCKS / f"{self.name}.txt"

    def python(self, home: Path) -> Path:
        return home / self.name / "bin" / "python"

    def pins(self) -> dict[str, str]:
        """Package -> version, in the order of the lock file."""
        lines = self.lock.read_text(encoding="utf-8").split()
        return dict(line.split("==", 1) for line in lines)

    def variables(self, home: Path) -> dict[str, str]:
        return {name: value.format(folder=home / self.name) for name, value in self.run}


ENVIRONMENTS: dict[str, Environment] = {
    environment.name: environment
    for environment in (
        # All that runs on the same torch shares a process, so that calls can alternate.
        Environment("torch", own=True),
        Environment("onnxruntime"),
        Environment("openvino", run=(("OPENVINO_TELEMETRY_DISABLE", "1"),)),
        Environment(
            "ggml",
            from_source=("libggml-python",),  # its wheel stops at AVX2
            build=(("CMAKE_ARGS", "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DGGML_LLAMAFILE=ON"),),  # as llama.cpp builds it
        ),
        Environment(
            "gptqmodel",
            from_source=("GPTQModel",),  # there is no wheel
            run=(("GPTQMODEL_EXT_BUILD", "{folder}/kernels"),),  # where it compiles its kernel at first use
        ),
    )
}


def default_home() -> Path:
    """Where environments are put unless the user says otherwise: the platform's cache folder for awqjit-peers."""
    return Path(platformdirs.user_cache_path("awqjit-peers"))


def missing(environment: Environment, home: Path) -> str | None:
    """Why an environment cannot be used, or None."""
    if (home / environment.name / "ready").is_file() and environment.python(home).is_file():
        return None
    return f"no environment in {home / environment.name}: python -m benchmarks.peers setup {environment.name}"


def setup(environment: Environment, home: Path) -> None:
    """Make the environment anew and install exactly what its lock file names.

    Raises:
        CalledProcessError: pip failed; it has said why.
    """
    folder = home / environment.name
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pins = environment.pins()
    wheels = [f"{name}=={version}" for name, version in pins.items() if name not in environment.from_source]
    built = [f"{name}=={pins[name]}" for name in environment.from_source]
    _pip(environment, home, *wheels)
    if built:
        # Without isolation: the lock names the tools that build it, too.
        names = ",".join(environment.from_source)
        _pip(environment, home, "--no-build-isolation", "--no-binary", names, *built)
    if environment.own:
        _pip(environment, home, "--no-build-isolation", "-e", str(ROOT))
    (folder / "ready").touch()


def _pip(environment: Environment, home: Path, *arguments: str) -> None:
    # --no-deps: the lock is whole as far as the adapters need it; vLLM's server, for one, stays out.
    python = environment.python(home)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *arguments]
    # A build finds cmake and ninja of the environment on the path.
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(command, check=True, env=os.environ | dict(environment.build) | {"PATH": path})
