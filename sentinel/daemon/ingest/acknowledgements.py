"""Writes what is new into the histories, beside the loop, and acknowledges it to the ranks; with it, what they cost.

A rank need not hold on to what the history has for the next daemon. A frame is stored once everything from it is in the
file. For a batch these are its steps, which must be closed first. Confirmations are rare: a rank that wakes up takes
the processor from training.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from sentinel import wire
from sentinel.daemon.ingest.accounting import Accounting
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.runs import Rank
from sentinel.store import FLUSH_SECONDS, Store

FRAMES = 8
"""Stored frames after which a rank gets a confirmation: about four seconds of batches."""
BYTES = 1024 * 1024
"""Or so many bytes, of layer statistics."""


class Receipt:
    """What was taken from one connection, and how much of it is confirmed."""

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


class Acknowledgements:
    """Those of all runs. A disk that does not answer holds nothing up but its own history: each is written by itself,
    once at a time."""

    def __init__(
        self,
        watches: Mapping[str, WatchedRun],
        ranks: Mapping[Peer, tuple[WatchedRun, Rank]],
        afterwards: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`watches` and `ranks` are the daemon's own, as they are at each round; `afterwards` is done after it."""
        self._watches, self._ranks, self._afterwards = watches, ranks, afterwards
        self._receipts: dict[Peer, Receipt] = {}
        self._accounting = Accounting()
        self._due = 0.0
        self._written: dict[str, asyncio.Task[None]] = {}
        """What is under way, by run id; afterwards none of it is kept."""
        self._round: asyncio.Task[None] | None = None

    def hello(self, peer: Peer, hello: wire.Hello) -> None:
        """A rank said hello on this connection, or said it again."""
        self._receipts.setdefault(peer, Receipt()).take_frame(hello, peer.frames, peer.nbytes)

    def handle_message(self, peer: Peer, rank: Rank, message: wire.FromRank) -> None:
        """What it says after that."""
        self._receipts[peer].take_frame(message, peer.frames, peer.nbytes)
        self._accounting.count_frame(rank, peer.nbytes)

    def last(self, peer: Peer) -> wire.Kept:
        """The last confirmation, to a rank that said goodbye."""
        return self._receipts[peer].last()

    def drop_peer(self, peer: Peer) -> None:
        """The connection ended."""
        self._receipts.pop(peer, None)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is under way."""
        return [*self._written.values(), *([self._round] if self._round is not None else [])]

    def look(self, now: float) -> None:
        """Have the histories written, where it is time and that is not under way. `now` in monotonic seconds."""
        if now < self._due:
            return
        self._due = now + FLUSH_SECONDS
        for run_id, watch in self._watches.items():
            if watch.store and run_id not in self._written:
                self._written[run_id] = task = asyncio.create_task(self._keep(watch, watch.store))
                task.add_done_callback(functools.partial(self._forget_writer, run_id))
        self._account()
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._afterwards())

    def _forget_writer(self, run_id: str, _: asyncio.Task[None]) -> None:
        self._written.pop(run_id, None)

    async def _keep(self, watch: WatchedRun, store: Store) -> None:
        """Write what is new, and tell the ranks that it is."""
        peers = [peer for peer, (theirs, _) in self._ranks.items() if theirs is watch]
        settled = {peer: self._receipts[peer].count_settled(watch.run.attempt.closed_to) for peer in peers}
        await asyncio.wrap_future(store.begin_flush())
        for peer, frames in settled.items():
            receipt = self._receipts.get(peer)
            if receipt is not None and not store.trouble and (kept := receipt.due(frames)) is not None:
                peer.send(kept)

    def _account(self) -> None:
        """Tell the ranks what this daemon costs them."""
        told = self._accounting.turn([rank for _, rank in self._ranks.values()], time.monotonic())
        for peer, (_, rank) in self._ranks.items():
            if rank in told:
                peer.send(wire.DaemonCost(share=rank.daemon_share))
