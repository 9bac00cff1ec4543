"""Writes one run's history."""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.runs import Step
from sentinel.store.layout import CHUNK_STEPS, READABLE, RUN, SCHEMA, TABLES, Chunk, packed_chunk, packed_layers

FLUSH_SECONDS = 1.0
"""Between two transactions: at most so much is missing after kill -9, and the ranks send that again."""
_KEPT_WRITES = 4096
"""Writes that are kept while the disk is full: about an hour of chunks of one rank, and all incidents."""


_Whose = int | str
"""A rank's number, `RUN`, or a device: `gpu 0`, `node trainer-3`."""


class _OpenChunk:
    """A chunk that still grows: rows as they came. It is turned into columns once a flush, not value by value."""

    def __init__(self) -> None:
        self.seqs, self.times = array("q"), array("d")
        self.rows: list[Mapping[str, float]] = []
        self.dirty = False

    def add(self, seq: int, time: float, values: Mapping[str, float]) -> None:
        self.seqs.append(seq)
        self.times.append(time)
        self.rows.append(values)
        self.dirty = True

    def packed(self) -> bytes:
        names = dict.fromkeys(itertools.chain.from_iterable(self.rows))
        columns = {name: _column(name, self.rows) for name in names}
        return packed_chunk(Chunk(self.seqs.tobytes(), self.times.tobytes(), columns))


def _column(name: str, rows: Sequence[Mapping[str, float]]) -> tuple[bytes, bytes]:
    try:
        return array("d", [row[name] for row in rows]).tobytes(), b""
    except KeyError:
        present = [number for number, row in enumerate(rows) if name in row]
        return array("d", [rows[number][name] for number in present]).tobytes(), array("H", present).tobytes()


