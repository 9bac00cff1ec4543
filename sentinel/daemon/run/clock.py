"""The time that rules use: a window of 10 minutes is 10 minutes long, even if the node's clock is set meanwhile.

Steps are stamped by the wall clock, which is what people are shown. When it is set (NTP after a wrong start, a virtual
machine that was suspended), windows, `for`, `keep_firing` and `warmup` in time would wait until it has caught up, or be
over at once. So rules get the stamps minus what the clock was set by since the attempt began.
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
"""Least seconds of drift between wall and monotonic clock between two looks that count as a setting. The rules follow
what NTP does smoothly (500 ppm at most)."""


class Clock:
    """The rules' clock for one attempt. Call `look` at least once a second, and before steps are taken."""

    def __init__(self, attempt: Attempt, saved: tuple[float, float] | None = None) -> None:
        """`saved`: the state of another daemon's clock, on the same boot; the wall clock may have been set since."""
        self._attempt, self._last = attempt, -math.inf
        self._ahead, attempt.clock_shift = saved or (_ahead(), 0.0)

    def look(self) -> None:
        """Check whether the wall clock was set."""
        ahead = _ahead()
        by = ahead - self._ahead
        self._ahead = ahead
        if abs(by) > SET_SECONDS:
            self._attempt.clock_shift += by
            log.warning("the node's clock was set by %+.0f s; the rules' time goes on as before", by)

    def of_step(self, step: RunStep) -> Observation:
        """Return a step as the rules see it.

        A step stamped before the clock was set, and received after, gets a possible time: after the step before it, and
        not in the future.
        """
        if shift := self._attempt.clock_shift:
            at = min(max(step.time - shift, self._last), time.time() - shift)
            step = msgspec.structs.replace(step, time=at)
        self._last = step.time
        return observation(step)

    def make_observation(self, measured: Observation) -> Observation:
        """Return a measurement made just now as the rules see it."""
        self.look()
        shift = self._attempt.clock_shift
        return msgspec.structs.replace(measured, time=measured.time - shift) if shift else measured

    def save_state(self) -> tuple[float, float]:
        """Return the clock's state for the next daemon."""
        return self._ahead, self._attempt.clock_shift


def _ahead() -> float:
    return time.time() - time.monotonic()
