"""Has the supervisor, `sentinel run`, end the job and start it again, if it cannot be saved from inside.

It waits for stacks and collectives that are on their way, as evidence. A run that goes on by itself meanwhile is left
alone. Without a supervisor nothing happens. Nor does it for a single rank that stands in something that may end by
itself (`may_end`): killing a slow upload would lose what it saves.
"""

from __future__ import annotations

from typing import Protocol

from sentinel.actions import CaseRecords
from sentinel.actions.stacks import StacksAction
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt
from sentinel.wire.heartbeat_page import Place

EVIDENCE_SECONDS = 5.0
"""Seconds for the ranks to answer. What has not arrived by then will not come."""
SPARED = "the job is not ended: its only rank is in input or output, a sleep or a future, and may go on by itself"
LEAST_SECONDS = 1.0
"""Least seconds to wait, for answers to questions that the alert itself caused."""


def is_stall(case: Case) -> bool:
    """Whether a case is about ranks that stand still."""
    return any("stalled_seconds" in member.values for member in case.members)


def may_end(attempt: Attempt, case: Case) -> bool:
    """Whether this is the stall of a single rank that may end by itself: it is in input or output, in a sleep, or waits
    for another thread, a future or a process."""
    if not is_stall(case):
        return False
    beats = [rank.heartbeat for rank in attempt.live if rank.identity.world_size == 1]
    return any(beat is not None and beat.place in (Place.LONG, Place.AWAITS) for beat in beats)


class JobSupervisor(Protocol):
    """Ends the job of one run, and starts it again."""

    def end_job(self, case: Case) -> bool:
        """Have the job ended because of this case; False if no supervisor would do it."""


class RestartAction:
    """The action `restart` of one attempt."""

    name = "restart"

    def __init__(
        self, attempt: Attempt, incidents: CaseRecords, stacks: StacksAction, supervisor: JobSupervisor
    ) -> None:
        self._attempt, self._incidents, self._stacks, self._supervisor = attempt, incidents, stacks, supervisor
        self._waiting: list[tuple[Case, float]] = []
        """Cases for which the job may have to be ended, and since when each waits."""

    @property
    def waiting(self) -> bool:
        """Whether it waits for evidence."""
        return bool(self._waiting)

    def act_on(self, case: Case, now: float) -> None:
        """End the job for this case, if it still fires when the evidence is there."""
        if not any(one is case for one, _ in self._waiting):
            self._waiting.append((case, now))

    def tick(self, now: float) -> None:
        """End the job if it is time."""
        waiting, self._waiting = self._waiting, []
        for case, since in waiting:
            waited = now - since
            if case.state != "firing":
                continue
            if waited < LEAST_SECONDS or (self._stacks.waiting and waited < EVIDENCE_SECONDS):
                self._waiting.append((case, since))
            elif may_end(self._attempt, case):
                case.done += (SPARED,)
                self._incidents.record_change(case)
            elif self._supervisor.end_job(case):
                case.done += ("the job is ended by its supervisor",)
                self._incidents.record_change(case)
                self._waiting.clear()
                return
