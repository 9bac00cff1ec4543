"""What Sentinel can do about an incident: one file an action, named in a rule's `actions:`."""

from __future__ import annotations

from typing import Protocol

from sentinel.diagnose.case import Case


class Action(Protocol):
    """Something done when an incident fires. Never raises; what it did, or why not, it writes into `case.done`."""

    name: str

    def fired(self, case: Case, now: float) -> None:
        """An incident whose rule names this action fired. `now`: monotonic seconds."""

    def tick(self, now: float) -> None:
        """Called several times a second: time-outs."""
