"""Writes what is new into the histories, beside the loop, and acknowledges it to the ranks; with it, what they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from sentinel import wire
from sentinel.daemon.accounting import Accounting
from sentinel.daemon.confirmation import Receipt
from sentinel.daemon.server import Peer
from sentinel.daemon.watched_run import WatchedRun
from sentinel.runs import Rank
from sentinel.store import FLUSH_SECONDS, Store


class Acknowledgements:
    """Those of all runs. A disk that does not answer holds nothing up: there is one round of writing at most."""

    def __init__(
        self,
        watches: Mapping[str, WatchedRun],
        ranks: Mapping[Peer, tuple[WatchedRun, Rank]],
        afterwards: Callable[[], Awaitable[None]],
    ) -> None:
        """`watches` and `ranks` are the daemon's own, as they are at each round; `afterwards` is done after it."""
        self._watches, self._ranks, self._afterwards = watches, ranks, afterwards
        self._receipts: dict[Peer, Receipt] = {}
        self._accounting = Accounting()
        self._due = 0.0
        self.tasks: set[asyncio.Task[None]] = set()
        """The round that is under way."""

    def hello(self, peer: Peer, hello: wire.Hello) -> None:
        """A rank said hello on this connection, or said it again."""
        self._receipts.setdefault(peer, Receipt()).received(hello, peer.frames, peer.nbytes)

    def received(self, peer: Peer, rank: Rank, message: wire.FromRank) -> None:
        """What it says after that."""
        self._receipts[peer].received(message, peer.frames, peer.nbytes)
        self._accounting.received(rank, peer.nbytes)

    def last(self, peer: Peer) -> wire.Kept:
        """What a rank is told that said goodbye."""
        return self._receipts[peer].last()

    def left(self, peer: Peer) -> None:
        """The connection ended."""
        self._receipts.pop(peer, None)

    def look(self, now: float) -> None:
        """Begin a round, where it is time and none is under way. `now` in monotonic seconds."""
        if now >= self._due and not self.tasks:
            self._due = now + FLUSH_SECONDS
            self.tasks.add(task := asyncio.create_task(self._round()))
            task.add_done_callback(self.tasks.discard)

    async def _round(self) -> None:
        for watch in list(self._watches.values()):
            if watch.store:
                await self._keep(watch, watch.store)
        self._account()
        await self._afterwards()

    async def _keep(self, watch: WatchedRun, store: Store) -> None:
        """Write what is new, and tell the ranks that it is."""
        peers = [peer for peer, (theirs, _) in self._ranks.items() if theirs is watch]
        settled = {peer: self._receipts[peer].settled(watch.attempt.closed_to) for peer in peers}
        await asyncio.to_thread(store.flush, None)
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
