"""What is known of a rollback, or a stop: while it is under way, how it ended, and what another daemon goes on from."""

from __future__ import annotations

from typing import Literal

import msgspec

from sentinel import wire
from sentinel.diagnose.case import Case

Phase = Literal["idle", "preparing", "restoring"]


class Outcome(msgspec.Struct, frozen=True):
    """How a rollback ended, or a stop."""

    ok: bool
    alert: str
    to: int = -1
    at: int = -1
    seconds: float = 0.0
    reason: str = ""
    """Why it failed; if it is ok, what could not be done beside the restore."""
    sign: int = -1
    """The step that showed the fault first."""
    stops: bool = False
    """It was to end the run."""


class Saved(msgspec.Struct):
    """What a daemon that takes over has to know of the rollbacks of an attempt."""

    done: tuple[Outcome, ...] = ()
    bad: tuple[int, ...] = ()
    case: str = ""
    """Id of the case for which a restore, or a stop, was committed and is not over; empty: none."""
    to: int = -1
    at: int = -1
    id: int = 0
    ranks: tuple[int, ...] = ()
    stops: bool = False


class RollbackInProgress(msgspec.Struct):
    """One rollback under way, or a stop."""

    case: Case
    to: int
    at: int
    id: int
    began: float
    ranks: frozenset[int]
    stops: bool = False
    """All ranks are to leave, and there is no snapshot to go back to."""
    phase: Phase = "preparing"
    lead: int = 1
    tries: int = 1
    fruitless: int = 0
    """How often not all promised in time, or it was committed and no rank restored."""
    promised: set[int] = msgspec.field(default_factory=set)
    lost: list[int] = msgspec.field(default_factory=list)
    """Ranks whose connection ended, in that order."""
    restored: dict[int, wire.RolledBack] = msgspec.field(default_factory=dict)
