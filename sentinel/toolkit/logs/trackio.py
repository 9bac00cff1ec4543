"""Reads the runs in Trackio's database of a project (`PROJECT.db`, SQLite), without the package.

Table `metrics` has a row for each call of `trackio.log`, with the step, the time in ISO 8601 at which a batch of rows
was written, and the metrics in JSON, in which NaN and infinity are strings.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from sentinel.errors import LogError
from sentinel.toolkit.logs import rows
from sentinel.toolkit.logs.jsonl import parse_json
from sentinel.toolkit.logs.recording import Recording

NAME = "Trackio"

_COLUMNS = {"id", "run_id", "run_name", "timestamp", "step", "metrics"}


def recognise(path: Path, head: bytes) -> bool:
    """Whether the file is a SQLite database with such a table."""
    if not head.startswith(b"SQLite format 3\0"):
        return False
    try:
        with contextlib.closing(_open(path)) as database:
            return {name for (name,) in database.execute("SELECT name FROM pragma_table_info('metrics')")} >= _COLUMNS
    except (sqlite3.Error, UnicodeDecodeError):  # the latter for a damaged name
        return False


def read(path: Path) -> list[Recording]:
    """Return a recording for each run, in the order in which they began. Raises LogError if none can be read."""
    found = dict[str, Recording]()
    try:
        with contextlib.closing(_open(path)) as database:
            for count, run_id, run, time, step, metrics in database.execute(
                "SELECT id, run_id, run_name, timestamp, step, metrics FROM metrics ORDER BY id"
            ):
                recording = found.setdefault(run_id, Recording(path, NAME))
                recording.run = str(run)
                try:
                    row = parse_json(metrics.decode() if isinstance(metrics, bytes) else str(metrics))
                except ValueError as error:
                    recording.faults.add(count, f"row {count} has no JSON in it: {error}")
                    continue
                if isinstance(row, dict):
                    rows.take(recording, count, {**row, "step": step, "timestamp": time})
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LogError(f"{path}: cannot be read: {error}") from None
    if not found:
        raise LogError(f"{path}: no row in it, read as {NAME}")
    return [recording.check() for recording in found.values()]


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
