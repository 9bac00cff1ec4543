"""Rate limits of a receiver: those of its type, those of the settings, and pauses that the receiver asks for.

One limiter per receiver, over all runs of a daemon. Messages that have to wait are not lost: they wait in their entry,
and are sent with the state that is true when their turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Limiter:
    """Allows at most `count` messages in `seconds`, for each of the limits. Times are those of the pipeline's clock."""

    def __init__(self, limits: Sequence[tuple[int, float]] = ()) -> None:
        self._limits = [(count, seconds, deque[float](maxlen=count)) for count, seconds in limits]
        self._resting = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until one more message may be sent; 0: now."""
        until = [self._resting]
        until += [times[0] + seconds for count, seconds, times in self._limits if len(times) == count]
        return max(max(until) - now, 0.0)

    def took(self, now: float) -> None:
        """Count a message that is sent."""
        for _, _, times in self._limits:
            times.append(now)

    def rest(self, until: float) -> None:
        """Send nothing before `until`, as the receiver asked."""
        self._resting = max(self._resting, until)
