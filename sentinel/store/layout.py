"""The content of a history file, and how it is packed.

    meta         key -> value: schema version, run, run id; in a job over several nodes, the node and its host name
    attempts     number, when it began and ended, the hello of its first rank
    chunks       closed steps: one row holds up to 256 steps of one rank (-1: the run), zlib over msgpack columns;
                 since schema 3 those far behind are thinned, level by level, and then hold up to 2,048
    layers       layer statistics of one step
    incidents    one row per incident, replaced as it changes
    readings     GPUs and host, by the clock: one row holds up to 256 readings of one of them, packed like steps
    job_incidents  incidents of a job over several nodes, where this node was its coordinator
    events       what happened: ranks come and go, phases, snapshots, rollbacks; an event reported twice is one row

(`readings` and `job_incidents` came without a change of schema: an older file has none, and an older version
ignores them.)

Since schema 2, also what a daemon needs to go on where another one was killed:

    ranks        last hello of each rank, its process on this node, and whether it said goodbye
    tables       layer tables by digest
    states       one row per attempt: the rules' state and the rollbacks, as they were at the last change
    checkpoints  the older states that the rules can go back to after a rollback

SQLite has no NaN (it stores NULL); packed float64 has.
"""

from __future__ import annotations

import itertools
import sqlite3
import zlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.runs.steps import LayerStats

SCHEMA = 3
READABLE = frozenset({"1", "2", "3"})
"""Schemas that this version reads. A file of schema 1 lacks the tables for restarting, one of schema 2 the levels of
thinning; a writer adds them to it."""
CHUNK_STEPS = 256
CHUNK_VALUES = 16_384
"""Values in a chunk, at most, so that one of many columns has fewer steps: packing so many takes 10 ms."""
RUN = -1
"""Stands in the place of a rank's number: values of the run."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS attempts (number INTEGER PRIMARY KEY, began REAL, ended REAL, hello BLOB) STRICT;
CREATE TABLE IF NOT EXISTS chunks (
    attempt INTEGER, rank INTEGER, first_seq INTEGER, last_seq INTEGER, body BLOB, level INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (attempt, rank, first_seq)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS readings (
    attempt INTEGER, entity TEXT, first_time REAL, body BLOB,
    PRIMARY KEY (attempt, entity, first_time)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS layers (attempt INTEGER, seq INTEGER, body BLOB, PRIMARY KEY (attempt, seq)) STRICT;
CREATE TABLE IF NOT EXISTS incidents (id TEXT PRIMARY KEY, seq INTEGER, body BLOB) STRICT;
CREATE TABLE IF NOT EXISTS job_incidents (id TEXT PRIMARY KEY, seq INTEGER, body BLOB) STRICT;
CREATE TABLE IF NOT EXISTS events (time REAL, attempt INTEGER, seq INTEGER, kind TEXT, body BLOB) STRICT;
CREATE INDEX IF NOT EXISTS events_by_kind ON events (attempt, kind, seq);
CREATE TABLE IF NOT EXISTS ranks (
    attempt INTEGER, rank INTEGER, process INTEGER, gone INTEGER, hello BLOB,
    PRIMARY KEY (attempt, rank)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tables (
    attempt INTEGER, digest TEXT, body BLOB, PRIMARY KEY (attempt, digest)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS states (attempt INTEGER PRIMARY KEY, seq INTEGER, body BLOB) STRICT;
CREATE TABLE IF NOT EXISTS checkpoints (
    attempt INTEGER, seq INTEGER, body BLOB, PRIMARY KEY (attempt, seq)) STRICT, WITHOUT ROWID;
"""
ADDED = (("chunks", "level", "INTEGER NOT NULL DEFAULT 0"),)
"""Columns (table, name, type) that an older schema lacks."""


LARGEST_BODY, LARGEST_RATIO = 8 * 1024**2, 64
"""Bytes that a packed row may unpack to, at most: so many, plus so many for each of its bytes. Columns of 2,048 steps
that never change pack a thousandfold, and are under the first number."""
_DOUBLE = 8
"""Bytes of a value, or of a time."""
FARTHEST = 2**53
"""Bound on the magnitude of steps and seqs: a larger one is damage."""


class Damaged(ValueError):
    """Raised for a row that no writer wrote like this."""


