# SPDX-License-Identifier: Apache-2.0
"""Runs the workers: one process an environment, all kept alive, told in turns what to time.

In each round every contender is timed once. Those of one process take turns call by call; processes take turns in an
order that turns by one each round, with a pause between them in which the threads of the last one fall asleep.
"""

from __future__ import annotations

import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import cpu_use
from benchmarks.limits import Meter
from benchmarks.peers.environments import ENVIRONMENTS, ROOT, missing
from benchmarks.peers.registry import Contender

PAUSE = 0.02  # seconds; waiting threads of OpenMP spin for some 10 ms
MOST_CALLS = 400  # of one contender in one round
ANSWER_SECONDS = 900.0  # a worker that takes longer is ended
SLOW_RATIO = 4.0
SLOW_ROUNDS = 3
"""A contender that takes so many times the fastest one's time is measured in so many rounds only."""


class WorkerEnded(Exception):
    """A worker died, or was ended because it did not answer."""


class Worker:
    """A process of one environment and its threads.

    Args:
        environment: name in the table of environments.
        home: folder of the environments.
        cpus: the CPUs it runs on, a thread each.
        log: file that its own and its libraries' words are appended to.
    """

    def __init__(self, environment: str, home: Path, cpus: Sequence[int], log: Path) -> None:
        self.environment, self.home, self.cpus, self.log = environment, home, list(cpus), log
        self.start()

    def start(self) -> None:
        found = ENVIRONMENTS[self.environment]
        python = sys.executable if missing(found, self.home) else str(found.python(self.home))
        threads = len(self.cpus)
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "OMP_PROC_BIND": "true",
            "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in self.cpus),
            "OPENBLAS_NUM_THREADS": "1",  # numpy only makes the references; its threads would spin on
            # numpy asks for huge pages, and the allocator hands its memory on: some contenders would have them by luck.
            "NUMPY_MADVISE_HUGEPAGE": "0",
            **found.variables(self.home),
        }
        with self.log.open("ab") as words:
            self.process = subprocess.Popen(
                [python, "-m", "benchmarks.worker", str(threads), ",".join(map(str, self.cpus))],
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
            )

    def ask(self, do: str, **arguments: Any) -> Any:
        """One command and its answer.

        Raises:
            WorkerEnded: instead of an answer.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write((json.dumps({"do": do, **arguments}) + "\n").encode())
            self.process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                if not selector.select(ANSWER_SECONDS):
                    raise WorkerEnded(f"no answer to {do} within {ANSWER_SECONDS:g} s")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise WorkerEnded(f"its process ended with code {self.process.wait()} during {do}, see {self.log}")
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass
class Group:
    """The contenders of one worker.

    Attributes:
        worker: its process.
        names: contenders that run in it.
        suffix: set behind their names in results, where two groups have the same contenders.
        versions: contender -> package and version.
        banned: contender -> why it does not run here at all.
        absent: contender -> why it does not compute the present layer, the banned ones included.
        layer: the present one.
        facts: contender that holds it -> bytes of one copy, copies, dtype of x.
    """

    worker: Worker
    names: list[str]
    suffix: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    banned: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    layer: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def open(self) -> None:
        """Load every contender's library, one after the other so that one that crashes is known and left out."""
        for name in self.names:
            if name in self.banned:
                continue
            try:
                answer = self.worker.ask("open", names=[name])[name]
            except WorkerEnded as error:
                self._restart(name, str(error))
                return
            if "absent" in answer:
                self.banned[name] = answer["absent"]
            else:
                self.versions[name] = answer["version"]

    def _restart(self, culprit: str, reason: str) -> None:
        self.banned[culprit] = reason
        self.worker.end()
        self.worker.start()
        self.open()

    def prepare(self, k: int, n: int, group: int, dtype: str, rotate_bytes: int) -> None:
        """Have every contender pack this layer and compute one row of it."""
        self.layer = {"k": k, "n": n, "group": group, "dtype": dtype, "rotate_bytes": rotate_bytes}
        while True:
            names = [name for name in self.names if name not in self.banned]
            try:
                answers = self.worker.ask("prepare", names=names, **self.layer)
            except WorkerEnded as error:
                self._find_culprit(names, str(error))
                continue
            self.facts = {name: answer for name, answer in answers.items() if "absent" not in answer}
            self.absent = self.banned | {n: answer["absent"] for n, answer in answers.items() if "absent" in answer}
            return

    def _find_culprit(self, names: list[str], reason: str) -> None:
        """Prepare each alone; the one that ends the process is left out from now on."""
        for name in names:
            self.worker.end()
            self.worker.start()
            try:
                self.worker.ask("open", names=[name])
                self.worker.ask("prepare", names=[name], **self.layer)
            except WorkerEnded as error:
                self._restart(name, str(error))
                return
        raise WorkerEnded(f"{', '.join(names)} together: {reason}")

    def check(self, m: int, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
        """Errors of every contender that holds the layer; one that fails leaves the layer."""
        found = {}
        for name in list(self.facts):
            answer = self.worker.ask("check", name=name, m=m, kinds=list(kinds))
            if "absent" in answer:
                self.absent[name] = answer["absent"]
                del self.facts[name]
            else:
                found[name] = answer
        return found


def open_groups(contenders: Sequence[Contender], home: Path, cpus: Sequence[int], log: Path) -> list[Group]:
    """A started worker for each environment of these contenders; environments that are not there are not started."""
    groups = []
    for name, environment in ENVIRONMENTS.items():
        names = [one.name for one in contenders if one.environment == name]
        reason = missing(environment, home)
        if reason is not None and not environment.own:
            names = []
        if names:
            group = Group(Worker(name, home, cpus, log), names)
            groups.append(group)
            group.open()
    return groups


def time_cell(
    groups: Sequence[Group],
    m: int,
    rounds: int,
    seconds: float,
    busy_limit: float,
    meter: Meter | None,
) -> dict[str, Any]:
    """Time one batch size of the layer that all groups hold.

    Args:
        groups: with prepared layers.
        m: rows of x.
        rounds: how often each contender is timed while others leave the machine alone; at most twice as often in all.
        seconds: of calls, for each contender in each round; at least one call.
        busy_limit: share of the machine from which a round does not count, because others took it.
        meter: reads the memory's state before each round; None: it is not read.

    Returns:
        ``medians`` and ``least``: contender -> seconds in each round, None where it was left out as slow; ``rounds``:
        foreign share and memory state of each.
    """
    single: dict[str, float] = {}
    for group in groups:
        group.worker.ask("input", m=m, names=list(group.facts))
        for name in group.facts:
            single[name + group.suffix] = group.worker.ask("warm", name=name)["seconds"]
        time.sleep(PAUSE)
    slow = SLOW_RATIO * min(single.values(), default=0.0)
    medians: dict[str, list[float | None]] = {key: [] for key in single}
    least: dict[str, list[float | None]] = {key: [] for key in single}
    states: list[dict[str, Any]] = []
    pids = [group.worker.process.pid for group in groups]
    quiet = 0
    while quiet < rounds and len(states) < 2 * rounds:
        turn = len(states)
        state: dict[str, Any] = dict(meter.state()) if meter else {}
        before = cpu_use.read(pids)
        shift = turn % len(groups)
        for group in (*groups[shift:], *groups[:shift]):
            names = [name for name in group.facts if turn < SLOW_ROUNDS or single[name + group.suffix] <= slow]
            if names:
                turned = names[turn % len(names) :] + names[: turn % len(names)]
                for name, times in group.worker.ask("time", names=turned, seconds=seconds, most=MOST_CALLS).items():
                    medians[name + group.suffix].append(statistics.median(times))
                    least[name + group.suffix].append(min(times))
                time.sleep(PAUSE)
        state["foreign"] = cpu_use.between(before, cpu_use.read(pids))
        states.append(state)
        quiet += state["foreign"] is None or state["foreign"] <= busy_limit
        for kept in (*medians.values(), *least.values()):
            kept += [None] * (len(states) - len(kept))
    return {"medians": medians, "least": least, "rounds": states}


def check_contenders(contenders: Sequence[Contender], home: Path) -> int:
    """Compare every contender with float64 on a small layer at 1 and 16 rows; print, and return 1 if one is wrong."""
    log = home / "check.log"
    home.mkdir(parents=True, exist_ok=True)
    groups = open_groups(contenders, home, sorted(os.sched_getaffinity(0)), log)
    wrong = False
    try:
        running = {name for group in groups for name in group.names}
        for one in contenders:
            if one.name not in running:
                print(f"{one.name}: {missing(ENVIRONMENTS[one.environment], home)}")
        for group in groups:
            group.prepare(512, 1024, 128, "bf16", 1 << 20)
            for m in (1, 16):
                for name, errors in group.check(m, ("plain", "outliers")).items():
                    right = errors["plain"] <= TOLERANCE
                    wrong |= not right
                    found = f"relative error {errors['plain']:.2e}, with outliers {errors['outliers']:.2e}"
                    print(f"{name} ({group.versions[name]}), M={m}: {found}{'' if right else ' WRONG'}")
            for name, reason in group.absent.items():
                print(f"{name}: {reason}")
    finally:
        for group in groups:
            group.worker.end()
    return int(wrong)


TOLERANCE = 0.03
"""Relative error that a right result stays below on plain data: int8 activations give 0.01, and a scale for a whole
row, or scales in bf16, somewhat more."""
