"""Runs a long proof in pieces: seeded trials of a part, whose results are kept so that a stopped proof can continue.

    make proof PART=resume                        30 more minutes of the trials that are not done yet
    make proof PART=resume MINUTES=5 WORKERS=2    a shorter piece, two trials at a time
    make proof                                    only show what is done of every part

A part is a module of bench/proofs with `TRIALS` (how many seeds make the proof), `SAMPLE` (the seeds that the tests run
each time: tests/test_proofs.py) and `run_trial(seed)`, which raises AssertionError if the promise is broken and
otherwise returns a dict of what it counted: "case" names the kind of trial; integers are added up; of floats the median
and the largest are shown.

Results are kept in build/proofs/PART.jsonl with the commit they were measured at. The exit status is 1 while any trial
has failed, 0 if all trials that were run held.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "proofs"


def list_parts() -> list[str]:
    return sorted(path.stem for path in (ROOT / "bench" / "proofs").glob("*.py") if not path.stem.startswith("_"))


def load_part(name: str) -> ModuleType:
    return importlib.import_module(f"bench.proofs.{name.replace('-', '_')}")


def run_seed(name: str, seed: int) -> dict[str, Any]:
    """Run one trial; return what it counted, or why it failed."""
    begun = time.monotonic()
    outcome: dict[str, Any] = {"seed": seed, "commit": read_commit()}
    try:
        outcome["counted"] = load_part(name).run_trial(seed) or {}
        outcome["held"] = True
    except Exception as error:
        outcome["held"] = False
        outcome["why"] = f"{type(error).__name__}: {error}"
        outcome["trace"] = traceback.format_exc()
    outcome["seconds"] = round(time.monotonic() - begun, 1)
    return outcome


def read_commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def read_kept(name: str) -> dict[int, dict[str, Any]]:
    """Return outcomes by seed, without a line that was cut off when the command was ended: its trial is run again."""
    kept: dict[int, dict[str, Any]] = {}
    path = KEPT / f"{name}.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            outcome = json.loads(line)
        except ValueError:
            continue
        kept[outcome["seed"]] = outcome
    return kept


def run_piece(name: str, *, minutes: float, workers: int, first: int) -> None:
    """Run the trials that are not done or did not hold, until the time is up."""
    trials, kept = load_part(name).TRIALS, read_kept(name)
    waiting = collections.deque(seed for seed in range(first, trials) if not kept.get(seed, {}).get("held"))
    end = time.monotonic() + 60 * minutes
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{name}.jsonl").open("a", encoding="utf-8") as file, ProcessPoolExecutor(workers) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < workers and time.monotonic() < end:
                running.add(pool.submit(run_seed, name, waiting.popleft()))
            done, running = wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                outcome = future.result()
                file.write(json.dumps(outcome) + "\n")
                file.flush()
                if not outcome["held"]:
                    print(f"{name} {outcome['seed']}: {outcome['why']}", flush=True)


def summarise(name: str) -> bool:
    """Print one line about a part, and one for each kind of trial; return whether no trial failed."""
    kept = [outcome for seed, outcome in sorted(read_kept(name).items()) if seed < load_part(name).TRIALS]
    failed = [outcome for outcome in kept if not outcome["held"]]
    commits = ", ".join(sorted({outcome["commit"] for outcome in kept}))
    print(
        f"{name}: {len(kept)} of {load_part(name).TRIALS} trials done, {len(failed)} failed ({commits or 'none run'})"
    )
    cases: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for outcome in kept:
        counted = outcome.get("counted", {})
        cases[counted.get("case", "")].append({"trials": 1, **counted})
    for case, trials in sorted(cases.items()):
        values = {key: [trial[key] for trial in trials if key in trial] for key in trials[0] if key != "case"}
        print("  ", case, ", ".join(f"{key} {summarise_values(several)}" for key, several in values.items()))
    for outcome in failed:
        print(f"   failed: seed {outcome['seed']}: {outcome['why']}")
    return not failed


def summarise_values(values: list[float]) -> str:
    if any(isinstance(value, float) for value in values):
        return f"{statistics.median(values):.3g} (at most {max(values):.3g})"
    return f"{sum(values)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", help=", ".join(list_parts()))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--first", type=int, default=0, help="seed to begin at: those before it were run elsewhere")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    options = parser.parse_args()
    if options.part:
        if options.part.replace("-", "_") not in list_parts():
            parser.error(f"no part {options.part!r}: there are {', '.join(list_parts())}")
        run_piece(options.part.replace("-", "_"), minutes=options.minutes, workers=options.workers, first=options.first)
    parts = [options.part.replace("-", "_")] if options.part else list_parts()
    return 0 if all([summarise(part) for part in parts]) else 1


if __name__ == "__main__":
    sys.exit(main())