class Chunk(msgspec.Struct):
    """Columns of up to 256 steps. A column is (float64 values, uint16 rows that have one; empty: all rows)."""

    seqs: bytes
    times: bytes
    columns: dict[str, tuple[bytes, bytes]]

    def steps(self) -> array[int]:
        """Return the seqs of the steps."""
        return unpack_column("q", self.seqs)

    def rows(self) -> list[tuple[int, float, dict[str, float]]]:
        """Return (seq, time, values by signal) of each step."""
        seqs, times = unpack_column("q", self.seqs), unpack_column("d", self.times)
        values: list[dict[str, float]] = [{} for _ in seqs]
        for name, (column, at) in self.columns.items():
            for row, value in zip(
                unpack_column("H", at) if at else range(len(seqs)), unpack_column("d", column), strict=True
            ):
                values[row][name] = value
        return list(zip(seqs, times, values, strict=True))


def pack_chunk(chunk: Chunk) -> bytes:
    """Return a chunk as it is stored."""
    return zlib.compress(msgspec.msgpack.encode(chunk), 1)


def unpack_chunk(body: bytes) -> Chunk:
    """Return a chunk that was packed; what is returned is sound. Raises Damaged, zlib.error, or what msgspec raises, if
    it is damaged."""
    chunk = msgspec.msgpack.decode(inflate(body), type=Chunk)
    seqs = chunk.steps()
    count = len(seqs)
    if len(chunk.times) != count * _DOUBLE or (seqs and not -FARTHEST < min(seqs) <= max(seqs) < FARTHEST):
        raise Damaged(f"a chunk of {count} steps and {len(chunk.times)} bytes of times")
    for name, (values, at) in chunk.columns.items():
        rows = unpack_column("H", at) if at else ()
        if len(values) != (len(rows) or count) * _DOUBLE or max(rows, default=0) >= count:
            raise Damaged(f"the column {name!r:.60} does not fit its chunk of {count} steps")
    return chunk


def inflate(body: bytes) -> bytes:
    """Unpack a body, up to the size that a writer packs. Raises Damaged above that: a few bytes can unpack to
    gigabytes."""
    unpacking = zlib.decompressobj()
    most = LARGEST_BODY + LARGEST_RATIO * len(body)
    content = unpacking.decompress(body, most)
    if not unpacking.eof:
        raise Damaged("a packed row is cut off" if len(content) < most else f"a packed row has over {most} bytes")
    return content


def pack_columns(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[bytes, bytes]]:
    """Return rows as the columns of a chunk."""
    counts = Counter(itertools.chain.from_iterable(rows))
    whole = list(counts.values()).count(len(rows))
    # In a fast loop one row of 32 has signals that the others lack: only such rows are searched for these signals.
    more = [(number, row) for number, row in enumerate(rows) if len(row) > whole]
    return {
        name: (array("d", [row[name] for row in rows]).tobytes(), b"") if count == len(rows) else _partly(name, more)
        for name, count in counts.items()
    }


def _partly(name: str, rows: Sequence[tuple[int, Mapping[str, float]]]) -> tuple[bytes, bytes]:
    present = [(number, row[name]) for number, row in rows if name in row]
    return array("d", [value for _, value in present]).tobytes(), array(
        "H", [number for number, _ in present]
    ).tobytes()


class _PackedLayers(msgspec.Struct):
    names: tuple[str, ...]
    stats: dict[str, bytes]
    present: bytes


def pack_layers(layers: LayerStats) -> bytes:
    """Return layer statistics as they are stored."""
    stats = {name: values.tobytes() for name, values in layers.stats.items()}
    return zlib.compress(msgspec.msgpack.encode(_PackedLayers(layers.names, stats, layers.present)), 1)


def unpack_layers(body: bytes) -> LayerStats:
    """Return layer statistics that were packed. Raises as `unpack_chunk` does."""
    packed = msgspec.msgpack.decode(inflate(body), type=_PackedLayers)
    layers = LayerStats(packed.names, {k: unpack_column("f", v) for k, v in packed.stats.items()}, packed.present)
    if {len(layers.present), *map(len, layers.stats.values())} != {len(layers.names)}:
        raise Damaged(f"statistics that are not of {len(layers.names)} layers")
    return layers


def is_damage(error: BaseException) -> bool:
    """Return whether SQLite reports that the file is no database, or a damaged one. Any other error may pass: a lock, a
    full disk, a missing descriptor."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def unpack_column(typecode: Any, body: bytes) -> array[Any]:
    """Return a packed column as an array. `typecode` as in the `array` module. Raises Damaged where it is cut short."""
    values: array[Any] = array(typecode)
    if len(body) % values.itemsize:
        raise Damaged(f"a column of {len(body)} bytes")
    values.frombytes(body)
    return values