class Store:
    """Writes one run's history. Never raises after it was opened: what cannot be written is said in `trouble`.

    What it is told is queued; `flush` writes it in one transaction, and may be called from a thread of its own. The
    write-ahead log with synchronous=NORMAL survives the end of the process, kill -9 too; a power cut may cost the
    newest transactions.
    """

    def __init__(self, path: Path, *, run: str, run_id: str, source: str = "") -> None:
        """`source`: where it comes from, if not from a daemon that watches."""
        self.path = path
        self.trouble = ""
        self.bytes = 0
        """On the disk, as of the last transaction."""
        self.lost = 0
        """Rows that were given up, as the disk was full for too long."""
        self._lock = threading.Lock()
        """Over what is queued."""
        self._transaction = threading.Lock()
        """Taken before it, never after."""
        self._checkpoints: set[tuple[int, int]] = set()
        """(attempt, seq) of those that are in the file."""
        self._open: dict[tuple[int, _Whose], _OpenChunk] = {}
        self._writes: list[tuple[str, tuple[Any, ...]]] = []
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._prepare({"schema": str(SCHEMA), "run": run, "run_id": run_id, "source": source})
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(_trouble(path, error)) from None

    def _prepare(self, meta: dict[str, str]) -> None:
        """Make the tables, or those that an older schema lacks."""
        self._database.executescript(TABLES)
        for key, value in meta.items():
            self._database.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        ((found,),) = self._database.execute("SELECT value FROM meta WHERE key = 'schema'")
        if found not in READABLE:
            raise ConfigError(f"history is not written: {self.path} has schema {found}, this version writes {SCHEMA}")
        for key in ("schema", "source"):
            self._database.execute("UPDATE meta SET value = ? WHERE key = ?", (meta[key], key))
        self._checkpoints = set(self._database.execute("SELECT attempt, seq FROM checkpoints"))

    def attempt(self, number: int, hello: bytes) -> None:
        """An attempt began; `hello` as it came over the wire. Nobody will go on from the states of older ones."""
        self._write("INSERT OR REPLACE INTO attempts VALUES (?, ?, NULL, ?)", number, time.time(), hello)
        for table in ("states", "checkpoints", "tables"):
            self._write(f"DELETE FROM {table} WHERE attempt < ?", number)

    def ended(self, number: int) -> None:
        """All ranks of an attempt are gone."""
        self._write("UPDATE attempts SET ended = ? WHERE number = ?", time.time(), number)

    def rank(self, attempt: int, rank: int, *, process: int, hello: bytes) -> None:
        """A rank arrived, or came back: the attempt has not ended."""
        self._write("UPDATE attempts SET ended = NULL WHERE number = ?", attempt)
        self._write("INSERT OR REPLACE INTO ranks VALUES (?, ?, ?, 0, ?)", attempt, rank, process, hello)

    def gone(self, attempt: int, rank: int) -> None:
        """A rank said goodbye."""
        self._write("UPDATE ranks SET gone = 1 WHERE attempt = ? AND rank = ?", attempt, rank)

    def table(self, attempt: int, digest: str, body: bytes) -> None:
        """A layer table, as it came over the wire."""
        self._write("INSERT OR IGNORE INTO tables VALUES (?, ?, ?)", attempt, digest, body)

    def state(self, attempt: int, seq: int, body: bytes, checkpoints: Sequence[tuple[int, bytes]]) -> None:
        """What another daemon would go on from, after step `seq`. `checkpoints`: all of them; new ones are added."""
        self._write("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", attempt, seq, body)
        wanted = {(attempt, at): state for at, state in checkpoints}
        for key in self._checkpoints - wanted.keys():
            self._write("DELETE FROM checkpoints WHERE attempt = ? AND seq = ?", *key)
        for key in wanted.keys() - self._checkpoints:
            self._write("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", *key, wanted[key])
        self._checkpoints = set(wanted)

    def step(self, attempt: int, step: Step) -> None:
        """A closed step. Ranks apart only where there are several: of rank 0 alone, the run's values are its own."""
        self._append(attempt, RUN, step.seq, step.time, step.run)
        if step.ranks.get(0) != step.run or len(step.ranks) > 1:
            for rank, values in step.ranks.items():
                self._append(attempt, rank, step.seq, step.time, values)
        if step.layers is not None:
            body = packed_layers(step.layers)
            self._write("INSERT OR REPLACE INTO layers VALUES (?, ?, ?)", attempt, step.seq, body)

    def reading(self, attempt: int, device: str, seq: int, time: float, values: Mapping[str, float]) -> None:
        """A GPU or the host as it was read, after step `seq`."""
        self._append(attempt, device, seq, time, values)

    def incident(self, identity: str, seq: int, body: dict[str, Any]) -> None:
        """An incident as it is now."""
        self._write("INSERT OR REPLACE INTO incidents VALUES (?, ?, ?)", identity, seq, msgspec.msgpack.encode(body))

    def event(self, attempt: int, seq: int, kind: str, **detail: Any) -> None:
        """Something that happened once; what a rank tells again, because a daemon was killed, is known already."""
        body = msgspec.msgpack.encode(detail)
        self._write(_EVENT, time.time(), attempt, seq, kind, body, attempt, kind, seq, body)

    def flush(self) -> None:
        """Write what is new in one transaction. Where the disk is full, keep what fits in memory and try again."""
        with self._transaction:
            writes = self._taken()
            if not writes:
                return
            try:
                self._database.execute("BEGIN IMMEDIATE")
                for statement, values in writes:
                    self._database.execute(statement, values)
                self._database.execute("COMMIT")
                self.trouble = ""
                self.bytes = self._size()
            except sqlite3.Error as error:
                self.trouble = _trouble(self.path, error)
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                with self._lock:
                    waiting = writes + self._writes
                    self.lost += max(len(waiting) - _KEPT_WRITES, 0)
                    self._writes = waiting[-_KEPT_WRITES:]

    def _size(self) -> int:
        try:
            return sum(os.stat(f"{self.path}{side}").st_size for side in ("", "-wal"))
        except OSError:
            return self.bytes

    def _taken(self) -> list[tuple[str, tuple[Any, ...]]]:
        with self._lock:
            writes, self._writes = self._writes, []
            for (attempt, whose), chunk in self._open.items():
                if chunk.dirty:
                    chunk.dirty = False
                    writes.append(_chunk_write(attempt, whose, chunk))
        return writes

    def close(self) -> None:
        """Write the rest and fold the write-ahead log into the file, which is then one file."""
        self.flush()
        try:
            self._database.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error:
            pass  # a reader has it open: the log stays beside the file, and both are read
        self._database.close()

    def _append(self, attempt: int, whose: _Whose, seq: int, time: float, values: Mapping[str, float]) -> None:
        with self._lock:
            chunk = self._open.setdefault((attempt, whose), _OpenChunk())
            chunk.add(seq, time, values)
            if len(chunk.seqs) == CHUNK_STEPS:
                self._writes.append(_chunk_write(attempt, whose, chunk))
                self._open[attempt, whose] = _OpenChunk()

    def _write(self, statement: str, *values: Any) -> None:
        with self._lock:
            self._writes.append((statement, values))


_EVENT = """
INSERT INTO events SELECT ?, ?, ?, ?, ? WHERE NOT EXISTS
    (SELECT 1 FROM events WHERE attempt = ? AND kind = ? AND seq = ? AND body = ?)
"""


def _chunk_write(attempt: int, whose: _Whose, chunk: _OpenChunk) -> tuple[str, tuple[Any, ...]]:
    if isinstance(whose, str):
        return "INSERT OR REPLACE INTO readings VALUES (?, ?, ?, ?)", (attempt, whose, chunk.times[0], chunk.packed())
    values = (attempt, whose, chunk.seqs[0], chunk.seqs[-1], chunk.packed())
    return "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?)", values


def _trouble(path: Path, error: Exception) -> str:
    return (
        f"history is not written: {path}: {error}; alerts and rollback go on; "
        "make room there, or set SENTINEL_STATE to another local directory"
    )
