"""Real torchrun jobs of `tests/programs/waiting_ranks.py`, and what Sentinel makes of them. Also of bench/ranks.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sentinel import places
from sentinel.store import History
from tests.hang.processes import SOON, ask, until

PROGRAM = Path(__file__).parent.parent / "programs" / "waiting_ranks.py"
RUN_ID = "h-ranks"


class Job(NamedTuple):
    """One that is under way."""

    process: subprocess.Popen[str]
    stalled: float
    """Unix seconds at which its rank said that it stalls."""


@contextlib.contextmanager
def job(kind: str, folder: Path, rules: str = SOON, world: int = 2, seconds: float = 0.0) -> Iterator[Job]:
    """A job one of whose ranks stalls by now."""
    file, release = folder / "soon.yaml", folder / "go-on"
    file.write_text(rules)
    environment = {**os.environ, "SENTINEL_RUN_ID": RUN_ID, "SENTINEL_RULES": str(file)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*torchrun, str(PROGRAM), kind, str(release), str(seconds)]
    with subprocess.Popen(command, env=environment, cwd="/", **pipes) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if line == "stalling\n":
                    break
            else:
                raise AssertionError("".join(seen))
            yield Job(process, time.time())
        finally:
            release.touch()
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()  # ranks are sessions of their own
            process.kill()


def known() -> list[dict[str, Any]]:
    """Incidents, by the daemon while it is there, which is as long as its run, and then by the history."""
    if cases := ask(RUN_ID, "incidents"):
        return list(cases)
    files = places.histories()
    if not files:
        return []
    with History(files[0]) as history:
        return history.incidents()


def told(alert: str, words: str = "", cases: Callable[[], list[dict[str, Any]]] = known) -> dict[str, Any]:
    """The incident of this name, once its cause has these words: all that is known of its ranks is in."""

    def found() -> list[dict[str, Any]]:
        return [each for each in cases() if each["alert"] == alert and words in cause(each)]

    return dict(until(found, f"{alert} ({words})")[0])


def cause(case: dict[str, Any]) -> str:
    """Why, as it says."""
    return str(case["diagnosis"]["cause"])
