"""What Sentinel can do about an incident: one file an action, named in a rule's `actions:`.

Other packages bring theirs under the entry point group `sentinel.actions`: the name that rules use, and a callable that
gets a Context and returns an Action. One is made for each attempt of each run.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt

log = logging.getLogger(__name__)

ENTRY_POINTS = "sentinel.actions"
FAULTS = (Exception, SystemExit)
"""Faults of a plugin's code: a `sys.exit` in it must not end the daemon."""


class Action(Protocol):
    """Something done when an incident fires. Never raises or waits; what it did, or why not, it writes into
    `case.done`."""

    name: str

    def fired(self, case: Case, now: float) -> None:
        """An incident whose rule names this action fired. `now`: monotonic seconds."""

    def tick(self, now: float) -> None:
        """Called at least once a second, four times while an alert is open: time-outs."""


class RollbackCases(Protocol):
    """The incidents for which ranks are rolled back, of one run or of a job over several nodes."""

    def list_asking(self, action: str) -> Iterable[Case]:
        """The cases of the present attempt whose rule names this action."""

    def record_action(self, case: Case) -> None:
        """More was written into `case.done`: keep it, and tell people."""

    def preserve(self) -> None:
        """Put the run's state into the history now: the next daemon must know of whatever is announced next."""


class CaseRecords(RollbackCases, Protocol):
    """The incidents of one run, as its actions know them."""

    def add_stacks(self) -> None:
        """A rank's stacks or collectives came: put them into the cases that asked for them."""

    def add_evidence(self, what: str, seq: int) -> None:
        """Evidence of this kind, of step `seq`, came: put it into the cases that want it."""


class Context(NamedTuple):
    """What an action may use."""

    attempt: Attempt
    """The ranks of the present attempt, and their last steps."""
    send: Callable[[int, wire.Message], None]
    """To a rank, by its number."""
    changed: Callable[[Case], None]
    """Call it after `fired` if more was written into `case.done`: that is recorded, and receivers are notified."""


Factory = Callable[[Context], Action]


def load_actions() -> dict[str, Factory]:
    """Load the actions of other packages, by name. An action that cannot be loaded is logged and left out."""
    found: dict[str, Factory] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found[point.name] = point.load()
        except Exception:
            log.exception("the action %s (%s) cannot be loaded", point.name, point.value)
    return found


class Shielded:
    """An action of another package: what it raises is logged, written into the case, and stops nothing."""

    def __init__(self, name: str, factory: Factory, context: Context) -> None:
        self.name = name
        self._action: Action | None = None
        try:
            self._action = factory(context)
        except FAULTS:
            log.exception("the action %s cannot be made", name)

    def fired(self, case: Case, now: float) -> None:
        before = case.done
        try:
            if self._action is not None:
                self._action.fired(case, now)
                case.done = tuple(map(str, case.done))  # otherwise the alert could be neither stored nor sent
                return
        except FAULTS:
            log.exception("the action %s failed", self.name)
        case.done = (*before, f"{self.name} failed; see the daemon's log")

    def tick(self, now: float) -> None:
        try:
            if self._action is not None:
                self._action.tick(now)
        except FAULTS:
            log.exception("the action %s failed, and is not called again", self.name)
            self._action = None
