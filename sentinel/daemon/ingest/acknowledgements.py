"""Has histories written outside the event loop, confirms stored frames to the ranks, and tells them what they cost.

A rank need not keep for the next daemon what the history has. A frame is stored once everything from it is in the file.
For a batch these are its steps, which must be closed first. Confirmations are rare: a rank that wakes up takes the
processor from training.
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
"""Bytes of stored frames after which it gets one, with layer statistics."""


class Receipt:
    """The frames received from one connection, and how many of them are confirmed."""

    def __init__(self) -> None:
        self._open: deque[tuple[int, int]] = deque()
        """(frame, last step in it) of the batches that may hold steps that are not closed."""
        self._received = self._told = self._bytes = 0

    def take_frame(self, message: wire.FromRank, frame: int, nbytes: int) -> None:
        """Count frame number `frame` of this connection, from 1, which was taken in."""
        self._received = frame
        self._bytes += nbytes
        if isinstance(message, wire.Batch) and message.stream == 0:
            seqs = wire.unpack_column("q", message.seqs)
            if seqs:
                self._open.append((frame, seqs[-1]))

    def count_settled(self, closed_to: int) -> int:
        """Return how many frames are stored once the queue is written, with steps closed up to `closed_to`."""
        while self._open and self._open[0][1] <= closed_to:
            self._open.popleft()
        return self._open[0][0] - 1 if self._open else self._received

    def due(self, frames: int) -> wire.Kept | None:
        """Return the confirmation that these frames are stored, if it is time to send one."""
        if frames - self._told < FRAMES and self._bytes < BYTES:
            return None
        self._told, self._bytes = frames, 0
        return wire.Kept(frames=frames)

    def last(self) -> wire.Kept:
        """Return the confirmation of all frames, at a goodbye."""
        return wire.Kept(frames=self._received)


class Acknowledgements:
    """Writes and confirms for all runs. A disk that does not answer delays only its own history: each is written
    separately, once at a time."""

    def __init__(
        self,
        watches: Mapping[str, WatchedRun],
        ranks: Mapping[Peer, tuple[WatchedRun, Rank]],
        afterwards: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`watches` and `ranks` are the daemon's own, live mappings; `afterwards` runs after each round."""
        self._watches, self._ranks, self._afterwards = watches, ranks, afterwards
        self._receipts: dict[Peer, Receipt] = {}
        self._accounting = Accounting()
        self._due = 0.0
        self._written: dict[str, asyncio.Task[None]] = {}
        """Tasks that write a history at present, by run id."""
        self._round: asyncio.Task[None] | None = None

    def hello(self, peer: Peer, hello: wire.Hello) -> None:
        """Count a hello on this connection, the first or a later one."""
        self._receipts.setdefault(peer, Receipt()).take_frame(hello, peer.frames, peer.nbytes)

    def handle_message(self, peer: Peer, rank: Rank, message: wire.FromRank) -> None:
        """Count any later message on this connection."""
        self._receipts[peer].take_frame(message, peer.frames, peer.nbytes)
        self._accounting.count_frame(rank, peer.nbytes)

    def last(self, peer: Peer) -> wire.Kept:
        """Return the last confirmation, for a rank that said goodbye."""
        return self._receipts[peer].last()

    def drop_peer(self, peer: Peer) -> None:
        """Forget a connection that ended."""
        self._receipts.pop(peer, None)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that are running."""
        return [*self._written.values(), *([self._round] if self._round is not None else [])]

    def look(self, now: float) -> None:
        """Have the histories written, if it is time and no write of them is running. `now` in monotonic seconds."""
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
        """Write a history, and confirm to its ranks what is stored."""
        peers = [peer for peer, (theirs, _) in self._ranks.items() if theirs is watch]
        settled = {peer: self._receipts[peer].count_settled(watch.run.attempt.closed_to) for peer in peers}
        await asyncio.wrap_future(store.begin_flush())
        for peer, frames in settled.items():
            receipt = self._receipts.get(peer)
            if receipt is not None and not store.trouble and (kept := receipt.due(frames)) is not None:
                peer.send(kept)

    def _account(self) -> None:
        """Tell the ranks what this daemon costs them, if that has changed."""
        told = self._accounting.turn([rank for _, rank in self._ranks.values()], time.monotonic())
        for peer, (_, rank) in self._ranks.items():
            if rank in told:
                peer.send(wire.DaemonCost(share=rank.daemon_share))
