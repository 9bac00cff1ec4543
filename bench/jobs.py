"""Break jobs of torchrun in each way that ends a job, and look what `sentinel run` makes of them.

    python bench/jobs.py                               ten jobs of two ranks for each of five faults
    python bench/jobs.py --jobs 2 --faults hang kill   a short one

A fault comes at a random step of the last rank: every other time once, and the job must be completed, from a checkpoint
before it; every other time always, and the job must be stopped when it comes again, with exit status 86 and the reason.
No process, socket, directory or shared memory may be left. What differs is printed, and the exit status is then 1.
`--results FILE` keeps what is done: started again, the script goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PROGRAM = Path(__file__).parent.parent / "tests" / "programs" / "breaking.py"
REASONS = {
    "hang": "Hang",
    "exit": "RankLost",
    "kill": "RankLost",
    "oom": "OutOfMemory",
    "nan": "NonFinite",
}
STOPPED = 86
FIRST, LAST = 60, 380
EVERY = 50
LIMIT_SECONDS = 240.0
GONE_SECONDS = 20.0
RULES = """
group: jobs
rules:
  - {alert: Hang, scope: rank, expr: stalled_seconds > 3, severity: critical, actions: [evidence, stacks, restart]}
  - {override: SlowStep, disable: true}
"""


def trial(fault: str, number: int, ranks: int) -> list[str]:
    """One job; what is wrong with how it ended."""
    always, step = number % 2 == 1, random.Random(f"{fault} {number}").randrange(FIRST, LAST)
    memory = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="j") as folder:
        root = Path(folder)
        (root / "rules.yaml").write_text(RULES)
        (root / "saved").mkdir()
        environment = {
            **os.environ,
            "SENTINEL_RUNTIME": str(root / "run"),
            "SENTINEL_STATE": str(root / "state"),
            "SENTINEL_RULES": str(root / "rules.yaml"),
            "OMP_NUM_THREADS": "1",
            "BREAKS_AT": str(step),
        }
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        training = [sys.executable, *torchrun, str(PROGRAM), str(root / "saved"), fault, *["always"][:always]]
        command = [sys.executable, "-m", "sentinel", "run", "--restarts", "3", "--pause", "0.1", "--", *training]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"not over in {LIMIT_SECONDS:.0f} s"]
        found = _ending(done, fault, always=always)
        starts = [line.split()[1] for line in (root / "saved" / f"starts.{ranks - 1}").read_text().splitlines()]
        expected = ["0", str(step // EVERY * EVERY)]
        if starts != expected and starts != [*expected[:1], str(max(step // EVERY * EVERY - EVERY, 0))]:
            found.append(f"began at {starts}, not at {expected}")
        return found + _left(root, memory)


def _ending(done: subprocess.CompletedProcess[str], fault: str, *, always: bool) -> list[str]:
    found = []
    said = " ".join(re.findall(r"^sentinel: (?!watching)(.*(?:\n  .*)*)", done.stderr, re.MULTILINE)).replace("\n ", "")
    if done.returncode != (STOPPED if always else 0):
        found.append(f"exit status {done.returncode}")
    if REASONS[fault] not in said:
        found.append("the reason is not told")
    if ("came back at step" if always else "the run is complete, after 1 restart") not in said:
        found.append("the end is not told")
    return [f"{each}: {said[-600:]}" for each in found]


def _left(root: Path, memory: set[str]) -> list[str]:
    """What there still is of a job. Its daemon goes a moment after it."""
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        left = [f"left: {path}" for path in (root / "run").glob("*")]
        left += [f"left: /dev/shm/{name}" for name in _shared_memory() - memory]
        for process in psutil.process_iter(["pid", "cmdline"]):
            if str(root) in (words := " ".join(process.info["cmdline"] or ())):
                left.append(f"left: process {process.pid}: {words[:200]}")
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10, help="of each fault")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults", nargs="+", choices=sorted(REASONS), default=list(REASONS))
    parser.add_argument("--results", type=Path, help="file of what is done; it is gone on from")
    options = parser.parse_args()
    results: dict[str, list[str]] = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text())
    for number in range(options.jobs):
        for fault in options.faults:
            key = f"{fault} {number}"
            if key not in results:
                results[key] = trial(fault, number, options.ranks)
                print(key, *(results[key] or ["as it should be"]), sep="\n  ", flush=True)
            if options.results is not None:
                options.results.write_text(json.dumps(results, indent=1))
    for fault in options.faults:
        ended = [found for key, found in results.items() if key.split()[0] == fault]
        print(f"{fault:<5} {sum(not found for found in ended)} of {len(ended)}")
    return 1 if any(results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
