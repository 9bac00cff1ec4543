"""The way from the daemon to the ranks of one run, as its parts know it: messages and signals."""

from __future__ import annotations

from typing import Protocol

from sentinel import wire


class RankLink(Protocol):
    """Reaches the ranks of one run."""

    def send(self, rank: int, message: wire.Message) -> None:
        """Queue a message for a rank, by its number. A rank that is not connected does not get it."""

    def interrupt(self, process: int, signal: int) -> bool:
        """Signal the process of a rank; False where that cannot be done."""


class NoRanks:
    """The ranks of a recording, which nothing reaches."""

    def send(self, rank: int, message: wire.Message) -> None:
        """Do nothing."""

    def interrupt(self, process: int, signal: int) -> bool:
        """No process is there."""
        return False
