"""Who is told: one file a receiver."""

from __future__ import annotations

from typing import Literal, Protocol

from sentinel.diagnose.case import Case

Event = Literal["fired", "resolved", "rolled back"]


class Receiver(Protocol):
    """Somebody who is told of incidents. Never raises, never waits."""

    name: str

    def notify(self, event: Event, case: Case) -> None:
        """An incident fired, is over, or was undone by a rollback."""
