# SPDX-License-Identifier: Apache-2.0
"""Environments of the peers: ``python -m benchmarks.peers setup|list|check [names] [--home FOLDER]``.

``setup`` makes them (all by default), ``list`` says which are there, ``check`` compares every contender with float64.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.environments import ENVIRONMENTS, Environment, default_home, missing, setup
from benchmarks.peers.registry import CONTENDERS, LEFT_OUT


def _setup(environments: list[Environment], home: Path) -> int:
    failed = []
    for environment in environments:
        print(f"{environment.name}: installing into {home / environment.name}", flush=True)
        try:
            setup(environment, home)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(environment.name)
            print(f"{environment.name}: {error}", file=sys.stderr, flush=True)
    if failed:
        print(f"not installed: {', '.join(failed)}; benchmarks record their peers as absent", file=sys.stderr)
    return 1 if failed else 0


def _list(environments: list[Environment], home: Path) -> int:
    for environment in environments:
        print(f"{environment.name}: {missing(environment, home) or 'ready'}")
        for contender in CONTENDERS:
            if contender.environment == environment.name:
                print(f"  {contender.name}")
    for name, reason in LEFT_OUT.items():
        print(f"left out: {name}: {reason}")
    return 0


def _check(environments: list[Environment], home: Path) -> int:
    from benchmarks.rounds import check_contenders

    names = {environment.name for environment in environments}
    return check_contenders([one for one in CONTENDERS if one.environment in names], home)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("setup", "list", "check"))
    parser.add_argument("names", nargs="*", help=f"environments, by default all: {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--home", type=Path, default=None, help=f"folder of the environments [{default_home()}]")
    options = parser.parse_args()
    for name in options.names:
        if name not in ENVIRONMENTS:
            parser.error(f"no environment {name!r}; there are {', '.join(ENVIRONMENTS)}")
    chosen = [ENVIRONMENTS[name] for name in options.names or ENVIRONMENTS]
    command = {"setup": _setup, "list": _list, "check": _check}[options.command]
    return command(chosen, (options.home or default_home()).absolute())


if __name__ == "__main__":
    sys.exit(main())
