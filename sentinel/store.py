"""History of one run: a SQLite file in WAL mode, columns packed 256 steps a blob.

    meta         key -> value: schema version, run, run id
    attempts     number, when it began and ended, the hello of its first rank
    chunks       closed steps: one row holds up to 256 steps of one rank (-1: the run), zlib over msgpack columns
    layers       layer statistics of one step
    incidents    one row an incident, replaced as it changes
    events       what happened: ranks come and go, phases, snapshots, rollbacks

One file a run, so that a damaged one costs one run, and old ones go by unlink. SQLite has no NaN (it stores NULL);
packed float64 has. The newest chunk is rewritten as it grows: after kill -9 at most `FLUSH_SECONDS` are missing.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import zlib
from array import array
from pathlib import Path
from typing import Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.runs import LayerStats, Step

SCHEMA = 1
CHUNK_STEPS = 256
FLUSH_SECONDS = 1.0
RUN = -1
"""In the place of a rank: values of the run."""

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS attempts (number INTEGER PRIMARY KEY, began REAL, ended REAL, hello BLOB) STRICT;
CREATE TABLE IF NOT EXISTS chunks (
    attempt INTEGER, rank INTEGER, first_seq INTEGER, last_seq INTEGER, body BLOB,
    PRIMARY KEY (attempt, rank, first_seq)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS layers (attempt INTEGER, seq INTEGER, body BLOB, PRIMARY KEY (attempt, seq)) STRICT;
CREATE TABLE IF NOT EXISTS incidents (id TEXT PRIMARY KEY, seq INTEGER, body BLOB) STRICT;
CREATE TABLE IF NOT EXISTS events (time REAL, attempt INTEGER, seq INTEGER, kind TEXT, body BLOB) STRICT;
"""


class Chunk(msgspec.Struct):
    """Columns of up to 256 steps. A column is (float64 values, uint16 rows that have one; empty: all)."""

    seqs: bytes
    times: bytes
    columns: dict[str, tuple[bytes, bytes]]


class Event(msgspec.Struct, frozen=True):
    """Something that happened once."""

    time: float
    attempt: int
    seq: int
    kind: str
    detail: dict[str, Any]


class Series(msgspec.Struct, frozen=True):
    """One signal of the run or a rank, in order of steps."""

    seqs: array[int]
    times: array[float]
    values: array[float]


class _OpenChunk:
    """A chunk that still grows."""

    def __init__(self) -> None:
        self.seqs, self.times = array("q"), array("d")
        self.columns: dict[str, tuple[array[float], array[int]]] = {}
        self.dirty = False

    def add(self, step: Step, values: Any) -> None:
        row = len(self.seqs)
        self.seqs.append(step.seq)
        self.times.append(step.time)
        for name, value in values.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = (array("d"), array("H"))
            column[0].append(value)
            column[1].append(row)
        self.dirty = True

    def packed(self) -> bytes:
        rows = len(self.seqs)
        columns = {
            name: (values.tobytes(), b"" if len(at) == rows else at.tobytes())
            for name, (values, at) in self.columns.items()
        }
        body = msgspec.msgpack.encode(Chunk(self.seqs.tobytes(), self.times.tobytes(), columns))
        return zlib.compress(body, 1)


class Store:
    """Writes one run's history. Never raises after it was opened: what cannot be written is said in `trouble`.

    `flush` may be called from a thread of its own, the rest from the loop.
    """

    def __init__(self, path: Path, *, run: str, run_id: str) -> None:
        self.path = path
        self.trouble = ""
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _OpenChunk] = {}
        self._writes: list[tuple[str, tuple[Any, ...]]] = []
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_TABLES)
            for key, value in (("schema", str(SCHEMA)), ("run", run), ("run_id", run_id)):
                self._database.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(_trouble(path, error)) from None

    def attempt(self, number: int, hello: bytes) -> None:
        """An attempt began; `hello` as it came over the wire."""
        self._write("INSERT OR REPLACE INTO attempts VALUES (?, ?, NULL, ?)", number, time.time(), hello)

    def ended(self, number: int) -> None:
        """All ranks of an attempt are gone."""
        self._write("UPDATE attempts SET ended = ? WHERE number = ?", time.time(), number)

    def step(self, attempt: int, step: Step) -> None:
        """A closed step. Ranks apart only where there are several: of one, the run's values are its own."""
        self._append(attempt, RUN, step, step.run)
        if len(step.ranks) > 1:
            for rank, values in step.ranks.items():
                self._append(attempt, rank, step, values)
        if step.layers is not None:
            body = msgspec.msgpack.encode(_packed_layers(step.layers))
            self._write("INSERT OR REPLACE INTO layers VALUES (?, ?, ?)", attempt, step.seq, zlib.compress(body, 1))

    def incident(self, identity: str, seq: int, body: dict[str, Any]) -> None:
        """An incident as it is now."""
        self._write("INSERT OR REPLACE INTO incidents VALUES (?, ?, ?)", identity, seq, msgspec.msgpack.encode(body))

    def event(self, attempt: int, seq: int, kind: str, **detail: Any) -> None:
        """Something that happened once."""
        self._write(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)", time.time(), attempt, seq, kind, msgspec.msgpack.encode(detail)
        )

    def flush(self) -> None:
        """Write what is new in one transaction. Where the disk is full, keep what fits in memory and try again."""
        with self._lock:
            writes, self._writes = self._writes, []
            for (attempt, rank), chunk in self._open.items():
                if chunk.dirty:
                    chunk.dirty = False
                    writes.append(_chunk_write(attempt, rank, chunk))
        if not writes:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, values in writes:
                self._database.execute(statement, values)
            self._database.execute("COMMIT")
            self.trouble = ""
        except sqlite3.Error as error:
            self.trouble = _trouble(self.path, error)
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            with self._lock:
                self._writes = (writes + self._writes)[-_KEPT_WRITES:]

    def close(self) -> None:
        """Write the rest and fold the write-ahead log into the file, which is then one file."""
        self.flush()
        try:
            self._database.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error:
            pass  # a reader has it open: the log stays beside the file, and both are read
        self._database.close()

    def _append(self, attempt: int, rank: int, step: Step, values: Any) -> None:
        with self._lock:
            chunk = self._open.setdefault((attempt, rank), _OpenChunk())
            chunk.add(step, values)
            if len(chunk.seqs) == CHUNK_STEPS:
                self._writes.append(_chunk_write(attempt, rank, chunk))
                self._open[attempt, rank] = _OpenChunk()

    def _write(self, statement: str, *values: Any) -> None:
        with self._lock:
            self._writes.append((statement, values))


