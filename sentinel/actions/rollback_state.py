"""The state of a rollback or a stop: while under way, its outcome, and what another daemon needs to continue."""

from __future__ import annotations

from typing import Literal

import msgspec

from sentinel import wire
from sentinel.diagnose.case import Case

Phase = Literal["idle", "preparing", "restoring"]


class Outcome(msgspec.Struct, frozen=True):
    """How a rollback or a stop ended."""

    ok: bool
    alert: str
    to: int = -1
    at: int = -1
    seconds: float = 0.0
    reason: str = ""
    """Why it failed; if it is ok, what could not be done in addition to the restore."""
    sign: int = -1
    """Seq of the first sign of the fault."""
    stops: bool = False
    """Whether it was a stop."""


class SavedRollbacks(msgspec.Struct):
    """What a daemon that takes over must know of the rollbacks of an attempt."""

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
    """A rollback or a stop under way."""

    case: Case
    to: int
    at: int
    id: int
    began: float
    ranks: frozenset[int]
    stops: bool = False
    """Whether it is a stop: all ranks leave, and no snapshot is restored."""
    phase: Phase = "preparing"
    lead: int = 1
    tries: int = 1
    fruitless: int = 0
    """Number of tries that not all promised in time, or that were committed and no rank restored."""
    promised: set[int] = msgspec.field(default_factory=set)
    lost: list[int] = msgspec.field(default_factory=list)
    """Ranks whose connection ended, in the order of these ends."""
    restored: dict[int, wire.RolledBack] = msgspec.field(default_factory=dict)
