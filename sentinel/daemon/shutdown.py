"""The end of the daemon: when it is done, what it sends before it exits, and what it removes.

It goes once every rank said goodbye, or its process is dead, or `LINGER_SECONDS` after a connection broke; but not
before the supervisor knows how the run ended, and the receivers what happened, each for so long at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from sentinel import wire
from sentinel.actions.evidence import LAST_WORDS_SECONDS
from sentinel.daemon.frontend.http_frontend import HttpFrontend
from sentinel.daemon.ingest.acknowledgements import Acknowledgements
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.ingest.server import Service
from sentinel.daemon.job.supervision import Supervision
from sentinel.daemon.ranks.processes import Processes
from sentinel.daemon.run.summary import summarize_run
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.node import locks, paths
from sentinel.notify import undelivered
from sentinel.runs import Rank
from sentinel.store import PATIENCE_SECONDS, Store

log = logging.getLogger(__name__)

LINGER_SECONDS = 10.0
"""How long a rank whose connection broke, but whose process lives, may take to come back."""
DELIVERY_SECONDS = 30.0
"""How long the receivers may take to be told the last, once the run has gone."""
TERMINATED_SECONDS = 5.0
"""How long the receivers may take when the daemon is asked to exit."""
SUPERVISOR_SECONDS = 5.0
"""How long the run's supervisor may take to ask how it ended."""
GOODBYE_SECONDS = 1.0
"""How long the disk may take to keep the last of a rank, where no other run waits for it."""
KEEPING_SECONDS = 90.0
"""How long to wait for a history that cannot be written: a backup may lock it for a minute."""
SHELVE_SECONDS = 4.0
"""For which histories are closed, several at a time. One that is not is whole, too, with its write-ahead log beside it,
and what is not in it the ranks tell the next daemon again."""
FORGET_SECONDS = 60.0
"""How long a daemon that stays remembers a run with no connected rank."""
OTHERS_SECONDS = 0.25
"""How long the first rank waits at its end for the others: less than it waits for the daemon."""
_AGAIN_SECONDS = 0.05
"""Between two looks whether all that a rank said is judged."""
FIRST_HELLO_SECONDS = 120.0
"""How long a daemon that `attach` started waits for the first rank."""