_KEPT_WRITES = 4096
"""Writes that are kept while the disk is full: about an hour of chunks of one rank, and all incidents."""


class History:
    """Reads one run's history, live or ended, without disturbing a daemon that writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            meta = dict(self._database.execute("SELECT key, value FROM meta"))
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: not a history that can be read ({error})") from None
        if meta.get("schema") != str(SCHEMA):
            raise ConfigError(f"{path}: history of schema {meta.get('schema')}, this version reads {SCHEMA}")
        self.run, self.run_id = meta["run"], meta["run_id"]

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def attempts(self) -> list[tuple[int, float, float | None]]:
        """(number, began, ended) of each attempt; ended is None while it runs, or where nobody saw its end."""
        return self._database.execute("SELECT number, began, ended FROM attempts ORDER BY number").fetchall()

    def hello(self, attempt: int) -> dict[str, Any]:
        """What the first rank of an attempt said of the run."""
        rows = self._database.execute("SELECT hello FROM attempts WHERE number = ?", (attempt,)).fetchall()
        found: dict[str, Any] = msgspec.msgpack.decode(rows[0][0]) if rows else {}
        return found

    def series(self, name: str, *, attempt: int = 0, rank: int = RUN) -> Series:
        """One signal over all steps that have it."""
        seqs, times, values = array("q"), array("d"), array("d")
        for chunk in self._chunks(attempt, rank):
            if name not in chunk.columns:
                continue
            column, packed_rows = (bytes(part) for part in chunk.columns[name])
            chunk_seqs, chunk_times = _unpacked("q", chunk.seqs), _unpacked("d", chunk.times)
            rows = _unpacked("H", packed_rows) if packed_rows else range(len(chunk_seqs))
            values.extend(_unpacked("d", column))
            seqs.extend(chunk_seqs[row] for row in rows)
            times.extend(chunk_times[row] for row in rows)
        return Series(seqs, times, values)

    def signals(self, *, attempt: int = 0, rank: int = RUN) -> list[str]:
        """Names of the signals that were seen."""
        return list(dict.fromkeys(name for chunk in self._chunks(attempt, rank) for name in chunk.columns))

    def layers(self, *, attempt: int = 0) -> list[tuple[int, LayerStats]]:
        """(seq, statistics of all layers), in order of steps."""
        query = "SELECT seq, body FROM layers WHERE attempt = ? ORDER BY seq"
        return [(seq, _unpacked_layers(body)) for seq, body in self._database.execute(query, (attempt,))]

    def incidents(self) -> list[dict[str, Any]]:
        """All incidents, in the order in which they fired."""
        rows = self._database.execute("SELECT body FROM incidents ORDER BY seq, id")
        return [msgspec.msgpack.decode(body) for (body,) in rows]

    def events(self, kind: str | None = None) -> list[Event]:
        """What happened, in order of time."""
        rows = self._database.execute("SELECT time, attempt, seq, kind, body FROM events ORDER BY rowid")
        found = [Event(at, attempt, seq, name, msgspec.msgpack.decode(body)) for at, attempt, seq, name, body in rows]
        return [event for event in found if kind in (None, event.kind)]

    def _chunks(self, attempt: int, rank: int) -> list[Chunk]:
        query = "SELECT body FROM chunks WHERE attempt = ? AND rank = ? ORDER BY first_seq"
        return [
            msgspec.msgpack.decode(zlib.decompress(body), type=Chunk)
            for (body,) in self._database.execute(query, (attempt, rank))
        ]


class _PackedLayers(msgspec.Struct):
    names: tuple[str, ...]
    stats: dict[str, bytes]
    present: bytes


def _packed_layers(layers: LayerStats) -> _PackedLayers:
    return _PackedLayers(layers.names, {name: v.tobytes() for name, v in layers.stats.items()}, layers.present)


def _unpacked_layers(body: bytes) -> LayerStats:
    packed = msgspec.msgpack.decode(zlib.decompress(body), type=_PackedLayers)
    return LayerStats(packed.names, {k: _unpacked("f", v) for k, v in packed.stats.items()}, packed.present)


def _unpacked(typecode: Any, body: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(body)
    return values


def _chunk_write(attempt: int, rank: int, chunk: _OpenChunk) -> tuple[str, tuple[Any, ...]]:
    values = (attempt, rank, chunk.seqs[0], chunk.seqs[-1], chunk.packed())
    return "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?)", values


def _trouble(path: Path, error: Exception) -> str:
    return (
        f"history is not written: {path}: {error}; alerts and rollback go on; "
        "make room there, or set SENTINEL_STATE to another local directory"
    )
