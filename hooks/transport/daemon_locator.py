"""Finds the daemon of a run, or starts it, and keeps trying with pauses that grow."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.unseen import is_passing
from sentinel.hooks.transport import connection
from sentinel.hooks.transport.connection import Connection
from sentinel.hooks.transport.daemon_launcher import DaemonLauncher
from sentinel.node import paths

SHORTEST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts. One that we start ourselves is looked for at the shortest pause."""


class DaemonLocator:
    """Used by the sender's thread alone."""

    def __init__(self, address: Path | None, settings: Path | None = None) -> None:
        """`address`: where a daemon serves, if the user said so. `settings`: the file for one that is started."""
        self._address, self._settings = address, settings
        self._launcher: DaemonLauncher | None = None
        self._pause = SHORTEST_PAUSE
        self._next = 0.0
        self._told: set[str] = set()

    def dial(self, identity: wire.Identity, *, last: bool = False) -> Connection | None:
        """A connection, or None: not yet. Raises ConfigError or ProtocolError where there will be none, and why.

        `last`: the run is at its end, and there is no time for pauses.
        """
        now = time.monotonic()
        if now < self._next and not last:
            return None
        self._next = now + self._pause
        if record := os.environ.get("SENTINEL_RECORD"):
            return self._recording(connection.name_file(record, identity), identity)
        path = self._path(identity.run_id)
        try:
            return Connection(path)
        except OSError as error:
            if is_passing(error):
                self._rest(error)
            else:
                self._absent(path, error, last)
            return None

    def record_answer(self) -> None:
        """The daemon answered: the next search begins with short pauses."""
        self._pause = SHORTEST_PAUSE
        if self._launcher is not None:
            self._launcher.record_service()

    def record_loss(self) -> None:
        """The connection broke: wait a little, then look again."""
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._launcher is not None:
            self._launcher.record_loss()

    def open_record(self, identity: wire.Identity) -> connection.Recorder | None:
        """A file for what the daemon has not taken by the end of this rank; None where it is not one of ours."""
        return self._launcher.open_record(identity.rank) if self._launcher is not None else None

    def publish_record(self, record: connection.Recorder) -> None:
        """It is complete: the daemon may read it."""
        if self._launcher is not None:
            self._launcher.publish_record(record)

    def close(self) -> None:
        """Let go of a daemon that we started; it ends by itself."""
        if self._launcher is not None:
            self._launcher.close()

    def abandon(self) -> None:
        """In a forked child: close what is the parent's."""
        if self._launcher is not None:
            self._launcher.abandon()

    def _recording(self, path: Path, identity: wire.Identity) -> Connection:
        made = connection.Recorder(path)
        if identity.rank == 0:
            fault_guard.say(f"recording to {made.path}; nobody watches. Afterwards: sentinel replay {made.path}")
        return made

    def _path(self, run_id: str) -> Path:
        path = self._address or paths.address()
        if path is not None:
            if self._settings is not None:
                fault_guard.say(f"config={self._settings} is not used: the daemon at {path} has settings of its own")
                self._settings = None
            return path
        if self._launcher is None:
            self._launcher = DaemonLauncher(paths.run_directory(run_id), settings=self._settings)
        return self._launcher.socket

    def _absent(self, path: Path, error: OSError, last: bool) -> None:
        if self._launcher is not None:
            try:
                self._launcher.start(at_once=last)
            except OSError as failed:
                if is_passing(failed):
                    self._rest(failed)
                    return
                raise ConfigError(f"the daemon cannot be started: {failed}") from None
            if (failure := self._launcher.failure()) is None:
                return
            if not self._launcher.has_served:
                raise ConfigError(failure)
            self._say_once(f"{failure}; training goes on, and it is started again every minute")
            return
        self._rest()
        self._say_once(f"no daemon serves at {path} ({error.strerror}); training goes on, and it is looked for again")

    def _rest(self, passing: OSError | None = None) -> None:
        """Let the pause to the next attempt grow. `passing`: what the machine has none of just now."""
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._next = time.monotonic() + self._pause
        if passing is not None:
            self._say_once(f"no daemon for now ({passing.strerror}); training goes on, and it is looked for again")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            fault_guard.say(text)
