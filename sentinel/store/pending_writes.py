"""What a history is told that its file does not have yet: statements, and chunks of samples that still grow."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sentinel.store.layout import CHUNK_STEPS, Chunk, packed_chunk, packed_columns

KEPT_WRITES = 4096
"""While the disk is full the last 4,096 writes are held: about four hours of 64 ranks at one step a second."""

Whose = int | str
"""A rank's number, `RUN`, or a device: `gpu 0`, `node trainer-3`."""

Write = tuple[str, tuple[Any, ...]]
"""A statement and its values."""

_READINGS = "INSERT OR REPLACE INTO readings VALUES (?, ?, ?, ?)"
_CHUNKS = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, 0)"


class _OpenChunk:
    """A chunk that still grows: rows as they came. It is turned into columns once a flush, not value by value."""

    def __init__(self) -> None:
        self.seqs, self.times = array("q"), array("d")
        self.rows: list[Mapping[str, float]] = []
        self.dirty = False

    def packed(self) -> bytes:
        return packed_chunk(Chunk(self.seqs.tobytes(), self.times.tobytes(), packed_columns(self.rows)))


class PendingWrites:
    """The queue between those who tell a history something and whoever writes it: any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, Whose], _OpenChunk] = {}
        self._writes: list[Write] = []

    def add(self, statement: str, *values: Any) -> None:
        """Queue a statement."""
        with self._lock:
            self._writes.append((statement, values))

    def append(self, attempt: int, whose: Whose, seq: int, time: float, values: Mapping[str, float]) -> bool:
        """Take a row of samples into its chunk; answer whether the chunk is full by that."""
        with self._lock:
            chunk = self._open.get((attempt, whose)) or self._open.setdefault((attempt, whose), _OpenChunk())
            chunk.seqs.append(seq)
            chunk.times.append(time)
            chunk.rows.append(values)
            chunk.dirty = True
            if len(chunk.rows) < CHUNK_STEPS:
                return False
            self._writes.append(_chunk_write(attempt, whose, chunk))
            self._open[attempt, whose] = _OpenChunk()
            return True

    def take(self) -> list[Write]:
        """All that is to be written, in order: the queue, and the chunks that grew since the last time."""
        with self._lock:
            writes, self._writes = self._writes, []
            for (attempt, whose), chunk in self._open.items():
                if chunk.dirty:
                    chunk.dirty = False
                    writes.append(_chunk_write(attempt, whose, chunk))
        return writes

    def put_first(self, writes: Iterable[Write]) -> None:
        """Queue these before all others."""
        with self._lock:
            self._writes = [*writes, *self._writes]

    def put_back(self, writes: list[Write]) -> int:
        """Queue again what could not be written, as far as it fits; answer how many were given up, the oldest."""
        with self._lock:
            waiting = _newest(writes + self._writes)
            self._writes = waiting[-KEPT_WRITES:]
        return max(len(waiting) - KEPT_WRITES, 0)


def _chunk_write(attempt: int, whose: Whose, chunk: _OpenChunk) -> Write:
    if isinstance(whose, str):
        return _READINGS, (attempt, whose, chunk.times[0], chunk.packed())
    return _CHUNKS, (attempt, whose, chunk.seqs[0], chunk.seqs[-1], chunk.packed())


def _newest(writes: Sequence[Write]) -> list[Write]:
    """Of a chunk that grew from one flush to the next the last one alone: it holds the others."""
    found: dict[Any, Write] = {}
    for number, (statement, values) in enumerate(writes):
        key = (statement, *values[:3]) if statement in (_READINGS, _CHUNKS) else number
        found.pop(key, None)
        found[key] = statement, values
    return list(found.values())
