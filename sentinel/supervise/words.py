"""The connections to the job's daemons, which are asked once per connection and then report whenever they have news.

A run's daemon is started by the job and ends with it, so this side looks for daemons again and again, twice a second.
Each `attach` of a process is a run, usually with a daemon of its own. Daemons of other jobs do not answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from sentinel import wire
from sentinel.errors import ConfigError, ProtocolError
from sentinel.node import paths

_CREDENTIALS = struct.Struct("3i")
_CHUNK = 65536
SHORT_SECONDS = 0.05
"""Seconds between two looks for a daemon that is starting."""


class Words:
    """The connections to the job's daemons, and their last messages."""

    def __init__(self, mark: str, run_id: str | None, *, always: bool, print_notice: Callable[[str], None]) -> None:
        """`mark`: the job's mark, which its ranks send in their hello. `run_id`: None where others choose it. `always`:
        the job may be ended even if it does not announce that it can go on from a snapshot. `print_notice` prints what
        no rank of the job can print any more."""
        self._print_notice = print_notice
        self._said = wire.Supervise(mark=mark, always=always)
        self._run_id = run_id
        self._connections: dict[Path, tuple[socket.socket, wire.Frames]] = {}
        self.standings: dict[str, wire.Standing] = {}
        """The last report on each run of this start, by run id, in the order in which they were first heard of: a job
        may have several runs."""
        self._newest = ""
        """The run that reported last."""
        self._former = set[str]()
        """Runs that were over before another one went on: they are no reason for the end of the job."""
        self.order: wire.Order | None = None
        """The last order about this start from the coordinator of a job over several nodes."""
        self.attached = False
        """Whether the job came so far that it looked for a daemon, whether it found one or not."""
        self._attempt = 0

    @property
    def standing(self) -> wire.Standing | None:
        """The report on this start of the job: that of the run that broke, if one did, else the newest one. It is over
        once all runs are."""
        if not self.standings:
            return None
        present = [one for one in self.standings.values() if one.run_id not in self._former]
        return msgspec.structs.replace(max(present, key=self._rank_trouble), over=all(one.over for one in present))

    def forget(self, attempt: int) -> None:
        """Discard all reports on former attempts: the job is started again, as this attempt. The connections stay,
        and with them the daemons."""
        self.order, self._attempt = None, attempt
        self.standings.clear()
        self._former.clear()

    def report(self, job: wire.JobReport) -> None:
        """Send the job's state on this node to each daemon that is connected now or later."""
        self._said = msgspec.structs.replace(self._said, job=job)
        self._say(self._said)

    def read(self) -> wire.Standing | None:
        """Return the report on the job, as far as it was received by now."""
        for path in self._paths():
            if path not in self._connections:
                self._connect(path)
        for path in list(self._connections):
            self._take(path)
        self.attached = self.attached or bool(self.standings) or self._has_place()
        return self.standing

    def announce_end(self, number: int, why: str = "", *, left_out: bool = False) -> None:
        """Tell the daemon that the job will get this signal and end by it, so that its ranks are not lost. 0: its
        command has ended; the processes that it left are ended, and their ranks lost. `why`: the supervisor's own
        reason; empty: the signal came from outside. `left_out`: the reason is that the job goes on without this
        node."""
        self.read()
        self._say(msgspec.structs.replace(self._said, ending=number, why=why, left_out=left_out))

    def last(self, seconds: float) -> wire.Standing | None:
        """Return the final report on a job that has ended, or the newest one after `seconds`."""
        until = time.monotonic() + seconds
        self.read()
        while not (self.standing is not None and self.standing.over) and self._is_daemon_expected():
            rest = until - time.monotonic()
            if rest <= 0:
                break
            known = [connection for connection, _ in self._connections.values()]
            select.select(known, [], [], min(rest, SHORT_SECONDS))
            self.read()
        return self.standing

    def _say(self, message: wire.Supervise) -> None:
        for connection, _ in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(wire.frame(message))

    def _is_daemon_expected(self) -> bool:
        """Whether a report may still come: from a daemon that has sent one, or that is starting."""
        return bool(self._connections) if self.standing is not None else self._has_place()

    def _has_place(self) -> bool:
        """Whether the run has a directory for its daemon: `attach` creates it."""
        # Not `Path.exists`, which raises where another user has made the directory first, and closed it.
        return self._run_id is not None and os.path.exists(paths.run_directory(self._run_id))

    def close(self) -> None:
        """Close all connections."""
        for path in list(self._connections):
            self._hang_up(path)

    def _paths(self) -> Iterable[Path]:
        try:
            return list(paths.live_sockets())
        except ConfigError:  # `attach` reports it
            return []

    def _connect(self, path: Path) -> None:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left, here or on the node: no reason to end the job
            return
        try:
            connection.setblocking(False)
            connection.connect(os.fspath(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] not in (0, os.getuid()):
                raise ConnectionRefusedError(f"{path} is a stranger's")
            connection.sendall(wire.frame(self._said))
        except OSError:
            connection.close()
            return
        self._connections[path] = connection, wire.Frames()

    def _take(self, path: Path) -> None:
        connection, frames = self._connections[path]
        try:
            while chunk := connection.recv(_CHUNK):
                for body in frames.feed(chunk):
                    message = wire.to_rank(body) if wire.is_known(body) else None
                    if isinstance(message, wire.Standing) and message.attempt >= self._attempt:
                        self._keep(message)
                    elif isinstance(message, wire.Order) and message.start == self._said.job.start:
                        self.order = message
                    elif isinstance(message, wire.Notice) and message.text:
                        self._print_notice(message.text)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            pass
        self._hang_up(path)

    def _keep(self, standing: wire.Standing) -> None:
        self.standings[standing.run_id], self._newest = standing, standing.run_id
        if not standing.over:
            self._former = {run_id for run_id, one in self.standings.items() if one.over}

    def _rank_trouble(self, standing: wire.Standing) -> tuple[bool, ...]:
        """Return how much a run is the reason for the end of its job."""
        broke = bool(standing.alert or standing.raised)
        return standing.ends, bool(standing.stopped), broke, standing.run_id == self._newest

    def _hang_up(self, path: Path) -> None:
        self._connections.pop(path)[0].close()
