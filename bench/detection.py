"""What the stock rules find in recorded runs, and what they say of healthy ones: writes docs/detection.md.

    python bench/detection.py --data FOLDER             # or SENTINEL_RECORDED_RUNS=FOLDER
    python bench/detection.py --data FOLDER --check     # does docs/detection.md say what comes out?

FOLDER has `labels.csv` (run, kind, domain, source, truth, ...) and `runs/KIND/RUN.jsonl.gz`; docs/detection.md says
what the runs are, and where they come from. Runs that were replayed are kept in build/detection.jsonl, by the content
of rules, engine and readers: a bench that was stopped goes on, and the same files give the same page.

The runs are split in two by source (`TUNED_ON`): runs of one project share models, data sets and bad batches.
Thresholds are looked for on `tuning` alone. The detectors of others (bench/peers.py) are played over the same rows.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import operator
import os
import statistics
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sentinel import logs, rulebook
from sentinel.engine.backtest import backtest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from peers import PEERS  # noqa: E402 (a bench is a file, not a package)

PAGE = ROOT / "docs" / "detection.md"
KEPT = ROOT / "build" / "detection.jsonl"
KINDS = ("healthy", "healthy_event", "faulty")
HALVES = ("tuning", "held out")
TUNED_ON = frozenset(
    {"algoperf", "bigscience", "deepspeed-chat", "detectron2", "llm-action", "megatron-golden", "mlperf"}
)
"""Sources of the half `tuning`. The others are deepobs, whose are nearly all late NaNs, and modded-nanogpt."""
BOTH = "both"
APART = 50
"""Rows without a flag after which a peer's next one is another alarm: as long as LossSpike keeps firing."""
LATE_ROWS = 150
"""Rows before a NaN from which on it could have been foreseen: LossSpike needs about 50 to know a run."""


class Label(msgspec.Struct, frozen=True):
    """A row of labels.csv."""

    run: str
    kind: str
    domain: str
    source: str
    truth: str
    repo: str
    commit: str
    licence: str

    @property
    def half(self) -> str:
        """Which half of the data it is in."""
        return HALVES[self.source not in TUNED_ON]


class Alarm(msgspec.Struct, frozen=True):
    """An alert, by the row at which it fired."""

    rule: str
    severity: str
    row: int


class Found(msgspec.Struct, frozen=True):
    """A run, replayed."""

    run: str
    rows: int
    nonfinite: int | None
    """The first row whose loss or gradient norm is NaN or infinite."""
    alarms: tuple[Alarm, ...]
    blind: tuple[str, ...]
    """Rules that made no judgement."""
    peers: dict[str, tuple[int, ...]]
    """The rows at which each detector of others raised an alarm."""

    def first(self, severity: str = "critical", *, before: float = math.inf) -> Alarm | None:
        """Its first alarm."""
        return next((a for a in self.alarms if a.severity == severity and a.row < before), None)


def replayed(path: Path) -> Found:
    """Apply the stock rules to one log."""
    rules = rulebook.load().rules
    (recording,) = logs.read(path)
    wanted = sorted(set().union(*(rule.metrics for rule in rules)))
    names = logs.chosen(recording.names, wanted, {})
    rules = tuple(rule for rule in rules if recording.timed or not rule.timed)
    observations = list(recording.observations(names))
    report = backtest(rules, observations, run=path.stem)
    steps = [observation.seq for observation in observations]  # none of these logs goes back
    bad = [
        bisect_left(steps, step)
        for metric in ("loss", "grad_norm")
        if metric in names
        for step, value in zip(*recording.series(names[metric]), strict=True)
        if not math.isfinite(value)
    ]
    return Found(
        run=path.name.removesuffix(".jsonl.gz"),
        rows=report.steps,
        nonfinite=min(bad, default=None),
        alarms=tuple(Alarm(a.alert, a.severity, bisect_left(steps, a.step)) for a in report.alerts),
        blind=tuple(looked.rule for looked in report.rules if not looked.judged),
        peers=played(recording, names, steps),
    )


