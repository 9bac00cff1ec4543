"""What receivers are to be told, in the run's history file: written before it is sent, marked after.

A connection of its own beside the history's writer; the write-ahead log lets one wait for the other, for milliseconds.
Without a history it is kept in memory, and lost with the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sentinel.notify.entry import Entry

log = logging.getLogger(__name__)

_TABLE = """
CREATE TABLE IF NOT EXISTS outbox (
    receiver TEXT, alert TEXT, body BLOB, PRIMARY KEY (receiver, alert)) STRICT, WITHOUT ROWID
"""
_DECODER = msgspec.msgpack.Decoder(Entry)

Row = tuple[str, str, bytes]


class Outbox:
    """Never raises: what cannot be written is said in `trouble`, and the sending goes on. One thread at a time."""

    def __init__(self, path: Path | None) -> None:
        self.trouble = "" if path else "notifications are kept in memory alone: they do not survive the daemon"
        self._database: sqlite3.Connection | None = None
        if path is None:
            return
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(_TABLE)
        except sqlite3.Error as error:
            self._fault(error)

    def entries(self) -> list[Entry]:
        """What an earlier daemon left."""
        try:
            rows = self._database.execute("SELECT body FROM outbox").fetchall() if self._database else []
        except sqlite3.Error as error:
            self._fault(error)
            return []
        return _read(rows)

    def write(self, rows: Iterable[Row]) -> None:
        """Replace these rows, in one transaction."""
        if self._database is None:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT OR REPLACE INTO outbox VALUES (?, ?, ?)", rows)
            self._database.execute("COMMIT")
            self.trouble = ""
        except sqlite3.Error as error:
            self._fault(error)
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def close(self) -> None:
        """Before the history's writer closes, which wants the file alone."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _fault(self, error: sqlite3.Error) -> None:
        if not self.trouble:
            log.error("the outbox is not written: %s", error)
        self.trouble = f"notifications are not written ({error}): a restart may lose or repeat them"


def row(entry: Entry) -> Row:
    """An entry as it is kept."""
    return entry.receiver, entry.alert, msgspec.msgpack.encode(entry)


def untold(path: Path) -> list[Entry]:
    """What waits in the outbox of a run that has ended. Empty where there is none, or it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT body FROM outbox").fetchall()
    except sqlite3.Error:
        return []
    return [entry for entry in _read(rows) if entry.pending]


def _read(rows: Iterable[tuple[bytes]]) -> list[Entry]:
    found: list[Entry] = []
    for (body,) in rows:
        try:
            found.append(_DECODER.decode(body))
        except msgspec.DecodeError as error:
            log.error("a notification of an earlier daemon cannot be read and is dropped: %s", error)
    return found
