"""The faults between ranks, D1 to D6, each reproduced again and again as a real torchrun job on gloo.

    python bench/ranks.py [--times 20] [--only D1 D4] [--fresh]

Every second job has four ranks, the others two. A job counts where the alert names the rank and says why, and no other
alert is told. Delays are from the moment at which the rank says that it stalls: of a hang less the limit, which is 3 s
here (a file of rules of its own; the stock limit is a minute), so that what is left is the daemon's own. D6 is silent
through an evaluation, an export, a checkpoint, a compilation and a declared phase, of 8 s each where 5 s are the limit,
and for 8 s beyond the loop.

Jobs that were run are kept in build/ranks.jsonl: a bench that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from tests.hang.jobs import RUN_ID, Job, cause, job, known  # noqa: E402 (a bench is a file, not a package)
from tests.hang.processes import SOON, ask  # noqa: E402

KEPT = ROOT / "build" / "ranks.jsonl"
LIMIT_SECONDS = 3.0
LONG_SECONDS, LONG_LIMIT_SECONDS = 8.0, 5.0
PATIENCE_SECONDS = 25.0
BAR_SECONDS = 1.0


class Fault(NamedTuple):
    """One way in which ranks fail."""

    id: str
    name: str
    kind: str
    """Of `tests/programs/waiting_ranks.py`."""
    alert: str
    words: str
    """Of the cause; `{rank}` is the last one."""
    after: float = 0.0
    """Seconds that the alert may take beside the bar."""
    beside: tuple[str, ...] = ()
    """Alerts that are right, too."""


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


class Result(NamedTuple):
    """Of one job."""

    kind: str
    number: int
    world: int
    ok: bool
    delay: float
    """Seconds over what the alert may take; 0 where none is to come."""
    said: str


def one(fault: Fault, number: int) -> Result:
    """Run one job."""
    world = 2 + 2 * (number % 2)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        for name, place in (("SENTINEL_RUNTIME", "run"), ("SENTINEL_STATE", "state"), ("XDG_CONFIG_HOME", "config")):
            os.environ[name] = str(Path(folder) / place)
        os.environ["OMP_NUM_THREADS"] = "1"
        limit = LIMIT_SECONDS if fault.alert else LONG_LIMIT_SECONDS
        rules = SOON.replace("> 3", f"> {limit}")
        with job(fault.kind, Path(folder), rules, world, LONG_SECONDS) as running:
            return _silent(fault, number, world, running) if not fault.alert else _told(fault, number, world, running)


def _told(fault: Fault, number: int, world: int, running: Job) -> Result:
    words, cases = fault.words.format(rank=world - 1), list[dict[str, Any]]()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        cases = known()
        for case in cases:
            if case["alert"] == fault.alert and words in cause(case) and _names(case, world):
                others = {each["alert"] for each in cases} - {fault.alert, *fault.beside}
                delay = case["time"] - running.stalled - fault.after
                told = f"{cause(case)}; and {others}" if others else cause(case)
                return Result(fault.kind, number, world, not others, delay, told)
        time.sleep(0.2)
    return Result(fault.kind, number, world, False, 0.0, str([(each["alert"], cause(each)) for each in cases]))


def _names(case: dict[str, Any], world: int) -> bool:
    """Whether it blames the last rank; of two replicas nobody can."""
    told = cause(case)
    return f"rank {world - 1}" in told or (world == 2 and "ranks 0, 1 hold different" in told)


def _silent(fault: Fault, number: int, world: int, running: Job) -> Result:
    cases: list[dict[str, Any]] = []
    while running.process.poll() is None and not cases:
        cases = list(ask(RUN_ID, "incidents"))
        time.sleep(0.2)
    cases = cases or known()
    return Result(fault.kind, number, world, not cases and running.process.returncode == 0, 0.0, str(
        [(each["alert"], each["summary"], cause(each)) for each in cases] or running.process.returncode
    ))  # fmt: skip


def kept() -> list[Result]:
    """Those that were run."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def table(results: Iterable[Result], times: int) -> str:
    """A row a fault."""
    rows = [f"{'fault':<34}{'right':>9}   {'delay over its time, median and most':<40}"]
    for fault in FAULTS:
        own = [each for each in results if each.kind == fault.kind][:times]
        if own:
            right = [each for each in own if each.ok]
            delays = [each.delay for each in right] if fault.alert else []
            spread = f"{statistics.median(delays):.2f} s, {max(delays):.2f} s" if delays else "silent"
            rows.append(f"{fault.id}  {fault.name:<30}{len(right):>3} of {len(own):<3}  {spread}")
    return "\n".join(rows)


def main() -> None:
    """Run what was not run yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=(), help="ids of faults, or kinds")
    parser.add_argument("--fresh", action="store_true", help="forget what was run")
    options = parser.parse_args()
    KEPT.parent.mkdir(exist_ok=True)
    if options.fresh:
        KEPT.unlink(missing_ok=True)
    done = {(each.kind, each.number) for each in kept()}
    for number in range(options.times):
        for fault in FAULTS:
            wanted = not options.only or fault.id in options.only or fault.kind in options.only
            if not wanted or (fault.kind, number) in done:
                continue
            result = one(fault, number)
            with KEPT.open("a") as file:
                file.write(json.dumps(result._asdict()) + "\n")
            print(f"{fault.id} {fault.kind} {number}: {'right' if result.ok else 'WRONG'} {result.delay:.2f} s  "
                  f"{result.said if not result.ok else ''}", flush=True)  # fmt: skip
    print(table(kept(), options.times))


if __name__ == "__main__":
    main()
