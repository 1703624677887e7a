# SPDX-License-Identifier: Apache-2.0
"""A kernel cache of the test run's own, an environment without the user's AWQJIT_* variables, and --environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools  # noqa: F401  (before anything imports distutils, which torch.compile's back end would trip over)
from environments import ENVIRONMENTS, environments_of
from hypothesis import HealthCheck, settings

from awqjit import config, ops
from awqjit.ops import dispatcher

# The same examples on every run, and no time limit on one: machines are shared, and a first call compiles.
settings.register_profile(
    "awqjit", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("awqjit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--environment",
        choices=tuple(ENVIRONMENTS),
        help="only the files of one tox environment (tests/environments.py)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = config.getoption("--environment")
    if wanted is None or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return True if wanted not in environments_of(collection_path.name) else None


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cold cache for the whole run, shared by the worker processes where there are several."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = shared / "awqjit-kernels"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@pytest.fixture(autouse=True)
def _own_environment(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(config.CACHE_DIR.name, str(kernel_cache))
    dispatcher.install()  # once per process, and before a test gives it a strange compiler or counts compilations
    yield
    ops.forget()
