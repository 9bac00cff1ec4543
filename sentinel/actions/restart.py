"""Has the job ended, and started again, where it cannot be saved from inside: by its supervisor, `sentinel run`.

First the evidence: stacks and collectives that are on their way are waited for. What goes on by itself meanwhile is
let go on. Without a supervisor nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable

from sentinel.diagnose.case import Case

EVIDENCE_SECONDS = 5.0
"""That the ranks get to answer. What is not there by then will not come."""
LEAST_SECONDS = 1.0
"""Answers to what the alert itself asked for."""


class RestartAction:
    """The action `restart` of one attempt."""

    name = "restart"

    def __init__(
        self, incomplete: Callable[[], bool], end: Callable[[Case], bool], changed: Callable[[Case], None]
    ) -> None:
        """`incomplete`: whether evidence is on its way; `end` has the supervisor end the job, and answers whether there
        is one that will; `changed`: told of a case in which that was noted."""
        self._incomplete, self._end, self._changed = incomplete, end, changed
        self._case: Case | None = None
        self._since = 0.0

    @property
    def waiting(self) -> bool:
        """Whether the evidence is waited for."""
        return self._case is not None

    def fired(self, case: Case, now: float) -> None:
        """End the job for this case, unless that is on its way for another."""
        if self._case is None:
            self._case, self._since = case, now

    def tick(self, now: float) -> None:
        """Look whether it is time."""
        case, waited = self._case, now - self._since
        if case is None or waited < LEAST_SECONDS or (self._incomplete() and waited < EVIDENCE_SECONDS):
            return
        self._case = None
        if case.state == "firing" and self._end(case):
            case.done += ("the job is ended by its supervisor",)
            self._changed(case)