def played(recording: logs.Recording, names: Mapping[str, str], steps: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """What the detectors of others say, at the rows that have a loss; of the norms where each of those has one."""
    if "loss" not in names:
        return dict.fromkeys(PEERS, ())
    at, losses = recording.series(names["loss"])
    norms = dict(zip(*recording.series(names["grad_norm"]), strict=True)) if "grad_norm" in names else {}
    series = np.array([norms[step] for step in at]) if norms.keys() >= set(at) else None
    found = {}
    with np.errstate(all="ignore"):  # overflows are what the runs are about
        for name, detector in PEERS.items():
            flagged = np.flatnonzero(detector(np.array(losses), series)).tolist()
            first = [row for row, before in zip(flagged, [-APART - 1, *flagged], strict=False) if row - before > APART]
            found[name] = tuple(bisect_left(steps, at[row]) for row in first)
    return found


def results(paths: Sequence[Path], jobs: int) -> dict[str, Found]:
    """Every run by name: kept ones as they are, the others replayed and kept."""
    KEPT.parent.mkdir(exist_ok=True)
    digest = digest_of_code()
    found: dict[str, Found] = {}
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        entry = json.loads(line)
        if entry["digest"] == digest:
            found[entry["found"]["run"]] = msgspec.convert(entry["found"], Found)
    missing = [path for path in paths if path.name.removesuffix(".jsonl.gz") not in found]
    with KEPT.open("a") as kept:
        for count, result in enumerate(_replayed_all(missing, jobs), 1):
            found[result.run] = result
            kept.write(json.dumps({"digest": digest, "found": msgspec.to_builtins(result)}) + "\n")
            kept.flush()
            if sys.stderr.isatty():
                print(f"\r{count} of {len(missing)}", end="", file=sys.stderr, flush=True)
    return found


def _replayed_all(paths: Sequence[Path], jobs: int) -> Iterator[Found]:
    if jobs == 1:
        yield from map(replayed, paths)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(replayed, paths)


def digest_of_code() -> str:
    """What the results depend on, beside the data."""
    files = [
        *(ROOT / "rules").glob("*.yaml"),
        *(ROOT / "sentinel/engine").glob("*.py"),
        *(ROOT / "sentinel/logs").glob("*.py"),
        *(ROOT / "bench").glob("peers.py"),
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def share(part: int, whole: int) -> str:
    """`3 of 40 (1 to 20 %)`, with Wilson's interval at 95 %."""
    if not whole:
        return "none there"
    z, p = 1.96, part / whole
    middle, spread = p + z * z / (2 * whole), z * math.sqrt(p * (1 - p) / whole + z * z / (4 * whole * whole))
    low, high = ((middle + sign * spread) / (1 + z * z / whole) for sign in (-1, 1))
    return f"{part} of {whole} ({max(low, 0):.0%} to {high:.0%})".replace("%", " %")


def rate(count: int, rows: int) -> str:
    """Alarms in 10,000 rows, with the exact Poisson interval at 95 %."""
    if not rows:
        return "none there"

    def bound(target: Callable[[float], bool]) -> float:
        low, high = 0.0, 10.0 * count + 20.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if target(middle) else (low, middle)
        return low

    lowest = bound(lambda mean: 1 - below(count - 1, mean) < 0.025) if count else 0.0
    highest = bound(lambda mean: below(count, mean) > 0.025)
    per = 10_000 / rows
    return f"{count * per:.3f} ({lowest * per:.3f} to {highest * per:.3f})"


def below(count: int, mean: float) -> float:
    """P(X <= count) of a Poisson variable."""
    return (
        math.fsum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(count + 1)) if mean else 1.0
    )


Runs = list[tuple[Label, Found]]


def page(runs: Runs) -> str:
    """docs/detection.md."""
    healthy = ("", "half", "runs", "rows", "with a critical alarm", "with a warning", "critical alarms in 10,000 rows")
    bad = ("", "half", "found by a critical alarm", "foreseen", "rows before the NaN, median")
    parts = [
        PAGE.read_text().partition("<!-- measured -->")[0] + "<!-- measured -->\n",
        "## Healthy runs\n",
        *table(healthy, quiet(runs)),
        "## Faulty runs\n",
        *table(bad, faulty(runs)),
        "## Beside the detectors of others\n",
        "First of all critical alarms of the stock rules, then of their warnings, then of each detector, at its own\n"
        "defaults; an alarm is a flagged row without another in the 50 before. `foreseen`: a NaN after "
        f"{LATE_ROWS} rows or more.\n",
        *table(
            (
                "",
                "half",
                "healthy runs with an alarm",
                "with an event",
                "alarms in 10,000 healthy rows",
                "foreseen",
                "NaN told by its row",
                "found of those without NaN",
            ),
            compared(runs),
        ),
        "Who is first on faulty runs: the first critical alarm of the stock rules, or the first of each detector.\n",
        *table(RACE, raced(runs)),
        *later(runs),
        "## Rule by rule\n",
        "Runs in which a rule fired, of those in which it could look.\n",
        *table(("rule", "half", "healthy", "healthy, with an event", "faulty"), by_rule(runs)),
        f"Could look in none, for want of what they read: {', '.join(never(runs))}.\n",
        "## Every critical alarm on a run that ended well\n",
        *table(("run", "half", "alarm", "row", "what is known of the run"), alarmed(runs)),
        "## Every faulty run without a critical alarm\n",
        *table(("run", "half", "rows", "what is known of the run"), missed(runs)),
        "## Where the runs come from\n",
        *table(("source", "runs", "repository", "commit", "licence"), origins(runs)),
    ]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return [*lines, *("| " + " | ".join(str(cell).replace(" |", ";") for cell in row) + " |" for row in rows), ""]


def of(runs: Runs, half: str, *kinds: str) -> list[tuple[Label, Found]]:
    return [(label, found) for label, found in runs if half in (label.half, BOTH) and label.kind in kinds]


def quiet(runs: Runs) -> Iterator[Sequence[object]]:
    for kind in KINDS[:2]:
        for half in (*HALVES, BOTH):
            mine = of(runs, half, kind)
            rows = sum(found.rows for _, found in mine)
            criticals = [sum(a.severity == "critical" for a in found.alarms) for _, found in mine]
            warned = sum(any(a.severity == "warning" for a in found.alarms) for _, found in mine)
            alarmed_runs, name = sum(map(bool, criticals)), kind.replace("_", ", with an ")
            counts = (share(alarmed_runs, len(mine)), share(warned, len(mine)), rate(sum(criticals), rows))
            yield name, half, len(mine), f"{rows:,}", *counts


def faulty(runs: Runs) -> Iterator[Sequence[object]]:
    classes: dict[str, Callable[[Found], bool]] = {
        f"NaN after {LATE_ROWS} rows or more": lambda f: f.nonfinite is not None and f.nonfinite >= LATE_ROWS,
        "NaN before": lambda f: f.nonfinite is not None and f.nonfinite < LATE_ROWS,
        "no NaN": lambda f: f.nonfinite is None,
    }
    for name, belongs in classes.items():
        for half in (*HALVES, BOTH):
            mine = [found for _, found in of(runs, half, "faulty") if belongs(found)]
            seen = sum(found.first() is not None for found in mine)
            leads = [
                found.nonfinite - alarm.row
                for found in mine
                if found.nonfinite is not None and (alarm := found.first(before=found.nonfinite)) is not None
            ]
            foreseen = share(len(leads), len(mine)) if "NaN " in name else ""
            yield name, half, share(seen, len(mine)), foreseen, f"{statistics.median(leads):.0f}" if leads else ""


def alarms_of(found: Found) -> dict[str, tuple[int, ...]]:
    """The rows of all alarms, by who raised them."""
    mine = {
        f"stock rules, {severity}": tuple(alarm.row for alarm in found.alarms if alarm.severity == severity)
        for severity in ("critical", "warning")
    }
    return mine | found.peers


def late(found: Found) -> bool:
    """Whether its NaN could have been foreseen."""
    return found.nonfinite is not None and found.nonfinite >= LATE_ROWS


def compared(runs: Runs) -> Iterator[Sequence[object]]:
    for name in alarms_of(runs[0][1]):
        for half in (*HALVES, BOTH):
            cells = []
            for kind in KINDS[:2]:
                mine = [alarms_of(found)[name] for _, found in of(runs, half, kind)]
                cells.append(share(sum(map(bool, mine)), len(mine)))
            healthy = [found for _, found in of(runs, half, *KINDS[:2])]
            count = sum(len(alarms_of(found)[name]) for found in healthy)
            cells.append(rate(count, sum(found.rows for found in healthy)))
            faults = [(found.nonfinite, alarms_of(found)[name], late(found)) for _, found in of(runs, half, "faulty")]
            doomed = [any(row < nan for row in rows) for nan, rows, could in faults if nan is not None and could]
            told = [any(row <= nan for row in rows) for nan, rows, _ in faults if nan is not None]
            others = [bool(rows) for nan, rows, _ in faults if nan is None]
            yield name, half, *cells, *(share(sum(found), len(found)) for found in (doomed, told, others))


RACE = ("detector", "healthy runs with an alarm", "faulty runs with one", "stock rules earlier", "at the same row",
        "later", "never")  # fmt: skip


def raced(runs: Runs) -> Iterator[Sequence[object]]:
    """Of the faulty runs on which a detector raises an alarm, on how many the stock rules are first."""
    for name in PEERS:
        wrong = sum(bool(found.peers[name]) for label, found in runs if label.kind == "healthy")
        pairs = [(found.first(), found.peers[name][0]) for _, found in of(runs, BOTH, "faulty") if found.peers[name]]
        rows = [(mine.row, theirs) for mine, theirs in pairs if mine is not None]
        counts = [sum(compare(*pair) for pair in rows) for compare in (operator.lt, operator.eq, operator.gt)]
        yield name, wrong, len(pairs), *counts, len(pairs) - len(rows)


def later(runs: Runs) -> Iterator[str]:
    """Runs on which a detector that says nothing of healthy runs was earlier than the stock rules."""
    silent = [name for name in PEERS if not any(found.peers[name] for label, found in runs if label.kind == "healthy")]
    yield f"Of these say nothing of any run of the kind `healthy`: {', '.join(silent) or 'none'}.\n"
    beaten = []
    for label, found in runs:
        theirs = {name: found.peers[name][0] for name in silent if found.peers[name]}
        mine = found.first()
        if label.kind == "faulty" and theirs and (mine is None or mine.row > min(theirs.values())):
            name = min(theirs, key=theirs.__getitem__)
            beaten.append((label.run, label.half, name, theirs[name], mine.row if mine else "never"))
    if not beaten:
        yield "On no faulty run was one of those earlier than the first critical alarm of the stock rules.\n"
        return
    yield "Faulty runs on which one of those was earlier than the first critical alarm of the stock rules:\n"
    yield from table(("run", "half", "who", "at row", "stock rules"), beaten)


def by_rule(runs: Runs) -> Iterator[Sequence[object]]:
    for rule in rulebook.load().rules:
        for half in HALVES if any(rule.name not in found.blind for _, found in runs) else ():
            cells = []
            for kind in KINDS:
                looked = [found for _, found in of(runs, half, kind) if rule.name not in found.blind]
                fired = sum(any(alarm.rule == rule.name for alarm in found.alarms) for found in looked)
                cells.append(f"{fired} of {len(looked)}")
            yield rule.name, half, *cells


def never(runs: Runs) -> list[str]:
    return [rule.name for rule in rulebook.load().rules if all(rule.name in found.blind for _, found in runs)]


def alarmed(runs: Runs) -> Iterator[Sequence[object]]:
    for label, found in runs:
        if label.kind in KINDS[:2] and (alarm := found.first()) is not None:
            yield label.run, label.half, alarm.rule, alarm.row, label.truth or "nothing"


def missed(runs: Runs) -> Iterator[Sequence[object]]:
    for label, found in runs:
        if label.kind == "faulty" and found.first() is None:
            yield label.run, label.half, found.rows, label.truth


def origins(runs: Runs) -> Iterator[Sequence[object]]:
    counts = Counter((label.source, label.repo, label.commit, label.licence) for label, _ in runs)
    for (source, repo, commit, licence), count in sorted(counts.items()):
        yield source, count, repo, commit, licence


def main() -> int:
    parser = argparse.ArgumentParser(description="What the stock rules find in recorded runs.")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("SENTINEL_RECORDED_RUNS"), help="folder with labels.csv and runs/"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where the page says something else"
    )
    asked: Any = parser.parse_args()
    if asked.data is None or not (Path(asked.data) / "labels.csv").is_file():
        parser.error("--data FOLDER: there must be a labels.csv in it; see docs/detection.md")
    with (Path(asked.data) / "labels.csv").open(newline="") as file:
        labels = [Label(*(row[name] for name in Label.__struct_fields__)) for row in csv.DictReader(file)]
    scored = [label for label in labels if label.kind in KINDS]
    paths = [Path(asked.data) / "runs" / label.kind / f"{label.run}.jsonl.gz" for label in scored]
    found = results(paths, asked.jobs)
    text = page([(label, found[label.run]) for label in scored])
    if asked.check:
        return int(text != PAGE.read_text())
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
