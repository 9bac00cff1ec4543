"""Tells each rank what the history has of it, so that it need not hold on to that for the next daemon.

A frame is stored once everything from it is in the file. For a batch these are its steps, which must be closed first.
Confirmations are rare: a rank that wakes up takes the processor from training.
"""

from __future__ import annotations

from collections import deque

from sentinel import wire

FRAMES = 8
"""Stored frames after which a rank gets a confirmation: about four seconds of batches."""
BYTES = 1024 * 1024
"""Or so many bytes, of layer statistics."""


class Receipt:
    """Of one connection."""

    def __init__(self) -> None:
        self._open: deque[tuple[int, int]] = deque()
        """(frame, last step in it) of the batches that may hold steps that are not closed."""
        self._received = self._told = self._bytes = 0

    def take_frame(self, message: wire.FromRank, frame: int, nbytes: int) -> None:
        """Frame number `frame` of this connection, from 1, was taken in."""
        self._received = frame
        self._bytes += nbytes
        if isinstance(message, wire.Batch) and message.stream == 0:
            seqs = wire.unpack_column("q", message.seqs)
            if seqs:
                self._open.append((frame, seqs[-1]))

    def count_settled(self, closed_to: int) -> int:
        """How many frames will be kept once what is queued is in the file, where steps are closed up to here."""
        while self._open and self._open[0][1] <= closed_to:
            self._open.popleft()
        return self._open[0][0] - 1 if self._open else self._received

    def due(self, frames: int) -> wire.Kept | None:
        """That these frames are kept, where it is time to say so."""
        if frames - self._told < FRAMES and self._bytes < BYTES:
            return None
        self._told, self._bytes = frames, 0
        return wire.Kept(frames=frames)

    def last(self) -> wire.Kept:
        """At a goodbye: all of it."""
        return wire.Kept(frames=self._received)
