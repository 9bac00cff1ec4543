"""Measures what the stock rules find in recorded runs, faulty and healthy ones, and writes docs/detection.md.

    python -m bench.detection --data FOLDER             # or SENTINEL_RECORDED_RUNS=FOLDER
    python -m bench.detection --data FOLDER --check     # does docs/detection.md say what comes out?

FOLDER has `labels.csv` (run, kind, domain, source, truth, ...) and `runs/KIND/RUN.jsonl.gz`; docs/detection.md says
what the runs are, and where they come from. Results are kept in build/detection.jsonl with a digest of the rules, the
engine and the readers: a bench that was stopped continues, and the same files give the same page.

The runs are split in two by source (`recorded.py`), because runs of one project share models, data sets and bad
batches. Thresholds are tuned on the half `tuning` alone. Other projects' detectors (`peers.py`) see the same rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.detection_page import page
from bench.pages import BUILD, DOCS, ROOT
from bench.peers import PLAYED
from bench.recorded import Alarm, Found, labels, rise
from sentinel.engine.backtest import backtest
from sentinel.rulebook import loader
from sentinel.toolkit import logs

PAGE = DOCS / "detection.md"
KEPT = BUILD / "detection.jsonl"
APART = 50
"""Rows without a flag after which a peer's next flag is a new alarm: as long as LossSpike keeps firing."""


def replay_log(path: Path) -> Found:
    """Apply the stock rules, and the peers, to one log."""
    stock = loader.load().rules
    (recording,) = logs.read(path)
    wanted = sorted(set().union(*(rule.metrics for rule in stock)))
    names = logs.choose_columns(recording.names, wanted, {})
    rules = tuple(rule for rule in stock if recording.timed or not rule.timed)
    observations = list(recording.observations(names))
    report = backtest(rules, observations, run=path.stem)
    steps = [observation.seq for observation in observations]  # none of these logs goes back
    series = {metric: recording.series(names[metric]) for metric in ("loss", "grad_norm") if metric in names}
    bad = {
        metric: [bisect_left(steps, step) for step, value in zip(at, values, strict=True) if not math.isfinite(value)]
        for metric, (at, values) in series.items()
    }
    at, losses = series.get("loss", ((), ()))
    begins = rise(losses)
    judged = {looked.rule for looked in report.rules if looked.judged}
    return Found(
        run=path.name.removesuffix(".jsonl.gz"),
        rows=report.steps,
        nonfinite=min((row for rows in bad.values() for row in rows), default=None),
        nonfinite_loss=bool(bad.get("loss")),
        risen=None if begins is None else bisect_left(steps, at[begins]),
        alarms=tuple(Alarm(a.alert, a.severity, bisect_left(steps, a.step)) for a in report.alerts),
        blind=tuple(rule.name for rule in stock if rule.name not in judged),
        peers=play_peers(recording, names, steps),
    )


def play_peers(recording: logs.Recording, names: Mapping[str, str], steps: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the rows at which each peer raises an alarm, from the losses, and the norms if each loss has one."""
    if "loss" not in names:
        return dict.fromkeys(PLAYED, ())
    at, losses = recording.series(names["loss"])
    norms = dict(zip(*recording.series(names["grad_norm"]), strict=True)) if "grad_norm" in names else {}
    series = np.array([norms[step] for step in at]) if norms.keys() >= set(at) else None
    found = {}
    with np.errstate(all="ignore"):  # overflows are expected in these runs
        for name, detector in PLAYED.items():
            flagged = np.flatnonzero(detector(np.array(losses), series)).tolist()
            first = [row for row, before in zip(flagged, [-APART - 1, *flagged], strict=False) if row - before > APART]
            found[name] = tuple(bisect_left(steps, at[row]) for row in first)
    return found


def results(paths: Sequence[Path], jobs: int) -> dict[str, Found]:
    """Return every run by name: kept results of the present code, and the other runs replayed (and then kept)."""
    KEPT.parent.mkdir(exist_ok=True)
    digest = digest_of_code()
    found: dict[str, Found] = {}
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        entry = json.loads(line)
        if entry["digest"] == digest:
            found[entry["found"]["run"]] = msgspec.convert(entry["found"], Found)
    missing = [path for path in paths if path.name.removesuffix(".jsonl.gz") not in found]
    with KEPT.open("a") as kept:
        for count, result in enumerate(_replay_all(missing, jobs), 1):
            found[result.run] = result
            kept.write(json.dumps({"digest": digest, "found": msgspec.to_builtins(result)}) + "\n")
            kept.flush()
            if sys.stderr.isatty():
                print(f"\r{count} of {len(missing)}", end="", file=sys.stderr, flush=True)
    return found


def _replay_all(paths: Sequence[Path], jobs: int) -> Iterator[Found]:
    if jobs == 1:
        yield from map(replay_log, paths)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(replay_log, paths)


def digest_of_code() -> str:
    """Return a digest of the files that the results depend on, besides the data."""
    files = [
        *(ROOT / "rules").glob("*.yaml"),
        *(ROOT / "sentinel/engine").glob("*.py"),
        *(ROOT / "sentinel/toolkit/logs").glob("*.py"),
        *(ROOT / "bench" / name for name in ("detection.py", "peers.py", "recorded.py")),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description="What the stock rules find in recorded runs.")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SENTINEL_RECORDED_RUNS"), help="folder with labels.csv and runs/"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where the page says something else"
    )
    options: Any = parser.parse_args()
    if options.data is None or not (Path(options.data) / "labels.csv").is_file():
        parser.error("--data FOLDER: there must be a labels.csv in it; see docs/detection.md")
    scored = labels(Path(options.data))
    paths = [Path(options.data) / "runs" / label.kind / f"{label.run}.jsonl.gz" for label in scored]
    found = results(paths, options.jobs)
    text = page([(label, found[label.run]) for label in scored], PAGE.read_text())
    if options.check:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
