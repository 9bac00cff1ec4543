"""Steps on their way from the training thread to the sender's: a bounded queue, in which the oldest makes room.

Before the daemon is there the first steps stay, and what came right after them makes room: rules look back on a run's
start, and a fast loop makes thousands of steps while its daemon starts.

Two threads and no lock: the training thread calls `put`, or appends to `records` where the step is nothing special; the
sender's thread calls `take`.

Records of steps, turned into the columns of a batch.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from sentinel import wire
from sentinel.hooks.transport.records import Record

QUEUE_STEPS = 2048
"""Steps that may wait; above it the oldest is dropped and counted."""
FIRST_STEPS = 512
"""Of a run, that may wait besides, as long as none was taken."""
QUEUE_BYTES = 8 * 1024 * 1024
"""Of layer statistics that wait in the queue; above it new ones are left out."""


class StepQueue:
    """The steps that wait to be sent, oldest first."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque()
        """One that is nothing special (no layers, nothing on a device) may be appended, up to `QUEUE_STEPS`."""
        self.dropped = 0
        """Steps that were dropped so far."""
        self._next_seq = 0
        self._first: deque[Record] = deque()
        """The run's first steps, where the queue was full before any was taken: they do not make room."""
        self._begun = False
        """Whether any was taken."""
        self._bytes_in = self._bytes_out = 0  # one writer each: no lock

    def put(self, record: Record) -> None:
        """Queue a step. Full: the oldest is dropped and counted, before the first `take` the oldest but for the run's
        first ones. Too many bytes: this one's layers are left out."""
        if record.block or record.transfer is not None or len(self.records) >= QUEUE_STEPS:
            self._make_room(record)
        self.records.append(record)

    def take(self, most: int) -> list[Record]:
        """The next steps of one optimizer whose values have arrived, in order; at most so many."""
        records: list[Record] = []
        while len(records) < most and (waiting := self._first or self.records):
            try:
                self._pass(waiting[0])
                record = waiting.popleft()
            except IndexError:  # it was full, and the other thread dropped the head
                break
            if not record.ready() or (records and record.stream != records[0].stream):
                waiting.appendleft(record)
                break
            self._bytes_out += record.nbytes()
            self._begun = True
            records.append(record)
        return records

    def clear(self) -> None:
        """Nobody will send what still waits. `next_seq` stays."""
        self._next_seq = self.next_seq
        self._first.clear()
        self.records.clear()

    @property
    def head(self) -> Record | None:
        """The oldest step that waits."""
        waiting = self._first or self.records
        return waiting[0] if waiting else None

    @property
    def next_seq(self) -> int:
        """After the last step of the first optimizer that was queued."""
        for record in reversed([*self.records]):
            if not record.stream:
                return record.seq + 1
        return self._next_seq

    def _pass(self, record: Record) -> None:
        """It is about to go: see `next_seq`."""
        if not record.stream:
            self._next_seq = record.seq + 1

    def _make_room(self, record: Record) -> None:
        if len(self.records) >= QUEUE_STEPS:
            try:
                if not (self._begun or self._first):
                    self._first.extend(self.records.popleft() for _ in range(FIRST_STEPS))
                else:
                    self._pass(self.records[0])
                    self._bytes_in -= self.records.popleft().nbytes()
                    self.dropped += 1
            except IndexError:  # the sender was quicker
                pass
        if self._bytes_in - self._bytes_out > QUEUE_BYTES:
            record.strip()
        self._bytes_in += record.nbytes()


LARGEST = 512
"""Steps in one batch. Rows are numbered by uint16."""


def batch(records: Sequence[Record], *, dropped: int, pace: wire.Pace | None, skipped: int = 0) -> wire.Batch:
    """One batch of the steps of one optimizer, in their order. `pace`: None where it did not change."""
    rows: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for row, record in enumerate(records):
        for name, value in record.values.items():
            if name not in values:
                rows[name], values[name] = [], []
            rows[name].append(row)
            values[name].append(value)
    return wire.Batch(
        stream=records[0].stream,
        seqs=array("q", [record.seq for record in records]).tobytes(),
        times=array("d", [record.time for record in records]).tobytes(),
        columns={name: _column(rows[name], column, len(records)) for name, column in values.items()},
        layers=tuple(_block(record) for record in records if record.block),
        dropped=dropped,
        skipped=skipped,
        pace=pace,
    )


def _column(rows: list[int], values: list[float], height: int) -> wire.Column:
    present = b"" if len(rows) == height else array("H", rows).tobytes()
    return wire.Column(values=array("d", values).tobytes(), rows=present)


def _block(record: Record) -> wire.LayerBlock:
    return wire.LayerBlock(seq=record.seq, table=record.table.digest, stats=record.block, layers=record.rows)
