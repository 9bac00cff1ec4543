"""Decide whether a job that ended is started again, when, and from how far back. Pure: no clock, no process.

    the same fault at the same step     stop: a third start would meet it too
    no restart left                     stop: elsewhere, or later, the job may go on
    else                                start again, after a pause that doubles

What was saved since the first sign of a fault that harms the weights is not used again: neither by the next start nor
by later ones, until the run has passed the step at which it was ended, and has saved again.
"""

from __future__ import annotations

import msgspec

from sentinel.errors import EXIT_STOPPED, EXIT_UNFINISHED
from sentinel.wire import JobFault

RESTARTS = 3
"""Restarts by default: as many as the rollback budget."""
PAUSE_SECONDS = 5.0
"""Pause before the first restart: by then ports, GPUs and file locks of dead processes are free again."""
LONGEST_PAUSE = 300.0
LEAST_NEAR = 2
"""Steps by which two reports of the same fault may differ."""
NEAR_SECONDS = 2.0
"""Seconds by which they may differ: the last second of a killed process was never sent."""


class Again(msgspec.Struct, frozen=True):
    """The decision to start the job again."""

    number: int
    """Number of this restart, from 1."""
    pause: float
    """Seconds before the start."""
    before: int | None
    """Only what was saved before this step is good; None: all of it is."""


class Over(msgspec.Struct, frozen=True):
    """The decision not to start the job again."""

    status: int
    """Exit status."""
    why: str


class Policy:
    """Decides at each end of a job."""

    def __init__(self, restarts: int, pause: float = PAUSE_SECONDS) -> None:
        """`restarts`: the most restarts. `pause`: seconds before the first of them."""
        self.restarts, self._pause = restarts, pause
        self._faults: list[JobFault] = []
        self._before: int | None = None
        self._harmed_to = -1

    @property
    def made(self) -> int:
        """Number of restarts so far."""
        return len(self._faults)

    def decide(self, fault: JobFault) -> Again | Over:
        """Return what follows a fault."""
        if any(is_same_fault(fault, earlier) for earlier in self._faults):
            return Over(
                EXIT_STOPPED, f"{fault.kind} came back at step {_find_place(fault)}: another start would meet it again"
            )
        if self.made >= self.restarts:
            spent = f"all {self.restarts} restarts are used" if self.restarts else "no restart is allowed"
            return Over(EXIT_UNFINISHED, spent)
        self._mark(fault)
        self._faults.append(fault)
        return Again(self.made, min(self._pause * 2 ** (self.made - 1), LONGEST_PAUSE), self._before)

    def _mark(self, fault: JobFault) -> None:
        reached = fault.step if fault.step is not None else -1
        if reached > self._harmed_to:
            self._before = None
        if fault.sign is not None:
            self._before = fault.sign if self._before is None else min(fault.sign, self._before)
            self._harmed_to = max(reached, self._harmed_to)


def is_same_fault(one: JobFault, other: JobFault) -> bool:
    """Whether two starts ended by the same fault at the same place."""
    if one.kind != other.kind or one.step is None or other.step is None:
        return False
    near = max(LEAST_NEAR, int(NEAR_SECONDS / max(one.step_seconds, 1e-4)))
    return abs(_find_place(one) - _find_place(other)) <= near


def _find_place(fault: JobFault) -> int:
    return fault.sign if fault.sign is not None else fault.step or 0
