"""How fast a receiver may be told: limits of its own and of the settings, and "later" from itself.

One a receiver, over all runs of a daemon. What has to wait is not lost: it waits in its entry, as the state that is
true when its turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Limiter:
    """At most `count` in each `seconds`, for each of the limits. Times are those of the pipeline's clock."""

    def __init__(self, limits: Sequence[tuple[int, float]] = ()) -> None:
        self._limits = [(count, seconds, deque[float](maxlen=count)) for count, seconds in limits]
        self._resting = 0.0

    def wait(self, now: float) -> float:
        """Seconds until one more may be sent; 0: now."""
        until = [self._resting]
        until += [times[0] + seconds for count, seconds, times in self._limits if len(times) == count]
        return max(max(until) - now, 0.0)

    def took(self, now: float) -> None:
        """One is sent."""
        for _, _, times in self._limits:
            times.append(now)

    def rest(self, until: float) -> None:
        """It asked to be left alone until then."""
        self._resting = max(self._resting, until)
