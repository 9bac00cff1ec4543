"""Runs real torchrun jobs of `tests/programs/waiting_ranks.py`, also for bench/proofs/ranks.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from sentinel.node import paths
from sentinel.store import History
from tests.hang.processes import SOON, ask
from tests.waiting import until
from tests.zygote import RANKS, TORCHRUN, ForkedProcess, start_zygote

PROGRAM = Path(__file__).parent.parent / "programs" / "waiting_ranks.py"
RUN_ID = "h-ranks"


class Job:
    """A running job."""

    def __init__(self, process: subprocess.Popen[str], release: Path) -> None:
        self.process, self._release = process, release
        self.stalled = 0.0
        """Unix seconds at which a rank last said that it stalls."""
        self.rounds = 0

    def stall(self) -> None:
        """Wait until a rank says again that it stalls."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if line == "stalling\n":
                self.stalled = time.time()
                return
        raise AssertionError("".join(seen))

    def go_on(self) -> None:
        """Let the rank go on, until it stalls again."""
        self._release.with_suffix(f".{self.rounds}").touch()
        self.rounds += 1


@contextlib.contextmanager
def job(
    kind: str, folder: Path, rules: str = SOON, world: int = 2, seconds: float = 0.0, rounds: int = 1
) -> Iterator[Job]:
    """Run a job, and yield it once one of its ranks stalls."""
    file, release = folder / "soon.yaml", folder / "go-on"
    file.write_text(rules)
    environment = {**os.environ, "SENTINEL_RUN_ID": RUN_ID, "SENTINEL_RULES": str(file)}
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", str(world)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*torchrun, str(PROGRAM), kind, str(release), str(seconds), str(rounds)]
    with ForkedProcess(command, zygote=start_zygote(RANKS), env=environment, cwd="/", **pipes) as process:
        try:
            running = Job(process, release)
            running.stall()
            yield running
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()  # each rank is a session of its own
            process.kill()


def list_incidents() -> list[dict[str, Any]]:
    """Return the incidents, from the daemon as long as it and its run are there, and then from the history."""
    if cases := ask(RUN_ID, "incidents"):
        return list(cases)
    files = paths.histories()
    if not files:
        return []
    with History(files[0]) as history:
        return history.incidents()


def wait_for_incident(alert: str, *words: str, number: int = 0, confidence: str = "") -> dict[str, Any]:
    """Wait for the incident of an alert (after `number` others) whose cause has all these words; return it.

    `confidence`, if given, must match too. The wait is needed because the ranks' evidence comes in one by one.
    """

    def is_meant(case: dict[str, Any]) -> bool:
        sure = case["diagnosis"]["confidence"]
        return all(word in cause(case) for word in words) and sure == (confidence or sure)

    def find() -> dict[str, Any] | None:
        cases = [each for each in list_incidents() if each["alert"] == alert]
        return cases[number] if len(cases) > number and is_meant(cases[number]) else None

    try:
        return dict(until(find, f"{alert} ({words})"))
    except AssertionError as error:
        found = [(each["alert"], each["diagnosis"]) for each in list_incidents()]
        raise AssertionError(f"{error}; there were {found}") from None


def cause(case: dict[str, Any]) -> str:
    """Return the cause that a case states."""
    return str(case["diagnosis"]["cause"])
