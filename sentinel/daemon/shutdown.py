"""The end of the daemon: when it is done, what it sends before it exits, and what it removes.

It exits once every rank said goodbye or its process is dead, or `LINGER_SECONDS` after a connection broke; but not
before the supervisor knows how the run ended and the receivers know what happened. Both have a time limit.
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
"""Seconds for a rank whose connection broke, but whose process lives, to come back."""
DELIVERY_SECONDS = 30.0
"""Seconds for the delivery of the last messages to the receivers, once the run has ended."""
TERMINATED_SECONDS = 5.0
"""Seconds for the delivery of the last messages when the daemon is asked to exit."""
SUPERVISOR_SECONDS = 5.0
"""Seconds for the run's supervisor to ask how the run ended."""
GOODBYE_SECONDS = 1.0
"""Seconds for writing a leaving rank's last records to disk, if the daemon does not stay for other runs."""
KEEPING_SECONDS = 90.0
"""Seconds to wait for a history that cannot be written: a backup may lock it for a minute."""
SHELVE_SECONDS = 4.0
"""Seconds for closing the histories, several at a time. One that is not closed is complete, too, with its write-ahead
log beside it, and what it lacks the ranks send the next daemon again."""
FORGET_SECONDS = 60.0
"""Seconds for which a daemon that stays remembers a run with no connected rank."""
OTHERS_SECONDS = 0.25
"""Seconds for which the first rank that ends waits for the others: fewer than it waits for the daemon."""
_AGAIN_SECONDS = 0.05
"""Seconds between two checks whether everything that a rank sent is judged."""
FIRST_HELLO_SECONDS = 120.0
"""Seconds for which a daemon that `attach` started waits for the first rank."""


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
        """`watches` and `ranks` are the daemon's own, live mappings. `service`: the daemon."""
        self._directory, self._watches, self._ranks, self._stay = directory, watches, ranks, stay
        self._processes, self._supervision, self._acknowledgements = processes, supervision, acknowledgements
        self._service, self._frontend = service, frontend
        self._vanished = False
        self.done = asyncio.Event()
        """Set when the daemon is to exit."""
        self.served = False
        """Whether a rank ever said hello."""
        self.idle_since = time.monotonic()
        """When a rank's connection last ended, or the daemon began, in monotonic seconds."""

    def take_leave(self, peer: Peer, *, last_words: bool) -> None:
        """Let a rank that said goodbye leave. If it owes evidence of an open incident, it sends that first.

        `last_words`: the message is one after the goodbye.
        """
        watch, rank = self._ranks[peer]
        if not watch.actions.evidence.is_owed(rank.identity.rank):
            self._part(peer, watch)
        elif not last_words:
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._part, peer, watch)

    def _part(self, peer: Peer, watch: WatchedRun) -> None:
        """Confirm a rank's goodbye and close its connection, once everything that it sent is judged.

        The rank waits for the confirmation that all is stored, and starts another daemon if it gets none. So after the
        last rank our files are removed first: killed before, we have a successor; after it, nothing is left.
        """
        if peer not in self._ranks:
            return
        if watch.ingest.behind or self._is_early(watch, self._ranks[peer][1]):
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._part, peer, watch)
            return
        kept, takes_closing = self._acknowledgements.last(peer), self._ranks[peer][1].hello.takes_closing
        if takes_closing:
            watch.incidents.end_opening(time.monotonic())  # while the rank is connected and can print it
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
        """Whether this rank, which prints the run's summary, is the first of several to leave: the others send their
        last steps any moment now."""
        goodbye, attempt = rank.goodbye, watch.run.attempt
        if goodbye is None or not rank.hello.takes_closing or len(attempt.live) < 2:
            return False
        return attempt.closed_to < goodbye.next_seq - 1 and time.monotonic() - rank.heard < OTHERS_SECONDS

    def tell_supervisor(self, watch: WatchedRun) -> None:
        """Tell the supervisor how the run ended, once no rank of it is left."""
        if self.is_over(watch):
            # Otherwise the end of a connection may be judged before the end of its process, which is the cause.
            watch.ingest.observe_deaths(time.monotonic())
            self._supervision.tell(watch, over=True)

    def is_over(self, watch: WatchedRun) -> bool:
        """Whether no rank of the run is connected or may come back, and everything that they sent is judged."""
        if watch.ingest.behind:
            return False
        left = [rank for rank in watch.run.attempt.ranks.values() if rank.state != "gone"]
        return not any(rank.state == "live" or rank.process in self._processes for rank in left)

    def tick(self, now: float) -> None:
        """Have runs that are over send what waits, and exit if no rank came, or came back, in time."""
        for watch in self._watches.values():
            if self.is_over(watch):
                _send_rest(watch)
        self.end_if_done()
        idle = now - self.idle_since
        if not self._ranks and not self._stay and idle > (LINGER_SECONDS if self.served else FIRST_HELLO_SECONDS):
            self._finish_deliveries()

    def end_if_done(self) -> None:
        """Begin to exit if all ranks have left."""
        if self._stay or self._ranks or any(watch.ingest.behind for watch in self._watches.values()):
            return
        ranks = [rank for watch in self._watches.values() for rank in watch.run.attempt.ranks.values()]
        lost_alive = [rank for rank in ranks if rank.state == "lost" and rank.process in self._processes]
        if self.served and not lost_alive:
            self._finish_deliveries()

    def _finish_deliveries(self) -> None:
        """Set `done` once the receivers have everything, or their time is up. No rank is left."""
        outlets = [watch.notifier.outlet for watch in self._watches.values()]
        for watch in self._watches.values():
            _send_rest(watch)
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
        """Remove our files in the directory, and the directory if it was made for this run. The history is elsewhere.

        Does so once: files that are there a moment later are our successor's.
        """
        if self._vanished:
            return
        self._vanished = True
        self._frontend.withdraw()
        locks.remove(self._directory, whole=not self._stay and self._directory.parent == paths.runtime_root())


def _send_rest(watch: WatchedRun) -> None:
    """Have the receivers of a run that is over get at once what waits."""
    watch.notifier.end_joining()  # no rank is left by which the other nodes are found
    watch.notifier.tick(watch.incidents.log.cases.values())  # the last evidence may name the cause
    watch.notifier.outlet.hurry()


async def close(watches: Collection[WatchedRun], seconds: float) -> None:
    """Release these runs and close their histories.

    Their receivers, all at the same time, have `seconds` for the last messages; undelivered ones are left in a file
    beside the history for the next daemon.
    """
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
