"""Writes the second half of docs/detection.md: what was found in recorded runs, as tables."""

from __future__ import annotations

import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.pages import make_table
from bench.peers import FIRST_TRY, PEERS, PLAYED
from bench.recorded import BOTH, HALVES, KINDS, LATE_ROWS, Found, Runs, of, rate, share
from sentinel.rulebook import loader

MARK = "<!-- measured -->"

HEALTHY = ("", "half", "runs", "rows", "with a critical alarm", "with a warning", "critical alarms in 10,000 rows")
FAULTY = ("", "half", "found by a critical alarm", "foreseen", "rows before the NaN, median")
DIVERGED = ("run", "half", "it begins at row", "first critical alarm", "at row", "rows later")
COMPARED = ("", "half", "healthy runs with an alarm", "with an event", "alarms in 10,000 healthy rows", "foreseen",
            "NaN told by its row", "found of those without NaN")  # fmt: skip
RACED = ("detector", "healthy runs with an alarm", "faulty runs with one", "stock rules earlier", "at the same row",
         "later", "never")  # fmt: skip


def page(runs: Runs, old: str) -> str:
    """Return the page: what is written by hand, up to the mark, and then what was measured."""
    parts = [
        old.partition(MARK)[0] + MARK + "\n",
        "## Healthy runs\n",
        *table(HEALTHY, count_false_alarms(runs)),
        "## Faulty runs\n",
        *table(FAULTY, count_found(runs)),
        "## Divergences without a NaN\n",
        "Of the runs whose label says that they diverged, or were unstable from the start, those whose loss is always\n"
        "finite. A divergence begins at the first of 30 rows in a row that lie half over the lowest one before them.\n",
        *table(("", "half", "found by a critical alarm"), count_divergences(runs)),
        *table(DIVERGED, list_divergences(runs)),
        "## Beside the detectors of others\n",
        "First of all critical alarms of the stock rules, then of their warnings, then of each detector, at its own\n"
        "defaults; an alarm is a flagged row without another in the 50 before. `foreseen`: a NaN after "
        f"{LATE_ROWS} rows or more.\n`{FIRST_TRY}` is nobody's: the rule that ours began with, tuned on both halves.\n",
        *table(COMPARED, compare_detectors(runs)),
        "Who is first on faulty runs: the first critical alarm of the stock rules, or the first of each detector.\n",
        *table(RACED, race_detectors(runs)),
        *list_later(runs),
        "## Rule by rule\n",
        "Runs in which a rule fired, of those in which it judged: what it reads is in the log, and times where it\n"
        "counts seconds.\n",
        *table(("rule", "half", "healthy", "healthy, with an event", "faulty"), count_by_rule(runs)),
        f"Could look in none, for want of what they read: {', '.join(list_blind(runs))}.\n",
        "## Every critical alarm on a run that ended well\n",
        *table(("run", "half", "alarm", "row", "what is known of the run"), list_alarmed(runs)),
        "## Every faulty run without a critical alarm\n",
        *table(("run", "half", "rows", "warning, at row", "what is known of the run"), list_missed(runs)),
        "## Where the runs come from\n",
        *table(("source", "runs", "repository", "commit", "licence"), origins(runs)),
    ]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [make_table(head, ([str(cell).replace(" |", ";") for cell in row] for row in rows)), ""]


def count_false_alarms(runs: Runs) -> Iterator[Sequence[object]]:
    for kind in KINDS[:2]:
        for half in (*HALVES, BOTH):
            mine = of(runs, half, kind)
            rows = sum(found.rows for _, found in mine)
            criticals = [sum(a.severity == "critical" for a in found.alarms) for _, found in mine]
            warned = sum(any(a.severity == "warning" for a in found.alarms) for _, found in mine)
            alarmed_runs, name = sum(map(bool, criticals)), kind.replace("_", ", with an ")
            counts = (share(alarmed_runs, len(mine)), share(warned, len(mine)), rate(sum(criticals), rows))
            yield name, half, len(mine), f"{rows:,}", *counts


