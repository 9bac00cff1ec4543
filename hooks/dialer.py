"""Finds the daemon of a run, or starts it, and keeps trying with pauses that grow."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sentinel import places, wire
from sentinel.errors import ConfigError
from sentinel.hooks import faults, recording
from sentinel.hooks.autostart import Autostart
from sentinel.hooks.connection import Connection

SHORTEST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts. One that we start ourselves is looked for at the shortest pause."""


class Dialer:
    """Used by the sender's thread alone."""

    def __init__(self, address: Path | None, settings: Path | None = None) -> None:
        """`address`: where a daemon serves, if the user said so. `settings`: the file for one that is started."""
        self._address, self._settings = address, settings
        self._autostart: Autostart | None = None
        self._pause = SHORTEST_PAUSE
        self._next = 0.0
        self._told = False

    def dial(self, identity: wire.Identity, *, last: bool = False) -> Connection | None:
        """A connection, or None: not yet. Raises ConfigError or ProtocolError where there will be none, and why.

        `last`: the run is at its end, and there is no time for pauses.
        """
        now = time.monotonic()
        if now < self._next and not last:
            return None
        self._next = now + self._pause
        if record := os.environ.get("SENTINEL_RECORD"):
            return self._recording(recording.named(record, identity), identity)
        path = self._path(identity.run_id)
        try:
            return Connection(path)
        except OSError as error:
            self._absent(path, error, last)
            return None

    def answered(self) -> None:
        """The daemon answered: the next search begins with short pauses."""
        self._pause = SHORTEST_PAUSE
        if self._autostart is not None:
            self._autostart.served()

    def lost(self) -> None:
        """The connection broke: wait a little, then look again."""
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._autostart is not None:
            self._autostart.lost()

    def close(self) -> None:
        """Let go of a daemon that we started; it ends by itself."""
        if self._autostart is not None:
            self._autostart.close()

    def abandon(self) -> None:
        """In a forked child: close what is the parent's."""
        if self._autostart is not None:
            self._autostart.abandon()

    def _recording(self, path: Path, identity: wire.Identity) -> Connection:
        made = recording.Recording(path)
        if identity.rank == 0:
            faults.say(f"recording to {made.path}; nobody watches. Afterwards: sentinel replay {made.path}")
        return made

    def _path(self, run_id: str) -> Path:
        path = self._address or places.address()
        if path is not None:
            if self._settings is not None:
                faults.say(f"config={self._settings} is not used: the daemon at {path} has settings of its own")
                self._settings = None
            return path
        if self._autostart is None:
            self._autostart = Autostart(places.run_directory(run_id), settings=self._settings)
        return self._autostart.socket

    def _absent(self, path: Path, error: OSError, last: bool) -> None:
        if self._autostart is not None:
            try:
                self._autostart.start(at_once=last)
            except OSError as failed:
                raise ConfigError(f"the daemon cannot be started: {failed}") from None
            if (failure := self._autostart.failure()) is not None:
                raise ConfigError(failure)
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._next = time.monotonic() + self._pause
        if not self._told:
            self._told = True
            faults.say(f"no daemon serves at {path} ({error.strerror}); training goes on, and it is looked for again")
