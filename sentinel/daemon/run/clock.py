"""The time that rules live in: a window of 10 minutes is 10 minutes long, however the node's clock is set meanwhile.

Steps are stamped by the wall clock, which is what people are shown. Where it is set (NTP after a wrong start, a virtual
machine that was suspended), windows, `for`, `keep_firing` and `warmup` in time would wait until it has caught up, or be
over at once. So rules get stamps less what the clock was set by since the attempt began.
"""

from __future__ import annotations

import logging
import math
import time

import msgspec

from sentinel.engine import Observation
from sentinel.rulebook.observation import observation
from sentinel.runs import Attempt
from sentinel.runs.steps import RunStep

log = logging.getLogger(__name__)

SET_SECONDS = 1.0
"""By which the wall clock departs from the monotonic one between two looks: what NTP does smoothly (500 ppm at most) is
no setting, and the rules follow it."""


class Clock:
    """Of one attempt. `look` at least once a second, and before steps are taken."""

    def __init__(self, attempt: Attempt, saved: tuple[float, float] | None = None) -> None:
        """`saved` by another daemon, on the same boot: it may have been set since."""
        self._attempt, self._last = attempt, -math.inf
        self._ahead, attempt.clock_shift = saved or (_ahead(), 0.0)

    def look(self) -> None:
        """See whether it was set."""
        ahead = _ahead()
        by = ahead - self._ahead
        self._ahead = ahead
        if abs(by) > SET_SECONDS:
            self._attempt.clock_shift += by
            log.warning("the node's clock was set by %+.0f s; the rules' time goes on as before", by)

    def of_step(self, step: RunStep) -> Observation:
        """A step as the rules see it. A step stamped before the clock was set, and received after, gets a time at which
        it may have been: after the step before it, and not in the future."""
        if shift := self._attempt.clock_shift:
            at = min(max(step.time - shift, self._last), time.time() - shift)
            step = msgspec.structs.replace(step, time=at)
        self._last = step.time
        return observation(step)

    def make_observation(self, measured: Observation) -> Observation:
        """The same of what was measured just now."""
        self.look()
        shift = self._attempt.clock_shift
        return msgspec.structs.replace(measured, time=measured.time - shift) if shift else measured

    def save_state(self) -> tuple[float, float]:
        """For the next daemon."""
        return self._ahead, self._attempt.clock_shift


def _ahead() -> float:
    return time.time() - time.monotonic()
