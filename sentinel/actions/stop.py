"""Has all ranks leave the run at the exit of one step, with an exit status of its own: no restart makes up for it.

The ranks agree as they do on a rollback, and `RollbackAction` leads them. What is under way comes first: where a
rollback ended the alert, there is nothing to stop.
"""

from __future__ import annotations

from sentinel.actions import CaseRecords
from sentinel.actions.rollback import RollbackAction
from sentinel.diagnose.case import Case

OVER_NODES = "not stopped: the run has ranks on several nodes, and those of one node cannot leave alone"


class StopAction:
    """The action `stop` of one attempt."""

    name = "stop"

    def __init__(self, leader: RollbackAction | None, incidents: CaseRecords) -> None:
        """`leader` is None where the run has ranks on several nodes."""
        self._leader, self._incidents = leader, incidents
        self._waiting: list[Case] = []

    @property
    def reason(self) -> str:
        """Why all ranks left the run; empty: they did not."""
        return self._leader.stopped if self._leader is not None else ""

    @property
    def waiting(self) -> bool:
        """Whether a stop waits for what is under way."""
        return bool(self._waiting)

    def fired(self, case: Case, now: float) -> None:
        """Stop the run, once nothing else is under way."""
        if self._leader is None:
            case.done += (OVER_NODES,)
            return
        self._waiting.append(case)
        self._begin(self._leader, now)

    def tick(self, now: float) -> None:
        """Look whether it is time."""
        if self._leader is None or not self._waiting:
            return
        for case in self._begin(self._leader, now):
            self._incidents.record_action(case)

    def _begin(self, leader: RollbackAction, now: float) -> list[Case]:
        """Stop for the first that still fires, and so on where that fails at once. Returns those it was tried for."""
        tried: list[Case] = []
        while self._waiting and leader.phase == "idle":
            case = self._waiting.pop(0)
            if case.state == "firing":
                leader.stop(case, now)
                tried.append(case)
        return tried
