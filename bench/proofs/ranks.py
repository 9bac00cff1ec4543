"""Reproduces each fault between ranks, D1 to D6, again and again, as real torchrun jobs on gloo.

Every second job has four ranks, the others two. A job holds if the alert names the rank and the reason, and no other
alert comes. Delays are measured from the moment at which the rank says that it stalls; a hang's limit is subtracted, so
that only the daemon's own delay is left. The limit is 3 s here (by a rule file; the stock limit is a minute). D6 must
be silent through an evaluation, an export, a checkpoint, a compilation and a declared phase of 8 s each with a limit of
5 s, and for 8 s after the loop.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench.places import make_places
from tests.hang.jobs import RUN_ID, Job, cause, job, list_incidents
from tests.hang.processes import SOON, ask

LIMIT_SECONDS = 3.0
LONG_SECONDS, LONG_LIMIT_SECONDS = 8.0, 5.0
PATIENCE_SECONDS = 25.0


class Fault(NamedTuple):
    """One way in which ranks fail."""

    id: str
    name: str
    kind: str
    """The fault's name in `tests/programs/waiting_ranks.py`."""
    alert: str
    words: str
    """Words of the cause; `{rank}` is the last rank."""
    after: float = 0.0
    """Seconds after which the alert is expected."""
    beside: tuple[str, ...] = ()
    """Other alerts that are right, too."""


FAULTS = (
    Fault("D1", "uneven batches", "uneven", "Hang", "rank {rank} came to the end of its loader, after 200 batches",
          LIMIT_SECONDS, ("UnevenBatches",)),
    Fault("D2", "stuck in user code", "user-code", "Hang", "in wait_for_the_file", LIMIT_SECONDS),
    Fault("D2", "a lock", "lock", "Hang", "in wait_for_a_lock", LIMIT_SECONDS),
    Fault("D2", "GIL held", "gil", "Hang", "rank {rank} holds the GIL at ", LIMIT_SECONDS),
    Fault("D3", "SIGKILL", "killed", "RankLost", "rank {rank} was ended by SIGKILL", 1.0),
    Fault("D3", "segmentation fault", "crash", "RankLost", "rank {rank} was ended by SIGSEGV", 1.0),
    Fault("D3", "os._exit", "exit", "RankLost", "rank {rank} ended itself with exit status 3", 1.0),
    Fault("D4", "mismatched collectives", "mismatch", "CollectiveDesync", "rank {rank} broadcast of 3", LIMIT_SECONDS,
          ("Hang",)),
    Fault("D5", "a replica drifts", "drift", "ReplicaDivergence", "", 2.0),
    Fault("D6", "what takes long with reason", "long", "", ""),
)  # fmt: skip


TRIALS = 20 * len(FAULTS)
SAMPLE: tuple[int, ...] = ()
"""Empty: tests/hang has the same jobs."""


def run_trial(seed: int) -> dict[str, Any]:
    """Run one job, and check its alert or its silence."""
    number, kind = divmod(seed, len(FAULTS))
    fault, world = FAULTS[kind], 2 + 2 * (number % 2)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder, mock.patch.dict(os.environ, make_places(Path(folder))):
        limit = LIMIT_SECONDS if fault.alert else LONG_LIMIT_SECONDS
        rules = SOON.replace("> 3", f"> {limit}")
        with job(fault.kind, Path(folder), rules, world, LONG_SECONDS) as running:
            case = {"case": f"{fault.id} {fault.name}"}
            if fault.alert:
                return case | {"delay_seconds": _await_alert(fault, world, running)}
            _expect_silence(running)
            return case


def _await_alert(fault: Fault, world: int, running: Job) -> float:
    """Wait for the alert; return the seconds by which it came later than expected."""
    words, cases = fault.words.format(rank=world - 1), list[dict[str, Any]]()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        cases = list_incidents()
        for case in cases:
            if case["alert"] == fault.alert and words in cause(case) and _blames_last(case, world):
                others = {each["alert"] for each in cases} - {fault.alert, *fault.beside}
                assert not others, f"{cause(case)}; and {others}"
                return float(case["time"] - running.stalled - fault.after)
        time.sleep(0.2)
    raise AssertionError(f"no {fault.alert}: {[(each['alert'], cause(each)) for each in cases]}")


def _blames_last(case: dict[str, Any], world: int) -> bool:
    """Return whether a case blames the last rank; of two differing replicas none can be blamed."""
    text = cause(case)
    return f"rank {world - 1}" in text or (world == 2 and "ranks 0, 1 hold different" in text)


def _expect_silence(running: Job) -> None:
    cases: list[dict[str, Any]] = []
    while running.process.poll() is None and not cases:
        cases = list(ask(RUN_ID, "incidents"))
        time.sleep(0.2)
    cases = cases or list_incidents()
    assert not cases, [(each["alert"], each["summary"], cause(each)) for each in cases]
    assert running.process.returncode == 0
