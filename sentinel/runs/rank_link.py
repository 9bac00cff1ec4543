"""The connection from the daemon to the ranks of one run, as its parts see it: messages and signals."""

from __future__ import annotations

from typing import Protocol

from sentinel import wire


class RankLink(Protocol):
    """Sends messages and signals to the ranks of one run."""

    def send(self, rank: int, message: wire.Message) -> None:
        """Queue a message for a rank, by its number. A rank that is not connected does not get it."""

    def interrupt(self, process: int, signal: int) -> bool:
        """Send a signal to the process of a rank; return False where that is not possible."""


class NoRanks:
    """The link to the ranks of a recording, which cannot be reached."""

    def send(self, rank: int, message: wire.Message) -> None:
        """Do nothing."""

    def interrupt(self, process: int, signal: int) -> bool:
        """Return False: there is no process."""
        return False
