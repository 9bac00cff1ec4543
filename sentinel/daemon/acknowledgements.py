"""Writes what is new into the histories, beside the loop, and acknowledges it to the ranks; with it, what they cost."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from sentinel import wire
from sentinel.daemon.accounting import Accounting
from sentinel.daemon.confirmation import Receipt
from sentinel.daemon.peer import Peer
from sentinel.daemon.watched_run import WatchedRun
from sentinel.runs import Rank
from sentinel.store import FLUSH_SECONDS, Store


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
