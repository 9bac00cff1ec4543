"""The daemon: the only module that knows all the others.

Serves the runs that say hello, and is gone when they are gone (`departure.py`). One that stays, such as a node's
service, waits for the next run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sentinel import __version__, actions, places, tenancy, wire
from sentinel.config import Settings
from sentinel.daemon import blindness, interrupts, restoration
from sentinel.daemon.acknowledgements import Acknowledgements
from sentinel.daemon.departure import FORGET_SECONDS, TERMINATED_SECONDS, Departure, close
from sentinel.daemon.front import Front
from sentinel.daemon.housekeeping import keep_house
from sentinel.daemon.machine import Machine
from sentinel.daemon.processes import Processes
from sentinel.daemon.queries import Queries
from sentinel.daemon.receivers import Receivers
from sentinel.daemon.server import Listener, Peer, serve
from sentinel.daemon.silencing import Silencing
from sentinel.daemon.supervision import Supervision
from sentinel.daemon.tenants import Tenants
from sentinel.daemon.tick_timer import TickTimer
from sentinel.daemon.watched_run import WatchedRun
from sentinel.engine import Transition
from sentinel.errors import ConfigError, ProtocolError
from sentinel.notify import undelivered
from sentinel.notify.deadman import Deadman
from sentinel.rulebook import Rulebook
from sentinel.runs import Attempt, Rank, Run, Runs
from sentinel.store import Store

log = logging.getLogger(__name__)


class Daemon:
    """Wires the stations together. `serve` runs until the work is done."""

    def __init__(
        self,
        directory: Path,
        load: Callable[[Settings], Rulebook],
        settings: Settings,
        reread: Callable[[], Settings],
        *,
        stay: bool = False,
        service: bool = False,
        notes: Sequence[str] = (),
        starter: int | None = None,
    ) -> None:
        """`load` reads the rule files, now and at each reload; `reread` the settings, at each. `service`: all users are
        served, for good. `starter`: process that started this daemon for a run; it is not waited for once that has
        ended."""
        book = load(settings)
        for note in book.notes:
            log.error("%s", note)
        self._directory, self._rules, self._load, self._history = directory, book.rules, load, settings.history
        self._reread = reread
        self._stay, self._service, self._notes = stay or service, service, (*notes, *book.notes)
        self._tenants = Tenants(service=service)
        self._runs = Runs()
        self._watches: dict[str, WatchedRun] = {}
        self._ranks: dict[Peer, tuple[WatchedRun, Rank]] = {}
        self._acknowledgements = Acknowledgements(self._watches, self._ranks, self._forget)
        self._peers: dict[tuple[str, int], Peer] = {}
        self._starter = starter
        self._processes = Processes(self._process_ended)
        self._odd_versions: set[tuple[str, str]] = set()
        self._timer = TickTimer(self._look, self._restless)
        self._silencing = Silencing(self._tenants, service=service)
        self._receivers = Receivers(settings, self._silencing)
        self._notes += tuple(self._receivers.notes)
        self._supervision = Supervision()
        self._actions = actions.installed()
        self._deadman = Deadman(settings.heartbeat, self._blind)
        self._front = Front(directory, settings.daemon, self._watches, self._reload, self._deadman.status)
        self._front.reloads.read(book.notes)
        self._queries = Queries(self._tenants, self._silencing, self._front.status)
        self._departure = Departure(
            directory,
            self._watches,
            self._ranks,
            stay=self._stay,
            processes=self._processes,
            supervision=self._supervision,
            acknowledgements=self._acknowledgements,
            disconnected=self.disconnected,
            withdraw=self._front.withdraw,
        )

    async def serve(self) -> None:
        """Serve until SIGTERM, SIGINT, or the runs are gone. Raises ConfigError where the socket cannot be had."""
        path = places.socket_path(self._directory)
        locks = tenancy.live(self._directory)
        if locks is None:
            raise ConfigError(f"{path}: a daemon serves here already; stop it first, or use another --directory")
        server = await serve(path, self, everybody=self._service)
        interrupts.serve(self._departure.done.set, self._reload)
        log.info("training-sentinel %s serves at %s", __version__, path)
        if self._starter is not None:
            self._processes.hold(self._starter)
        work = (
            keep_house(self._tenants.folders, self._history),
            Machine().serve(self._watches),
            self._deadman.serve(),
        )
        tasks = [asyncio.create_task(part) for part in work]
        self._timer.start()
        front = asyncio.create_task(self._front.serve())
        for leftover in await asyncio.to_thread(tenancy.sweep, places.runtime_root()):
            log.info("%s: left behind by a daemon that was killed; removed", leftover)
        try:
            await self._departure.done.wait()
        finally:
            await self._front.close(front)
            self._timer.stop()
            for task in (tasks := [*tasks, *self._acknowledgements.tasks]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close(server)
            for lock in locks:
                os.close(lock)

    def received(self, peer: Peer, message: wire.FromRank) -> None:
        """A message from a rank or the command line."""
        now = time.monotonic()
        if isinstance(message, wire.Query):
            self._queries.answer(peer, message, self._watches.values())
        elif isinstance(message, wire.Supervise):
            self._supervision.arrived(peer, message)
            for watch in self._watches.values():
                self._supervision.tell(watch, over=self._departure.is_over(watch))
                watch.supervised(now)
            self._departure.end_if_done()
        elif isinstance(message, wire.Hello):
            self._hello(peer, message, now)
        elif peer in self._ranks:
            watch, rank = self._ranks[peer]
            if watch.attempt.has(rank):
                watch.message(rank, message, now)
            elif isinstance(message, wire.Goodbye):  # what it still sends of an attempt that is over is let go
                rank.goodbye = message
            self._acknowledgements.received(peer, rank, message)
            if rank.goodbye is not None:
                self._departure.take_leave(peer, last_words=not isinstance(message, wire.Goodbye))
            self._timer.beside(now)
        else:
            raise ProtocolError(f"{type(message).__name__} before hello")

    def disconnected(self, peer: Peer) -> None:
        """A connection ended."""
        self._supervision.left(peer)
        if peer not in self._ranks:
            return
        watch, rank = self._ranks.pop(peer)
        self._acknowledgements.left(peer)
        key = (watch.run.run_id, rank.identity.rank)
        if self._peers.get(key) is peer:
            del self._peers[key]
            if watch.attempt.has(rank):
                watch.lost(rank, time.monotonic())
            watch.left = time.monotonic()
            self._departure.tell_supervisor(watch)
        self._departure.idle_since = time.monotonic()
        self._departure.end_if_done()

    def _hello(self, peer: Peer, hello: wire.Hello, now: float) -> None:
        theirs, hello = hello.identity.run_id, self._tenants.admitted(hello, peer.uid)
        known = self._ranks.get(peer)
        if known is not None and known[0].run.run_id != hello.identity.run_id:
            raise ProtocolError(f"this connection is run {known[0].run.run_id}'s: open one for each run")
        if known is not None and known[1].identity.rank != hello.identity.rank:
            known[1].goodbye = wire.Goodbye(reason="detach")  # it joined its group since, and learned which rank it is
            self.disconnected(peer)
        run = self._runs.of(hello.identity, now)
        watch, untold = self._watches.get(run.run_id), list[Transition]()
        began = watch is None
        if watch is None:
            watch, untold = self._begun(run, hello, now)
        rank = watch.hello(hello, now, peer.pid)
        # Before the old connection's end is seen: the rank lives on in this one.
        self._peers[run.run_id, hello.identity.rank] = peer
        self._ranks[peer] = (watch, rank)
        self._acknowledgements.hello(peer, hello)
        self._departure.served = True
        self._processes.hold(peer.pid)
        if descriptors := peer.descriptors():
            watch.stalls.arrived(rank, descriptors)
        notes = (*self._notes, *((watch.why_no_history,) if watch.why_no_history else ()))
        signals = peer.pid in self._processes and os.getuid() in (0, peer.uid)
        peer.send(wire.Welcome(version=__version__, notes=notes, keeps=watch.store is not None, signals=signals))
        if began and run.run_id != theirs:
            watch.tell(f"run id {theirs} is another user's too: this run is {run.run_id} here")
        watch.transitions(untold, now)
        watch.tell_again(rank)
        self._supervision.tell(watch, over=False)
        if began and watch.store:
            for note in undelivered.take(watch.store.path.parent.parent, run.run_id):
                watch.tell(note)
        if hello.version != __version__ and (run.run_id, hello.version) not in self._odd_versions:
            self._odd_versions.add((run.run_id, hello.version))
            log.warning("%s runs training-sentinel %s, this is %s", run.name, hello.version, __version__)
        log.info("%s (%s) rank %d, process %d", run.name, run.run_id, hello.identity.rank, peer.pid)

    def _begun(self, run: Run, hello: wire.Hello, now: float) -> tuple[WatchedRun, list[Transition]]:
        """A run that this daemon did not know: a new one, or another daemon's."""
        store, why_no_history = None, ""
        try:
            store = Store(self._tenants.history(run.run_id), run=run.name, run_id=run.run_id)
        except ConfigError as error:
            why_no_history = str(error)
            log.error("%s", error)
        send = functools.partial(self._send, run.run_id)
        watch = self._watches[run.run_id] = WatchedRun(
            run,
            self._rules,
            store,
            send,
            self._receivers.notifier(run, store),
            self._actions,
            self._processes.interrupt,
        )
        watch.end_job = functools.partial(self._supervision.end, watch)
        watch.why_no_history = why_no_history
        if store is None:
            return watch, []
        try:
            untold = restoration.resume(watch, store.path, hello, now)
        except Exception as error:
            if isinstance(error, ConfigError):
                store.damaged(str(error))
            else:
                log.exception("run %s: cannot go on from %s; it begins anew", run.name, store.path)
            run.attempt = Attempt(run.attempt.number + 1, now)
            watch.begin_attempt()
            return watch, []
        for rank in watch.attempt.ranks.values():
            if rank.state == "lost":
                self._processes.hold(rank.process)
        return watch, untold

    def _reload(self) -> tuple[str, ...]:
        """Read settings and rule files again. Where there is a mistake, all stays as it was. Returns the mistakes."""
        try:
            settings = self._reread()
        except ConfigError as error:
            self._front.reloads.read((str(error),))
            log.error("%s; settings and rules stay as they were", error)
            return (str(error),)
        book = self._load(settings)
        self._front.reloads.read(book.notes)
        for note in book.notes:
            log.error("%s; the rules stay as they were", note)
        if not book.notes:
            self._rules = book.rules
            self._resettle(settings)
            for watch in self._watches.values():
                watch.reload(book.rules, time.monotonic())
            log.info("rules are read again: %d", len(book.rules))
        return book.notes

    def _resettle(self, settings: Settings) -> None:
        """What can be set anew. What only the start can set (HTTP, history) stays."""
        self._deadman.replace(settings.heartbeat)
        self._receivers.replace(settings, self._watches.values())

    def _blind(self) -> str:
        return self._front.unhealthy() or blindness.reason(self._watches.values(), time.monotonic())

    def _send(self, run_id: str, rank: int, message: wire.Message) -> None:
        peer = self._peers.get((run_id, rank))
        if peer is not None:
            peer.send(message)

    async def _forget(self) -> None:
        """Let go of runs that have ended, where the daemon stays. Their histories have them."""
        if not self._stay:
            return
        for run_id, watch in list(self._watches.items()):
            gone = not watch.attempt.live and time.monotonic() - watch.left > FORGET_SECONDS
            if gone and not watch.notifier.pipeline.pending:
                del self._watches[run_id]
                self._runs.forget(run_id)
                self._tenants.leave(run_id)
                await close([watch], TERMINATED_SECONDS)

    def _process_ended(self, pid: int, status: int | None) -> None:
        if pid == self._starter and not self._departure.served:
            log.info("process %d, which started this daemon, is gone, and nobody said hello", pid)
            self._departure.done.set()
        for watch in self._watches.values():
            watch.stalls.ended(pid, status, time.monotonic())
        # What it sent last may still be in the socket: give the readers a turn before the connections go.
        asyncio.get_running_loop().call_later(0.1, self._drop, pid)

    def _drop(self, pid: int) -> None:
        for peer in [peer for peer in self._ranks if peer.pid == pid]:
            peer.close()
            self.disconnected(peer)
        for watch in self._watches.values():
            watch.processes_ended(time.monotonic())
            self._departure.tell_supervisor(watch)
        self._departure.end_if_done()

    def _look(self, now: float) -> None:
        self._tick(now)
        self._acknowledgements.look(now)

    def _restless(self) -> bool:
        alone = not self._ranks and not self._stay
        return alone or any(watch.restless for watch in self._watches.values())

    def _tick(self, now: float) -> None:
        for watch in self._watches.values():
            try:
                watch.tick(now)
                watch.faulty = False
            except Exception:
                watch.faulty = True
                log.exception("run %s: tick failed", watch.run.name)
        self._front.turned()
        self._departure.tick(now)

    async def _close(self, server: Listener) -> None:
        server.close()
        self._departure.vanish()
        await close(self._watches.values(), TERMINATED_SECONDS)
        await self._receivers.close()
        self._processes.close()
        log.info("done")
