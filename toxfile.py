# SPDX-License-Identifier: Apache-2.0
"""tox: environments of one ``env_dir`` share what is installed there. tox alone makes it anew for each name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from tox.plugin import impl
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class _SharedInfo(Info):
    """What tox notes about a directory, the name of the environment that it was made for left out."""

    @contextmanager
    def compare(
        self, value: Any, section: str, sub_section: str | None = None
    ) -> Generator[tuple[bool, Any | None], None, None]:
        if section == "ToxEnv":
            value = value | {"name": "shared"}
        with super().compare(value, section, sub_section) as found:
            yield found


class SharedRunner(VirtualEnvRunner):
    """``runner = shared``: dependencies and Python are still compared, and installed anew when they change."""

    @staticmethod
    def id() -> str:
        return "shared"

    @property
    def cache(self) -> Info:
        return _SharedInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    register.add_run_env(SharedRunner)
