"""Steps on their way from the training thread to the sender's: a bounded queue, in which the oldest makes room.

Two threads and no lock: the training thread calls `put`, or appends to `records` where the step is nothing special; the
sender's thread calls `take`.
"""

from __future__ import annotations

from collections import deque

from sentinel.hooks.readout import Record

QUEUE_STEPS = 2048
"""Steps that may wait; above it the oldest is dropped and counted."""
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
        self._bytes_in = self._bytes_out = 0  # one writer each: no lock

    def put(self, record: Record) -> None:
        """Queue a step. Full: the oldest is dropped and counted. Too many bytes: this one's layers are left out."""
        if record.block or record.transfer is not None or len(self.records) >= QUEUE_STEPS:
            self._make_room(record)
        self.records.append(record)

    def take(self, most: int) -> list[Record]:
        """The next steps of one optimizer whose values have arrived, in order; at most so many."""
        records: list[Record] = []
        while self.records and len(records) < most:
            try:
                self._pass_head()
                record = self.records.popleft()
            except IndexError:  # it was full, and the other thread dropped the head
                break
            if not record.ready() or (records and record.stream != records[0].stream):
                self.records.appendleft(record)
                break
            self._bytes_out += record.nbytes()
            records.append(record)
        return records

    def clear(self) -> None:
        """Nobody will send what still waits. `next_seq` stays."""
        self._next_seq = self.next_seq
        self.records.clear()

    @property
    def next_seq(self) -> int:
        """After the last step of the first optimizer that was queued."""
        for record in reversed([*self.records]):
            if not record.stream:
                return record.seq + 1
        return self._next_seq

    def _pass_head(self) -> None:
        """The oldest record is about to go: see `next_seq`."""
        if not self.records[0].stream:
            self._next_seq = self.records[0].seq + 1

    def _make_room(self, record: Record) -> None:
        if len(self.records) >= QUEUE_STEPS:
            try:
                self._pass_head()
                self._bytes_in -= self.records.popleft().nbytes()
                self.dropped += 1
            except IndexError:  # the sender was quicker
                pass
        if self._bytes_in - self._bytes_out > QUEUE_BYTES:
            record.strip()
        self._bytes_in += record.nbytes()
