"""The outbox: what receivers have to get, in the run's history file, written before it is sent and marked after.

It has a connection of its own beside the history's writer; with the write-ahead log one waits milliseconds for the
other. Without a history the outbox is in memory, and lost with the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sentinel.notify.entry import Entry
from sentinel.text import present

log = logging.getLogger(__name__)

_TABLE = """
CREATE TABLE IF NOT EXISTS outbox (
    receiver TEXT, alert TEXT, body BLOB, PRIMARY KEY (receiver, alert)) STRICT, WITHOUT ROWID
"""
_DECODER = msgspec.msgpack.Decoder(Entry)

Row = tuple[str, str, bytes]


class Outbox:
    """The outbox of one run. Never raises: `trouble` says what cannot be written, and sending goes on. One thread at a
    time."""

    def __init__(self, path: Path | None) -> None:
        self.trouble = "" if path else "notifications are kept in memory alone: they do not survive the daemon"
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._file = (0, 0)
        """Device and inode of the open file."""
        self._rows: dict[tuple[str, str], bytes] = {}
        """(receiver, key) -> body of every row that was written or has to be; empty: the row is to be deleted."""
        self._unwritten = set[tuple[str, str]]()
        self._using = threading.RLock()
        """Lock of the connection: the history's writer, on a thread of its own, may have it closed."""

    @property
    def waits(self) -> bool:
        """Whether rows wait that could not be written."""
        return bool(self._unwritten) and self._path is not None

    def entries(self) -> list[Entry]:
        """Return what an earlier daemon left. Reads only, so that it does not wait for a writer's lock on the file."""
        if self._path is None or not os.path.exists(self._path):
            return []
        try:
            with contextlib.closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'outbox'").fetchall():
                    return []
                return _read(database.execute("SELECT body FROM outbox").fetchall())
        except sqlite3.Error as error:
            self.report_fault(error)
            return []

    def write(self, rows: Iterable[Row]) -> None:
        """Replace these rows, and rows that could not be written before, in one transaction."""
        with self._using:
            self._write(rows)

    def _write(self, rows: Iterable[Row]) -> None:
        for receiver, alert, body in rows:
            self._rows[receiver, alert] = body
            self._unwritten.add((receiver, alert))
        try:
            database = self._open_database()
            if database is None:
                return
            database.execute("BEGIN IMMEDIATE")
            unwritten = [(*key, self._rows[key]) for key in self._unwritten]
            database.executemany("INSERT OR REPLACE INTO outbox VALUES (?, ?, ?)", unwritten)
            database.execute("DELETE FROM outbox WHERE body = x''")
            database.execute("COMMIT")
            self._rows = {key: body for key, body in self._rows.items() if body}
            self._unwritten.clear()
            self.trouble = ""
        except sqlite3.Error as error:
            self.report_fault(error)
            self._back_out()

    def _back_out(self) -> None:
        if self._database is not None and self._database.in_transaction:
            try:
                self._database.execute("ROLLBACK")
            except sqlite3.Error:
                self._database.close()
                self._database = None

    def close(self) -> None:
        """Close the file, before the history's writer closes, which needs it to itself."""
        self.release()
        self._path = None

    def release(self) -> None:
        """Close the file, which is about to be replaced, and have everything written again into the new one. Closing it
        later would remove the new file's write-ahead log, which SQLite knows by its name."""
        with self._using:
            if self._database is not None:
                self._database.close()
            self._database = None
            self._unwritten |= self._rows.keys()

    def _open_database(self) -> sqlite3.Connection | None:
        """Return the database, opened when it is first needed: a run without receivers needs none. Where the history
        was damaged and its writer began another, it is opened again, and all rows have to be written again."""
        if self._database is not None and self._path is not None and self._file != _identity(self._path, self._file):
            self._database.close()
            self._database = None
            self._unwritten.update(self._rows)
        if self._database is None and self._path is not None:
            database = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            try:
                database.execute("PRAGMA synchronous=NORMAL")
                database.execute(_TABLE)
            except sqlite3.Error:
                database.close()
                raise
            self._database, self._file = database, _identity(self._path, self._file)
        return self._database

    def report_fault(self, why: object) -> None:
        """Report why the outbox is not written, until it is."""
        if not self.trouble:
            log.error("the outbox is not written: %s", why)
        self.trouble = f"notifications are not written ({why}): a restart may lose or repeat them"


def _identity(path: Path, otherwise: tuple[int, int]) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return otherwise
    return status.st_dev, status.st_ino


def row(entry: Entry, now: float) -> Row:
    """Return an entry as a row; one that is over has an empty body, which deletes the row."""
    return entry.receiver, entry.key, b"" if entry.is_over(now) else msgspec.msgpack.encode(entry)


def list_undelivered(path: Path) -> list[Entry]:
    """Return what waits in the outbox of a run that has ended. Empty where there is none, or it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT body FROM outbox").fetchall()
    except sqlite3.Error:
        return []
    return [entry for entry in _read(rows) if entry.pending or entry.lost]


def _read(rows: Iterable[tuple[bytes]]) -> list[Entry]:
    found: list[Entry] = []
    for (body,) in rows:
        try:
            entry = _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("a notification of an earlier daemon cannot be read and is dropped: %s", error)
            continue
        for case in entry.cases.values():
            case.state = present(case.state)
        found.append(entry)
    return found