def count_found(runs: Runs) -> Iterator[Sequence[object]]:
    classes: dict[str, Callable[[Found], bool]] = {
        f"NaN after {LATE_ROWS} rows or more": lambda f: f.late,
        "NaN before": lambda f: f.nonfinite is not None and not f.late,
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


def finite_divergences(runs: Runs, half: str) -> Runs:
    return [(label, f) for label, f in of(runs, half, "faulty") if label.diverged and not f.nonfinite_loss]


def count_divergences(runs: Runs) -> Iterator[Sequence[object]]:
    classes: dict[str, Callable[[Found], bool]] = {
        f"after {LATE_ROWS} rows or more": lambda f: f.risen is not None and f.risen >= LATE_ROWS,
        "before": lambda f: f.risen is not None and f.risen < LATE_ROWS,
        "not for 30 rows": lambda f: f.risen is None,
    }
    for name, belongs in classes.items():
        for half in (*HALVES, BOTH):
            mine = [found for _, found in finite_divergences(runs, half) if belongs(found)]
            yield name, half, share(sum(found.first() is not None for found in mine), len(mine))


def list_divergences(runs: Runs) -> Iterator[Sequence[object]]:
    for label, found in finite_divergences(runs, BOTH):
        alarm, begins = found.first(), found.risen
        rule, row = (alarm.rule, alarm.row) if alarm else ("none", "")
        delay = alarm.row - begins if alarm and begins is not None else ""
        yield label.run, label.half, "" if begins is None else begins, rule, row, delay


def alarms_of(found: Found) -> dict[str, tuple[int, ...]]:
    """Return the rows of all alarms, by what raised them."""
    mine = {
        f"stock rules, {severity}": tuple(alarm.row for alarm in found.alarms if alarm.severity == severity)
        for severity in ("critical", "warning")
    }
    return mine | found.peers


def compare_detectors(runs: Runs) -> Iterator[Sequence[object]]:
    for name in alarms_of(runs[0][1]):
        for half in (*HALVES, BOTH):
            cells = []
            for kind in KINDS[:2]:
                mine = [alarms_of(found)[name] for _, found in of(runs, half, kind)]
                cells.append(share(sum(map(bool, mine)), len(mine)))
            healthy = [found for _, found in of(runs, half, *KINDS[:2])]
            count = sum(len(alarms_of(found)[name]) for found in healthy)
            cells.append(rate(count, sum(found.rows for found in healthy)))
            faults = [(found.nonfinite, alarms_of(found)[name], found.late) for _, found in of(runs, half, "faulty")]
            doomed = [any(row < nan for row in rows) for nan, rows, late in faults if nan is not None and late]
            by_then = [any(row <= nan for row in rows) for nan, rows, _ in faults if nan is not None]
            others = [bool(rows) for nan, rows, _ in faults if nan is None]
            yield name, half, *cells, *(share(sum(found), len(found)) for found in (doomed, by_then, others))


def race_detectors(runs: Runs) -> Iterator[Sequence[object]]:
    """Yield for each peer, of the faulty runs on which it raises an alarm, on how many the stock rules are first."""
    for name in PLAYED:
        wrong = sum(bool(found.peers[name]) for label, found in runs if label.kind == "healthy")
        pairs = [(found.first(), found.peers[name][0]) for _, found in of(runs, BOTH, "faulty") if found.peers[name]]
        rows = [(mine.row, theirs) for mine, theirs in pairs if mine is not None]
        counts = [sum(compare(*pair) for pair in rows) for compare in (operator.lt, operator.eq, operator.gt)]
        yield name, wrong, len(pairs), *counts, len(pairs) - len(rows)


def list_later(runs: Runs) -> Iterator[str]:
    """Yield the runs on which a peer that is silent on all healthy runs was earlier than the stock rules."""
    silent = [name for name in PEERS if not any(found.peers[name] for label, found in runs if label.kind == "healthy")]
    yield f"Of those of others, say nothing of any run of the kind `healthy`: {', '.join(silent) or 'none'}.\n"
    beaten = []
    for label, found in runs:
        theirs = {name: found.peers[name][0] for name in silent if found.peers[name]}
        mine = found.first()
        if label.kind == "faulty" and theirs and (mine is None or mine.row > min(theirs.values())):
            name = min(theirs, key=theirs.__getitem__)
            beaten.append((label.run, label.half, name, theirs[name], mine.row if mine else "never"))
    if not beaten:
        yield "On no faulty run was one of these earlier than the first critical alarm of the stock rules.\n"
        return
    yield "Faulty runs on which one of these was earlier than the first critical alarm of the stock rules:\n"
    yield from table(("run", "half", "who", "at row", "stock rules"), beaten)


def count_by_rule(runs: Runs) -> Iterator[Sequence[object]]:
    for rule in loader.load().rules:
        for half in HALVES if any(rule.name not in found.blind for _, found in runs) else ():
            cells = []
            for kind in KINDS:
                looked = [found for _, found in of(runs, half, kind) if rule.name not in found.blind]
                fired = sum(any(alarm.rule == rule.name for alarm in found.alarms) for found in looked)
                cells.append(f"{fired} of {len(looked)}")
            yield rule.name, half, *cells


def list_blind(runs: Runs) -> list[str]:
    return [rule.name for rule in loader.load().rules if all(rule.name in found.blind for _, found in runs)]


def list_alarmed(runs: Runs) -> Iterator[Sequence[object]]:
    for label, found in runs:
        if label.kind in KINDS[:2] and (alarm := found.first()) is not None:
            yield label.run, label.half, alarm.rule, alarm.row, label.truth or "nothing"


def list_missed(runs: Runs) -> Iterator[Sequence[object]]:
    for label, found in runs:
        if label.kind == "faulty" and found.first() is None:
            warned = found.first("warning")
            warning = f"{warned.rule}, {warned.row}" if warned else "none"
            yield label.run, label.half, found.rows, warning, label.truth


def origins(runs: Runs) -> Iterator[Sequence[object]]:
    counts = Counter((label.source, label.repo, label.commit, label.licence) for label, _ in runs)
    for (source, repo, commit, licence), count in sorted(counts.items()):
        yield source, count, repo, commit, licence
