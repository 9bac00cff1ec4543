"""Backtests the public logs of bench/public_runs.csv as they are, and writes the results into docs/detection.md.

    python -m bench.public_runs --data FOLDER       # the folder that bench.public_draw has filled

It judges as `sentinel rules backtest` does. bench/public_verdicts.csv has what a person saw in the curve of each run
with a critical alarm.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.pages import DOCS, ROOT, make_table, write_section
from bench.public_draw import FORMATS, Drawn, read_list
from bench.recorded import rate, share
from sentinel.toolkit.backtest import Result, Terms, backtest_logs
from sentinel.toolkit.logs import find_logs

MARKS = "<!-- public -->", "<!-- end of public -->"
LOOKED_AT = ROOT / "bench" / "public_verdicts.csv"
HEAD = ("format", "runs", "repositories", "read", "with a loss", "rows", "with a critical alarm", "with a warning",
        "critical alarms in 10,000 rows")  # fmt: skip
ALARMED = ("run", "critical alarms", "verdict", "what the curve shows")
UNREAD = ("run", "what became of it")

Runs = Sequence[tuple[Drawn, Result]]


class Verdict(msgspec.Struct, frozen=True):
    """What a person saw in the curve of a run."""

    sha256: str
    """The first twelve digits of the file's SHA-256."""
    verdict: str
    """`right`, `wrong` or `misread`: the reader took something else for the loss of the run."""
    what: str


def replay(folder: Path, listed: Sequence[Drawn], jobs: int) -> list[tuple[Drawn, Result]]:
    """Return each listed run with its backtest by the stock rules. Raises ValueError if a file has other content."""
    for run in listed:
        if hashlib.sha256((folder / run.file_name).read_bytes()).hexdigest() != run.sha256:
            raise ValueError(f"{folder / run.file_name} is not the file that bench/public_runs.csv lists; draw again")
    found = find_logs(str(folder / run.file_name) for run in listed)
    return [(run, result) for run, (result,) in zip(listed, backtest_logs(found, Terms(), jobs), strict=True)]


def count_alarms(result: Result, severity: str) -> int:
    return sum(alert.severity == severity for alert in result.alerts)


def count_by_format(runs: Runs) -> Iterator[Sequence[object]]:
    for name in (*FORMATS, "all"):
        mine = [(run, result) for run, result in runs if name in (run.format, "all")]
        read = [result for _, result in mine if not result.error]
        rows = sum(result.rows for result in read)
        alarmed, warned = (sum(count_alarms(r, severity) > 0 for r in read) for severity in ("critical", "warning"))
        yield (
            name,
            len(mine),
            len({run.repo for run, _ in mine}),
            len(read),
            sum("loss" in result.columns for result in read),
            f"{rows:,}",
            share(alarmed, len(read)),
            share(warned, len(read)),
            rate(sum(count_alarms(result, "critical") for result in read), rows),
        )


def count_verdicts(runs: Runs, verdicts: dict[str, Verdict]) -> Iterator[Sequence[object]]:
    alarmed = [run for run, result in runs if count_alarms(result, "critical")]
    given = [verdicts[run.sha256[:12]].verdict if run.sha256[:12] in verdicts else "not looked at" for run in alarmed]
    for verdict in sorted(set(given)):
        mine = [run.repo for run, its in zip(alarmed, given, strict=True) if its == verdict]
        yield verdict, len(mine), len(set(mine))


def list_alarmed(runs: Runs, verdicts: dict[str, Verdict]) -> Iterator[Sequence[object]]:
    for run, result in runs:
        critical = [f"{alert.alert} at {alert.step}" for alert in result.alerts if alert.severity == "critical"]
        if critical:
            seen = verdicts.get(run.sha256[:12], Verdict("", "not looked at", ""))
            more = f", and {len(critical) - 3} more" if len(critical) > 3 else ""
            yield f"{run.repo}: {run.path}", "; ".join(critical[:3]) + more, seen.verdict, seen.what


def list_unread(runs: Runs) -> Iterator[Sequence[object]]:
    for run, result in runs:
        if result.error:
            yield f"{run.repo}: {run.path}", result.error.partition(": ")[2].partition(";")[0]
        elif "loss" not in result.columns:
            yield f"{run.repo}: {run.path}", f"read as {result.format}, no loss among {len(result.no_loss)} names"


def write_tables(runs: Runs, verdicts: dict[str, Verdict]) -> str:
    """Return the text between the marks of docs/detection.md."""
    return "\n\n".join((
        make_table(HEAD, count_by_format(runs)),
        make_table(("verdict on the critical alarms", "runs", "repositories"), count_verdicts(runs, verdicts)),
        "Every run with a critical alarm:",
        make_table(ALARMED, list_alarmed(runs, verdicts)),
        "Every run that could not be read, or in which no loss was found:",
        make_table(UNREAD, list_unread(runs)),
    ))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="What the stock rules say of public logs.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the drawn files")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options: Any = parser.parse_args()
    with LOOKED_AT.open(newline="") as file:
        verdicts = {row["sha256"]: Verdict(**row) for row in csv.DictReader(file)}
    write_section(DOCS / "detection.md", MARKS, write_tables(replay(options.data, read_list(), options.jobs), verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
