"""Has all ranks leave the run at the exit of one step, with an exit status of its own: no restart would help.

The ranks agree as they do on a rollback, led by the same code. A rollback under way comes first: if it ended the alert,
nothing needs to be stopped. In a job over several nodes, a node asks the coordinator, which has a stop action, too.
"""

from __future__ import annotations

from typing import Protocol

from sentinel.actions import RollbackCases
from sentinel.actions.rollback_state import Phase
from sentinel.diagnose.case import Case


class StopLeader(Protocol):
    """Leads the ranks through a stop: those of one node (`RollbackAction`), or of all nodes through the coordinator
    (`RelayedRollback`)."""

    @property
    def agreed_stop_reason(self) -> str:
        """Why all ranks left the run; empty: they did not."""

    @property
    def phase(self) -> Phase:
        """The phase of the rollback, or the stop, under way."""

    def begin_agreed_stop(self, case: Case, now: float) -> None:
        """Have all ranks leave the run for this case. Nothing is under way."""


class StopAction:
    """The action `stop` of one attempt."""

    name = "stop"

    def __init__(self, leader: StopLeader, incidents: RollbackCases) -> None:
        self._leader, self._incidents = leader, incidents
        self._waiting: list[Case] = []

    @property
    def reason(self) -> str:
        """Why all ranks left the run; empty: they did not."""
        return self._leader.agreed_stop_reason

    @property
    def waiting(self) -> bool:
        """Whether a stop waits for a rollback or a stop under way."""
        return bool(self._waiting)

    def awaits_turn(self, case: Case) -> bool:
        """Whether a stop for this case waits."""
        return any(one is case for one in self._waiting)

    def act_on(self, case: Case, now: float) -> None:
        """Stop the run, once nothing else is under way."""
        self._waiting.append(case)
        self._begin(now)

    def tick(self, now: float) -> None:
        """Begin a stop that waits, if it is time."""
        for case in self._begin(now):
            self._incidents.record_change(case)

    def _begin(self, now: float) -> list[Case]:
        """Stop for the first case that still fires, and for the next if that fails at once. Returns the cases tried."""
        tried: list[Case] = []
        while self._waiting and self._leader.phase == "idle":
            case = self._waiting.pop(0)
            if case.state == "firing":
                self._leader.begin_agreed_stop(case, now)
                tried.append(case)
        return tried
