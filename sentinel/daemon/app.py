"""The daemon: the only module that knows all the others.

It serves the runs that say hello, and exits when they have ended (`shutdown.py`). A daemon that stays, such as a node's
service, waits for the next run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sentinel import actions, wire
from sentinel._version import __version__
from sentinel.config import settings as config
from sentinel.config.settings import Settings
from sentinel.daemon import health, restoration, signal_handlers
from sentinel.daemon.frontend.http_frontend import HttpFrontend
from sentinel.daemon.frontend.queries import Queries
from sentinel.daemon.ingest.acknowledgements import Acknowledgements
from sentinel.daemon.ingest.early_records import EarlyRecords
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.ingest.peer_link import PeerLink
from sentinel.daemon.ingest.server import Listener, serve
from sentinel.daemon.ingest.shares import LAYERS, LOOK_SECONDS, PORTION_SECONDS, RUNS, Shares, turn
from sentinel.daemon.job import joining
from sentinel.daemon.job.supervision import Supervision
from sentinel.daemon.machine import MachineReader
from sentinel.daemon.ranks.exit_status import has_ended
from sentinel.daemon.ranks.processes import Processes
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.daemon.shutdown import FORGET_SECONDS, KEEPING_SECONDS, TERMINATED_SECONDS, DaemonShutdown, close
from sentinel.daemon.tenancy.histories import Histories, Opened
from sentinel.daemon.tenancy.receivers import Receivers
from sentinel.daemon.tenancy.retention_task import keep_house
from sentinel.daemon.tenancy.silencing import Silencing
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.daemon.tick_timer import TickTimer
from sentinel.engine import Transition
from sentinel.errors import ConfigError, DamageError, ProtocolError
from sentinel.node import locks, paths
from sentinel.notify import undelivered
from sentinel.notify.deadman import Deadman
from sentinel.rulebook import loader
from sentinel.rulebook.loader import Rulebook, explain_unknown
from sentinel.runs import Attempt, Rank, Run, Runs

if TYPE_CHECKING:
    from sentinel.web.assistants import MakeServer

log = logging.getLogger(__name__)


class ConfigFiles(NamedTuple):
    """The files that a daemon reads at its start and at each reload."""

    settings: Path | None
    """The settings file; None: where it usually is."""
    rules: Sequence[Path] = ()
    """Rule files, in addition to those that the settings name."""

    def read_settings(self) -> Settings:
        """Return the settings. Raises ConfigError."""
        return config.load(self.settings)

    def load_rules(self, settings: Settings) -> Rulebook:
        """Return the rules."""
        return loader.load([*settings.daemon.rules, *self.rules])


class Daemon:
    """Connects the parts of the daemon. `serve` runs until the work is done."""

    def __init__(
        self,
        directory: Path,
        files: ConfigFiles,
        settings: Settings,
        *,
        stay: bool = False,
        service: bool = False,
        notes: Sequence[str] = (),
        starter: int | None = None,
        make_assistants: MakeServer | None = None,
    ) -> None:
        """Prepare a daemon; `serve` starts it.

        `settings`: read already; `files` has them read again at each reload. `stay`: wait for the next run when all
        have ended. `service`: serve all users, and stay. `notes`: mistakes in the settings, shown to each rank.
        `starter`: pid of the process that started this daemon for a run; once it has ended, the daemon waits for no
        run. `make_assistants` makes the server for MCP over HTTP; None: MCP is not served.
        """
        book = files.load_rules(settings)
        for note in book.notes:
            log.error("%s", note)
        self._directory, self._rules, self._files, self._history = directory, book.rules, files, settings.history
        self._cluster, self._trackers = settings.cluster, settings.trackers
        self._stay, self._service, self._notes = stay or service, service, (*notes, *book.notes)
        self._tenants = Tenants(service=service)
        self._shares = Shares(several=service)
        self._closing = False
        self._catching_up: dict[WatchedRun, asyncio.Task[None]] = {}
        self._runs = Runs()
        self._histories = Histories(self._tenants)
        self._watches: dict[str, WatchedRun] = {}
        self._ranks: dict[Peer, tuple[WatchedRun, Rank]] = {}
        self._acknowledgements = Acknowledgements(self._watches, self._ranks, self._forget)
        self._peers: dict[tuple[str, int], Peer] = {}
        self._starter, self._early = starter, EarlyRecords(directory)
        self._processes = Processes(self._process_ended)
        self._odd_versions: set[tuple[str, str]] = set()
        self._timer = TickTimer(self._look, self._restless)
        silencing = Silencing(self._tenants, service=service)
        self._receivers = Receivers(settings, silencing, self._tenants)
        self._notes += tuple(self._receivers.notes)
        self._supervision = Supervision(self._tenants)
        self._actions = actions.load_actions()
        self._deadman = Deadman(settings.heartbeat, self._explain_unhealthy)
        self._http_frontend = HttpFrontend(
            directory, settings.daemon, self._watches, self._reload, self._deadman, make_assistants, settings.otlp
        )
        self._http_frontend.reloads.read(book.notes)
        self._queries = Queries(self._tenants, silencing, self._http_frontend)
        self._shutdown = DaemonShutdown(
            directory,
            self._watches,
            self._ranks,
            stay=self._stay,
            processes=self._processes,
            supervision=self._supervision,
            acknowledgements=self._acknowledgements,
            service=self,
            frontend=self._http_frontend,
        )

    async def serve(self) -> None:
        """Serve until SIGTERM, SIGINT, or the end of the runs. Raises ConfigError if the socket cannot be taken."""
        path = paths.socket_path(self._directory)
        held = locks.live(self._directory)
        if held is None:
            raise ConfigError(f"{path}: a daemon serves here already; stop it first, or use another --directory")
        server = await serve(path, self, self._shares, everybody=self._service)
        signal_handlers.serve(self._shutdown.done.set, self._reload)
        log.info("training-sentinel %s serves at %s", __version__, path)
        if self._starter is not None:
            self._processes.hold(self._starter)
        work = (
            keep_house(self._tenants, self._history),
            MachineReader().serve(self._watches),
            self._deadman.serve(),
            self._http_frontend.telemetry.serve(),
        )
        tasks = [asyncio.create_task(part) for part in work]
        self._timer.start()
        front = asyncio.create_task(self._http_frontend.serve())
        for leftover in await asyncio.to_thread(locks.sweep, paths.runtime_root()):
            log.info("%s: left behind by a daemon that was killed; removed", leftover)
        try:
            await self._shutdown.done.wait()
        finally:
            await self._http_frontend.close(front)
            self._timer.stop()
            for task in (tasks := [*tasks, *self._acknowledgements.tasks, *self._catching_up.values()]):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http_frontend.telemetry.finish(self._watches.values())
            await self._close(server)
            for lock in held:
                os.close(lock)

    async def handle_message(self, peer: Peer, message: wire.FromRank) -> None:
        """Handle a message from a rank or the command line. The steps in it are judged in portions."""
        if self._closing and (self._service or isinstance(message, wire.Hello)):
            raise ConnectionError("this daemon goes")  # ranks send the next daemon again what this one did not store
        self._take(peer, message)
        while peer in self._ranks and self._ranks[peer][0].ingest.behind:
            await asyncio.sleep(0)
            self._ranks[peer][0].ingest.advance(time.monotonic())

    def _take(self, peer: Peer, message: wire.FromRank) -> None:
        now = time.monotonic()
        if isinstance(message, wire.Query):
            self._queries.answer(peer, message, self._watches.values())
        elif isinstance(message, wire.Supervise):
            self._supervision.handle_message(peer, message)
            for watch in filter(self._supervision.serves, self._watches.values()):
                self._supervision.tell(watch, over=self._shutdown.is_over(watch))
                if (message.ending or message.why) and self._supervision.is_of(watch, message.mark):
                    watch.ingest.announce_end(message.ending, message.why, now, left_out=message.left_out)
                if self._supervision.is_of(watch, message.mark):
                    self._supervision.take_report(watch, peer, message.job)
                    watch.ingest.record_job(message.job)
                watch.actions.add_supervisor(now)
            self._shutdown.end_if_done()
        elif isinstance(message, wire.Hello):
            self._hello(peer, message, now)
        elif peer in self._ranks:
            watch, rank = self._ranks[peer]
            if isinstance(message, wire.LayerTable) and not self._has_room_for(message, watch):
                pass
            elif isinstance(message, wire.MeetingFound):
                if watch.search is not None and not rank.hello.ended:
                    watch.search.take(message)
            elif watch.run.attempt.has(rank):
                watch.ingest.message(rank, message, now)
            elif isinstance(message, wire.Goodbye):  # other messages of an attempt that is over are dropped
                rank.goodbye = message
            self._acknowledgements.handle_message(peer, rank, message)
            if rank.goodbye is not None:
                self._shutdown.take_leave(peer, last_words=not isinstance(message, wire.Goodbye))
            self._timer.tick_if_due(now)
        else:
            raise ProtocolError(f"{type(message).__name__} before hello")

    def drop_peer(self, peer: Peer) -> None:
        """Take note that a connection ended."""
        self._supervision.drop_peer(peer)
        if peer not in self._ranks:
            return
        watch, rank = self._ranks.pop(peer)
        self._acknowledgements.drop_peer(peer)
        key = (watch.run.run_id, rank.identity.rank)
        if self._peers.get(key) is peer:
            del self._peers[key]
            if watch.run.attempt.has(rank):
                watch.ingest.drop_rank(rank, time.monotonic())
                watch.ingest.observe_deaths(time.monotonic())
            watch.left = time.monotonic()
            self._catch_up(watch)
            self._shutdown.tell_supervisor(watch)
        self._shutdown.idle_since = time.monotonic()
        self._shutdown.end_if_done()

    def _hello(self, peer: Peer, hello: wire.Hello, now: float) -> None:
        """Admit a rank that says which rank of which run it is. Raises ProtocolError if it is refused."""
        theirs, hello = hello.identity.run_id, self._tenants.admit_rank(hello, peer.uid)
        self._leave_former(peer, hello.identity)
        self._check_room(hello.identity.run_id, peer.uid)
        run = self._runs.find_run(hello.identity, now)
        watch, untold = self._watches.get(run.run_id), list[Transition]()
        began = watch is None
        if watch is None:
            opened = self._histories.open(run, hello.identity, now)
            if opened is None:
                self._runs.forget(run.run_id)
                self._tenants.leave(run.run_id)
                return peer.close()  # the rank connects and says hello again
            watch, untold = self._begin_run(run, opened, hello, now)
        rank = watch.ingest.hello(hello, now, 0 if hello.ended else peer.pid)
        self._follow_stop_on(watch, hello, now)
        self._connect_rank(peer, hello, watch, rank)
        self._welcome(peer, watch)
        if unknown := explain_unknown(watch.incidents.rules, watch.incidents.stop_on):
            watch.context.tell_once(f"attach(stop_on=...): {unknown}")
        if began and run.run_id != theirs:
            watch.context.tell(f"run id {theirs} is another user's too: this run is {run.run_id} here")
        if began:
            joining.join_job(watch, hello, self._cluster, self._supervision)
        joining.ask_for_meeting(watch, hello)
        joining.warn_of_shared_daemon(watch)
        watch.incidents.apply(untold, now)
        watch.ingest.tell_again(rank)
        self._supervision.tell(watch, over=False)
        if began and watch.store:
            for note in undelivered.take(watch.store.path.parent.parent, run.run_id):
                watch.context.tell(note)
        self._log_rank(run, hello, peer)

    def _leave_former(self, peer: Peer, identity: wire.Identity) -> None:
        """Release the connection's former rank when it says hello again. Raises ProtocolError if it names another run.

        A rank learns its number when it joins its process group, and then says hello with that number.
        """
        if (known := self._ranks.get(peer)) is None:
            return
        watch, rank = known
        if watch.run.run_id != identity.run_id:
            raise ProtocolError(f"this connection is run {watch.run.run_id}'s: open one for each run")
        if rank.identity.rank != identity.rank:
            rank.goodbye = wire.Goodbye(reason="detach")  # it has joined its group since, and learned its rank
            self.drop_peer(peer)

    def _follow_stop_on(self, watch: WatchedRun, hello: wire.Hello, now: float) -> None:
        """Take `stop_on` from the first rank of this node's latest hello: the script may have been changed."""
        is_first = hello.identity.rank == min(watch.run.attempt.ranks)
        if hello.stop_on != watch.incidents.stop_on and is_first:
            watch.incidents.stop_on = hello.stop_on
            watch.incidents.replace_rules(self._rules, now)

    def _log_rank(self, run: Run, hello: wire.Hello, peer: Peer) -> None:
        if hello.version != __version__ and (run.run_id, hello.version) not in self._odd_versions:
            self._odd_versions.add((run.run_id, hello.version))
            log.warning("%s runs training-sentinel %s, this is %s", run.name, hello.version, __version__)
        log.info("%s (%s) rank %d, process %d", run.name, run.run_id, hello.identity.rank, peer.pid)

    def _connect_rank(self, peer: Peer, hello: wire.Hello, watch: WatchedRun, rank: Rank) -> None:
        """Make this the connection of the rank. Call it before the end of the rank's old connection is handled."""
        self._peers[watch.run.run_id, hello.identity.rank] = peer
        self._ranks[peer] = (watch, rank)
        self._acknowledgements.hello(peer, hello)
        self._shutdown.served = True
        if not hello.ended:
            self._hold_process(peer)
        if descriptors := peer.descriptors():
            watch.ingest.stalls.add_rank(rank, descriptors)

    def _welcome(self, peer: Peer, watch: WatchedRun) -> None:
        notes = (*self._notes, *((watch.why_no_history,) if watch.why_no_history else ()))
        signals = self._processes.can_interrupt(peer.pid) and os.getuid() in (0, peer.uid)
        peer.send(
            wire.Welcome(
                version=__version__,
                notes=notes,
                keeps=watch.store is not None,
                signals=signals,
                heeds_stop_on=True,
                trackers=self._trackers.names,
            )
        )

    def _check_room(self, run_id: str, uid: int) -> None:
        """Raise ProtocolError if the user already has as many runs on a service as one user may have."""
        if self._service and run_id not in self._watches and self._count_runs(uid) >= RUNS:
            self._tenants.leave(run_id)
            raise ProtocolError(
                f"user {uid} has {RUNS} runs on this service, the most that it watches for one user; end runs that are "
                f"no longer needed, and wait {FORGET_SECONDS:g} s"
            )

    def _has_room_for(self, table: wire.LayerTable, watch: WatchedRun) -> bool:
        """Whether a run's layers are judged; on a service they are not if its user's runs have too many."""
        if not self._service:
            return True
        uid = self._tenants.uid(watch.run.run_id)
        others = (w for w in self._watches.values() if w is not watch and self._tenants.uid(w.run.run_id) == uid)
        if len(table.layers) + sum(len(other.run.attempt.layers) for other in others) <= LAYERS:
            return True
        watch.context.tell_once(
            f"this service judges the layer statistics of at most {LAYERS} layers of a user: those of this run's "
            f"{len(table.layers)} are left out; a daemon of your own has no such limit (sentinel run)"
        )
        return False

    def _count_runs(self, uid: int) -> int:
        return sum(self._tenants.uid(run_id) == uid for run_id in self._watches)

    def _hold_process(self, peer: Peer) -> None:
        process = peer.take_process()
        if process >= 0:
            self._processes.take(peer.pid, process)
        elif peer.pid and has_ended(peer.pid):
            asyncio.get_running_loop().call_soon(self._process_ended, peer.pid, None)

    def _catch_up(self, watch: WatchedRun) -> None:
        """Judge the waiting steps now: there may be no rank left whose next message would trigger it."""
        if watch.ingest.behind and watch not in self._catching_up and not self._shutdown.done.is_set():
            self._catching_up[watch] = asyncio.create_task(self._judge(watch))

    async def _judge(self, watch: WatchedRun) -> None:
        share = self._shares.find_share(self._tenants.uid(watch.run.run_id))
        try:
            while watch.ingest.behind:
                async with turn(share):
                    watch.ingest.advance(time.monotonic())
        except Exception:
            watch.faulty = True
            log.exception("run %s: its steps are not judged", watch.run.name)
        finally:
            del self._catching_up[watch]
        self._shutdown.tell_supervisor(watch)
        self._shutdown.end_if_done()

    def _begin_run(
        self, run: Run, opened: Opened, hello: wire.Hello, now: float
    ) -> tuple[WatchedRun, list[Transition]]:
        """Begin to watch a run that is new to this daemon: a new run, or one that another daemon watched.

        Returns it, and the transitions of its rules that another daemon did not report.
        """
        store = opened.store
        context = RunContext(run, store, PeerLink(run.run_id, self._peers, self._processes), self._supervision)
        watch = self._watches[run.run_id] = WatchedRun(
            context,
            self._receivers.make_notifier(context),
            self._rules,
            self._actions,
            self._supervision,
            hello.stop_on,
        )
        watch.ingest.portion = PORTION_SECONDS
        watch.why_no_history = opened.why_not
        if store is None or not opened.resumable:
            if opened.begins:
                run.attempt = Attempt(opened.begins, now)
                watch.ingest.begin_attempt()
            return watch, []
        try:
            untold = restoration.resume(watch, store.path, hello, now)
        except Exception as error:
            if isinstance(error, DamageError):
                store.replace_damaged(str(error))
            else:
                log.exception("run %s: cannot go on from %s; it starts at step 0", run.name, store.path)
            run.attempt = Attempt(opened.begins, now)
            watch.ingest.begin_attempt()
            watch.incidents.log.add_sent()  # they end with the attempt that begins
            return watch, []
        for rank in watch.run.attempt.ranks.values():
            if rank.state == "lost":
                self._processes.hold(rank.process)
        return watch, untold

    def _reload(self) -> tuple[str, ...]:
        """Read settings and rule files again, and return the mistakes in them. With a mistake, nothing changes."""
        try:
            settings = self._files.read_settings()
        except ConfigError as error:
            self._http_frontend.reloads.read((str(error),))
            log.error("%s; settings and rules stay as they were", error)
            return (str(error),)
        book = self._files.load_rules(settings)
        self._http_frontend.reloads.read(book.notes)
        for note in book.notes:
            log.error("%s; the rules stay as they were", note)
        if not book.notes:
            self._rules = book.rules
            self._resettle(settings)
            for watch in self._watches.values():
                watch.incidents.replace_rules(book.rules, time.monotonic())
            log.info("rules are read again: %d", len(book.rules))
        return book.notes

    def _resettle(self, settings: Settings) -> None:
        """Apply the settings that can change while the daemon runs. HTTP and history are set at the start only."""
        self._trackers = settings.trackers
        self._deadman.replace(settings.heartbeat)
        self._http_frontend.telemetry.replace(settings.otlp)
        self._receivers.replace(settings, self._watches.values())

    def _explain_unhealthy(self) -> str:
        return self._http_frontend.unhealthy() or health.reason(self._watches.values(), time.monotonic())

    async def _forget(self) -> None:
        """Release runs that have ended, if the daemon stays. Their histories keep them."""
        if not self._stay:
            return
        for run_id, watch in list(self._watches.items()):
            idle = time.monotonic() - watch.left
            owes = idle < KEEPING_SECONDS and watch.store is not None and watch.store.owes
            crowded = self._count_runs(self._tenants.uid(run_id)) > RUNS // 2
            gone = not watch.run.attempt.live and (crowded or idle > FORGET_SECONDS) and not owes
            if gone and not watch.ingest.behind and not watch.notifier.outlet.pending:
                del self._watches[run_id]
                self._runs.forget(run_id)
                self._tenants.leave(run_id)
                await self._http_frontend.telemetry.finish([watch])
                await close([watch], TERMINATED_SECONDS)

    def _process_ended(self, pid: int, status: int | None) -> None:
        if pid == self._starter and not self._shutdown.served and not self._early.read():
            log.info("process %d, which started this daemon, is gone, and no rank said hello", pid)
            self._shutdown.done.set()
        for watch in self._watches.values():
            watch.ingest.record_exit(pid, status, time.monotonic())
        for peer in [peer for peer in self._ranks if peer.pid == pid]:
            peer.process_ended()  # its connection ends once everything that it sent is read
        for watch in self._watches.values():
            watch.ingest.observe_deaths(time.monotonic())
            self._shutdown.tell_supervisor(watch)
        self._shutdown.end_if_done()

    def _look(self, now: float) -> None:
        self._tick(now)
        self._acknowledgements.look(now)

    def _restless(self) -> bool:
        alone = not self._ranks and not self._stay
        return alone or any(watch.restless for watch in self._watches.values())

    def _tick(self, now: float) -> None:
        """Tick all runs, the longest waiting first; on a service, those of one user for `LOOK_SECONDS` at most."""
        spent = defaultdict[int, float](float)
        for watch in sorted(self._watches.values(), key=lambda watch: watch.looked):
            uid = self._tenants.uid(watch.run.run_id)
            if self._service and spent[uid] > LOOK_SECONDS:
                continue
            began = watch.looked = time.monotonic()
            try:
                watch.tick(now)
                watch.faulty = False
            except Exception:
                watch.faulty = True
                log.exception("run %s: tick failed", watch.run.name)
            self._catch_up(watch)
            spent[uid] += time.monotonic() - began
        self._http_frontend.count_turn()
        if self._starter is not None:
            self._early.read()
        self._shutdown.tick(now)

    async def _close(self, server: Listener) -> None:
        self._closing = True
        server.close()
        self._shutdown.vanish()
        await close(self._watches.values(), TERMINATED_SECONDS)
        await self._receivers.close()
        self._processes.close()
        log.info("done")
