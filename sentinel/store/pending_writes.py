"""What was handed to a history and is not in its file yet: statements, and chunks of samples that still grow.

The file may be locked, or the disk full, for longer than memory lasts. What is held is bounded, and dropped by kind:
samples before events, events before the ranks that were there. What was dropped is counted by kind.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from sentinel.store.layout import CHUNK_STEPS, CHUNK_VALUES, RUN, Chunk, pack_chunk, pack_columns

HELD_BYTES = 32 * 1024 * 1024
"""Bytes held for one run, at most. While the disk is full that is some three hours of 64 ranks at one step per
second."""
_ROW_BYTES = 200
"""Approximate bytes of memory that a statement takes beside its texts and blobs."""

KINDS = ("ranks", "incidents", "states", "events", "steps", "steps of ranks", "readings", "layers")
"""The kinds of rows, in the order in which they are written. What does not fit is taken from the last kind first, the
oldest of it before the newer. `ranks` are attempts, their ranks and their layer tables."""
VITAL = frozenset({"ranks", "incidents", "events"})
"""Kinds that are written alone where the disk has no room for everything."""

Whose = int | str
"""A rank's number, `RUN`, or a device: `gpu 0`, `node trainer-3`."""

_READINGS = "INSERT OR REPLACE INTO readings VALUES (?, ?, ?, ?)"
_CHUNKS = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, 0)"


class Write(NamedTuple):
    """A statement and its values."""

    kind: str
    """One of `KINDS`."""
    key: tuple[Any, ...]
    """A later write of the same kind and key replaces an earlier one."""
    statement: str
    values: tuple[Any, ...]
    rows: int = 1
    """Rows that are lost without it: a chunk has up to 256."""

    @property
    def nbytes(self) -> int:
        """Approximate bytes that it takes in memory."""
        return _ROW_BYTES + sum(len(value) for value in self.values if isinstance(value, bytes | str))


class _OpenChunk:
    """A chunk that still grows: rows as they came. They are turned into columns once per flush, not value by value."""

    def __init__(self) -> None:
        self.seqs, self.times = array("q"), array("d")
        self.rows: list[Mapping[str, float]] = []
        self.values = 0
        self.dirty = False

    @property
    def full(self) -> bool:
        """Whether the next row begins another chunk."""
        return len(self.rows) >= CHUNK_STEPS or self.values >= CHUNK_VALUES

    def copy(self) -> _OpenChunk:
        """Return a copy of its present state; its rows are shared, and never change."""
        other = _OpenChunk()
        other.seqs, other.times, other.rows = self.seqs[:], self.times[:], self.rows[:]
        return other

    def pack(self) -> bytes:
        return pack_chunk(Chunk(self.seqs.tobytes(), self.times.tobytes(), pack_columns(self.rows)))


class PendingWrites:
    """The queue between the threads that record in a history and its writer. All methods are thread-safe."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._open: dict[tuple[int, Whose], _OpenChunk] = {}
        self._queues: dict[str, dict[tuple[Any, ...], Write]] = {kind: {} for kind in KINDS}
        self._bytes = 0

    def add(self, write: Write) -> None:
        """Queue a statement."""
        with self._lock:
            self._put(write)

    def append(self, attempt: int, whose: Whose, seq: int, time: float, values: Mapping[str, float]) -> bool:
        """Add a row of samples to its chunk; return whether that filled the chunk. Further values of the last step
        become part of its row."""
        with self._lock:
            chunk = self._open.get((attempt, whose)) or self._open.setdefault((attempt, whose), _OpenChunk())
            if isinstance(whose, int) and chunk.seqs and chunk.seqs[-1] == seq:
                chunk.rows[-1] = {**chunk.rows[-1], **values}
            else:
                chunk.seqs.append(seq)
                chunk.times.append(time)
                chunk.rows.append(values)
            chunk.values += len(values)
            chunk.dirty = True
            if not chunk.full:
                return False
            self._put(_chunk_write(attempt, whose, chunk))
            self._open[attempt, whose] = _OpenChunk()
            return True

    @property
    def dropped(self) -> Counter[str]:
        """Number of rows that were dropped so far, by kind."""
        with self._lock:
            return self._dropped.copy()

    def count(self, kinds: Collection[str]) -> int:
        """Return how many statements of these kinds wait."""
        with self._lock:
            return sum(len(self._queues[kind]) for kind in kinds)

    def take(self) -> list[Write]:
        """Take all that is to be written, kind by kind: the queues, and the chunks that grew since the last time.
        Chunks of former attempts, which grow no more, are forgotten."""
        with self._lock:
            grown = [(attempt, whose, chunk.copy()) for (attempt, whose), chunk in self._open.items() if chunk.dirty]
            for chunk in self._open.values():
                chunk.dirty = False
            present = max((attempt for attempt, _ in self._open), default=0)
            self._open = {key: chunk for key, chunk in self._open.items() if key[0] == present}
            queued = {kind: [*queue.values()] for kind, queue in self._queues.items()}
            for queue in self._queues.values():
                queue.clear()
            self._bytes = 0
        for (
            attempt,
            whose,
            chunk,
        ) in grown:  # without the lock, so that threads that append do not wait
            write = _chunk_write(attempt, whose, chunk)
            queued[write.kind].append(write)
        return [write for writes in queued.values() for write in writes]

    def put_back(self, writes: Iterable[Write]) -> None:
        """Queue again what could not be written, before what came since."""
        with self._lock:
            newer = [write for queue in self._queues.values() for write in queue.values()]
            for queue in self._queues.values():
                queue.clear()
            self._bytes = 0
            for write in (*writes, *newer):
                if not self._still_grows(write):
                    self._queue(write)
            self._shrink()

    def drop(self, write: Write) -> None:
        """Drop a write that will never fit into the file."""
        with self._lock:
            self._dropped[write.kind] += write.rows

    def _still_grows(self, write: Write) -> bool:
        """Return whether a chunk will be packed again from its rows, which are all present."""
        if write.statement not in (_READINGS, _CHUNKS):
            return False
        attempt, whose, _ = write.key
        chunk = self._open.get((attempt, whose))
        if chunk is None or not chunk.rows or write.key != _chunk_key(attempt, whose, chunk):
            return False
        chunk.dirty = True
        return True

    def _put(self, write: Write) -> None:
        self._queue(write)
        self._shrink()

    def _queue(self, write: Write) -> None:
        queue = self._queues[write.kind]
        if (former := queue.pop(write.key, None)) is not None:
            self._bytes -= former.nbytes
        queue[write.key] = write
        self._bytes += write.nbytes

    def _shrink(self) -> None:
        for kind in reversed(KINDS):
            queue = self._queues[kind]
            while queue and self._bytes > HELD_BYTES:
                oldest = queue.pop(next(iter(queue)))
                self._bytes -= oldest.nbytes
                self._dropped[kind] += oldest.rows


def _chunk_key(attempt: int, whose: Whose, chunk: _OpenChunk) -> tuple[Any, ...]:
    return attempt, whose, chunk.times[0] if isinstance(whose, str) else chunk.seqs[0]


def _chunk_write(attempt: int, whose: Whose, chunk: _OpenChunk) -> Write:
    key, rows, body = _chunk_key(attempt, whose, chunk), len(chunk.rows), chunk.pack()
    if isinstance(whose, str):
        return Write("readings", key, _READINGS, (*key, body), rows)
    kind = "steps" if whose == RUN else "steps of ranks"
    return Write(kind, key, _CHUNKS, (*key, chunk.seqs[-1], body), rows)