class DaemonShutdown:
    """Lets ranks leave, and sets `done` once none is left to serve."""

    def __init__(
        self,
        directory: Path,
        watches: Mapping[str, WatchedRun],
        ranks: Mapping[Peer, tuple[WatchedRun, Rank]],
        *,
        stay: bool,
        processes: Processes,
        supervision: Supervision,
        acknowledgements: Acknowledgements,
        service: Service,
        frontend: HttpFrontend,
    ) -> None:
        """`watches` and `ranks` are the daemon's own, as they are at each moment. `service`: the daemon."""
        self._directory, self._watches, self._ranks, self._stay = directory, watches, ranks, stay
        self._processes, self._supervision, self._acknowledgements = processes, supervision, acknowledgements
        self._service, self._frontend = service, frontend
        self._vanished = False
        self.done = asyncio.Event()
        """The daemon is to go."""
        self.served = False
        """Whether a rank ever said hello."""
        self.idle_since = time.monotonic()
        """When a rank's connection ended last, or the daemon began."""

    def take_leave(self, peer: Peer, *, last_words: bool) -> None:
        """A rank said goodbye, or more after it. One that owes evidence of an open incident tells that first."""
        watch, rank = self._ranks[peer]
        if not watch.actions.evidence.is_owed(rank.identity.rank):
            self._part(peer, watch)
        elif not last_words:
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._part, peer, watch)

    def _part(self, peer: Peer, watch: WatchedRun) -> None:
        """A rank said goodbye. It waits for the confirmation that all is stored, and would otherwise start another
        daemon: so our files go first, if it was the last rank. Killed before, we have a successor; after it, nothing is
        left."""
        if peer not in self._ranks:
            return
        if watch.ingest.behind or self._is_early(watch, self._ranks[peer][1]):
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._part, peer, watch)
            return
        kept, takes_closing = self._acknowledgements.last(peer), self._ranks[peer][1].hello.takes_closing
        if takes_closing:
            watch.incidents.end_opening(time.monotonic())  # while it is there to be told
        self._service.drop_peer(peer)
        if watch.store:
            watch.store.flush(PATIENCE_SECONDS if self._stay else GOODBYE_SECONDS)
        if self.done.is_set():
            self.vanish()
        if takes_closing:
            peer.send(wire.Closing(summary=summarize_run(watch)))
        if watch.store:
            peer.send(kept)
        peer.close()

    @staticmethod
    def _is_early(watch: WatchedRun, rank: Rank) -> bool:
        """Whether this rank, which prints what the run came to, is the first of several to go: the others say their
        last steps any moment now."""
        goodbye, attempt = rank.goodbye, watch.run.attempt
        if goodbye is None or not rank.hello.takes_closing or len(attempt.live) < 2:
            return False
        return attempt.closed_to < goodbye.next_seq - 1 and time.monotonic() - rank.heard < OTHERS_SECONDS

    def tell_supervisor(self, watch: WatchedRun) -> None:
        """Once no rank of the run is left, how it ended."""
        if self.is_over(watch):
            # Else a connection's end may come before its process', which is the cause.
            watch.ingest.observe_deaths(time.monotonic())
            self._supervision.tell(watch, over=True)

    def is_over(self, watch: WatchedRun) -> bool:
        """Whether no rank of the run is connected, or may come back, and all that they said is judged."""
        if watch.ingest.behind:
            return False
        left = [rank for rank in watch.run.attempt.ranks.values() if rank.state != "gone"]
        return not any(rank.state == "live" or rank.process in self._processes for rank in left)

    def tick(self, now: float) -> None:
        """Exit if no rank came, or came back, in time."""
        self.end_if_done()
        idle = now - self.idle_since
        if not self._ranks and not self._stay and idle > (LINGER_SECONDS if self.served else FIRST_HELLO_SECONDS):
            self._finish_deliveries()

    def end_if_done(self) -> None:
        """Go where all ranks have gone."""
        if self._stay or self._ranks or any(watch.ingest.behind for watch in self._watches.values()):
            return
        ranks = [rank for watch in self._watches.values() for rank in watch.run.attempt.ranks.values()]
        lost_alive = [rank for rank in ranks if rank.state == "lost" and rank.process in self._processes]
        if self.served and not lost_alive:
            self._finish_deliveries()

    def _finish_deliveries(self) -> None:
        """No rank is left: exit once the receivers have everything, or have not answered for long enough."""
        outlets = [watch.notifier.outlet for watch in self._watches.values()]
        for watch in self._watches.values():
            watch.notifier.tick(watch.incidents.log.cases.values())  # the last evidence may name the cause
            watch.notifier.outlet.hurry()
        waited = time.monotonic() - self.idle_since
        if any(map(self._supervision.serves, self._watches.values())):
            return
        if waited < SUPERVISOR_SECONDS and any(map(self._supervision.owes, self._watches.values())):
            return
        if waited < KEEPING_SECONDS and any(watch.store and watch.store.owes for watch in self._watches.values()):
            return
        if waited > DELIVERY_SECONDS or not any(outlet.pending for outlet in outlets):
            self.done.set()

    def vanish(self) -> None:
        """Take away what is ours in the directory, and it, if it was made for this run. The history is elsewhere. Once:
        what is there a moment later is our successor's."""
        if self._vanished:
            return
        self._vanished = True
        self._frontend.withdraw()
        locks.remove(self._directory, whole=not self._stay and self._directory.parent == paths.runtime_root())


async def close(watches: Collection[WatchedRun], seconds: float) -> None:
    """Runs are let go of. Their receivers, all at the same time, may take so long to be told the last; what they were
    not told is left in a file beside the history for the next daemon."""
    await asyncio.gather(*(watch.membership.close() for watch in watches if watch.membership), return_exceptions=True)
    await asyncio.gather(*(watch.notifier.pipeline.close(seconds) for watch in watches), return_exceptions=True)
    until = time.monotonic() + SHELVE_SECONDS
    shelving = [asyncio.to_thread(_shelve, watch, watch.store, until) for watch in watches if watch.store]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*shelving), SHELVE_SECONDS + 0.5)


def _shelve(watch: WatchedRun, store: Store, until: float) -> None:
    run = watch.run
    try:
        left = undelivered.list_left(run.name, run.run_id, watch.notifier.pipeline.entries)
        undelivered.leave(store.path.parent.parent, left)
        store.close(max(until - time.monotonic(), 0.0))
    except Exception:
        log.exception("run %s: its history is not closed", run.name)
