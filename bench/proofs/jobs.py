"""Breaks torchrun jobs in each way that ends a job, and checks how `sentinel run` handles them.

A fault comes at a random step of the last of two ranks. In half of the trials it comes once, and the job must be
completed from a checkpoint before it; in the others it comes at each start, and the job must be stopped at its second
time, with exit status 86 and the reason. No process, socket, directory or shared memory may be left.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.places import make_places

PROGRAM = Path(__file__).parents[2] / "tests" / "programs" / "breaking.py"
REASONS = {
    "hang": "Hang",
    "exit": "RankLost",
    "kill": "RankLost",
    "oom": "OutOfMemory",
    "nan": "NonFinite",
}
TRIALS = 10 * len(REASONS)
SAMPLE: tuple[int, ...] = ()
"""Empty: tests/supervise runs the same program."""
RANKS = 2
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


def run_trial(seed: int) -> dict[str, Any]:
    """Run one job, and check its end."""
    number, kind = divmod(seed, len(REASONS))
    fault, always = list(REASONS)[kind], number % 2 == 1
    step = random.Random(f"{fault} {number}").randrange(FIRST, LAST)
    memory = _list_shared_memory()
    with tempfile.TemporaryDirectory(prefix="j") as folder:
        root = Path(folder)
        (root / "rules.yaml").write_text(RULES)
        (root / "saved").mkdir()
        more = {"SENTINEL_RULES": str(root / "rules.yaml"), "BREAKS_AT": str(step)}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        training = [sys.executable, *torchrun, str(PROGRAM), str(root / "saved"), fault, *["always"][:always]]
        command = [sys.executable, "-m", "sentinel", "run", "--restarts", "3", "--pause", "0.1", "--", *training]
        environment = {**os.environ, **make_places(root), **more}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        _check_ending(done, fault, always=always)
        starts = [line.split()[1] for line in (root / "saved" / f"starts.{RANKS - 1}").read_text().splitlines()]
        saved = step // EVERY * EVERY
        assert starts in (["0", str(saved)], ["0", str(max(saved - EVERY, 0))]), f"began at {starts}, broke at {step}"
        _check_nothing_is_left(root, memory)
    return {"case": f"{fault}, {'always' if always else 'once'}"}


def _check_ending(done: subprocess.CompletedProcess[str], fault: str, *, always: bool) -> None:
    said = " ".join(re.findall(r"^sentinel: (?!watching)(.*(?:\n  .*)*)", done.stderr, re.MULTILINE)).replace("\n ", "")
    assert done.returncode == (STOPPED if always else 0), f"exit status {done.returncode}: {said[-600:]}"
    end = "came back at step" if always else "the run is complete, after 1 restart"
    for words in (REASONS[fault], end):
        assert words in said, f"no {words!r} in: {said[-600:]}"


def _check_nothing_is_left(root: Path, memory: set[str]) -> None:
    """Check that nothing is left, waiting for the daemon, which ends a moment after its job."""
    deadline = time.monotonic() + GONE_SECONDS
    while left := _list_left(root, memory):
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.2)


def _list_left(root: Path, memory: set[str]) -> list[str]:
    left = [str(path) for path in (root / "run").glob("*")]
    left += [f"/dev/shm/{name}" for name in _list_shared_memory() - memory]
    for process in psutil.process_iter(["pid", "cmdline"]):
        if str(root) in (words := " ".join(process.info["cmdline"] or ())):
            left.append(f"process {process.pid}: {words[:200]}")
    return left


def _list_shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
