"""What Sentinel can do about an incident: one module per action, named in a rule's `actions:`.

Other packages provide actions in the entry point group `sentinel.actions`: the name that rules use, and a callable that
takes a Context and returns an Action. It is called for each attempt of each run.
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
"""Exceptions of a plugin's code that are caught: a `sys.exit` in it must not end the daemon."""


class Action(Protocol):
    """Something done when an incident fires. It never raises or waits, and writes what it did, or why not, into
    `case.done`."""

    name: str

    def act_on(self, case: Case, now: float) -> None:
        """Act on an incident that fired and whose rule names this action. `now`: monotonic seconds."""

    def tick(self, now: float) -> None:
        """Check time-outs; called at least once a second, four times while an alert is open."""


class RollbackCases(Protocol):
    """The incidents for which ranks are rolled back, of one run or of a job over several nodes."""

    def list_asking(self, action: str) -> Iterable[Case]:
        """Return the cases of the present attempt whose rule names this action."""

    def record_change(self, case: Case) -> None:
        """Store and report that more was written into `case.done`."""

    def preserve(self) -> None:
        """Write the run's state into the history now: the next daemon must know of everything that is announced."""


class CaseRecords(RollbackCases, Protocol):
    """The incidents of one run, as its actions know them."""

    def add_stacks(self) -> None:
        """Add a rank's stacks or collectives that have arrived to the cases that asked for them."""

    def add_evidence(self, what: str, seq: int) -> None:
        """Add evidence of kind `what` of step `seq` that has arrived to the cases that want it."""


class Context(NamedTuple):
    """What an action may use."""

    attempt: Attempt
    """The ranks of the present attempt, and their last steps."""
    send: Callable[[int, wire.Message], None]
    """Sends a message to a rank, by its number."""
    changed: Callable[[Case], None]
    """Call it after `act_on` if you write more into `case.done`: that is stored, and receivers are notified."""


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
    """An action of another package, whose exceptions are logged, noted in the case, and have no other effect."""

    def __init__(self, name: str, factory: Factory, context: Context) -> None:
        self.name = name
        self._action: Action | None = None
        try:
            self._action = action = factory(context)
            if not hasattr(action, "act_on"):  # written for an earlier checkout; to go with the first release
                action.act_on = action.fired  # type: ignore[method-assign, attr-defined]
                log.warning("the action %s: its method `fired` is called `act_on` now", name)
        except FAULTS:
            log.exception("the action %s cannot be made", name)

    def act_on(self, case: Case, now: float) -> None:
        before = case.done
        try:
            if self._action is not None:
                self._action.act_on(case, now)
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
