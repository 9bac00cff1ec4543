"""When a daemon looks at everything: once a second while all is well, and more often while something is open.

While batches arrive, it looks right after one of them: the daemon is awake then, and its code is in the processor's
caches, which belong to training otherwise. A timer triggers the look if no batch arrives in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

OPEN_SECONDS = 0.25
"""Seconds between two looks while something is open: an alert, a rollback, a run whose ranks are gone."""
CALM_SECONDS = 0.9
"""Seconds between two looks while all is well: a little less than between batches, to look after each of them."""
GRACE_SECONDS = 0.5
"""Seconds by which the timer is late while all is well, so that a batch can come first."""
OVERSLEPT_SECONDS = 5.0
"""Seconds without a look after which this process or its machine must have been stopped. What arrived meanwhile is read
before a rank counts as not having answered in time."""
READ_SECONDS = 0.2
"""Seconds for reading it."""


class TickTimer:
    """Calls `look` at the times given above, in the running event loop."""

    def __init__(self, look: Callable[[float], None], restless: Callable[[], bool]) -> None:
        """`look` is called with monotonic seconds; `restless`: whether something is open."""
        self._look, self._restless = look, restless
        self._looked = 0.0
        self._reading = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now, and from now on, in the running loop."""
        self._turn(time.monotonic())

    def tick_if_due(self, now: float) -> None:
        """Look if it is time. Called when a message has arrived."""
        if self._timer is not None and not self._reading and now - self._looked >= self._pause:
            self._turn(now)

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _pause(self) -> float:
        return OPEN_SECONDS if self._restless() else CALM_SECONDS

    def _turn(self, now: float) -> None:
        self.stop()
        overslept = self._looked > 0.0 and now - self._looked > OVERSLEPT_SECONDS
        self._reading = overslept and not self._reading
        if self._reading:
            self._timer = asyncio.get_running_loop().call_later(READ_SECONDS, self._rung)
            return
        self._looked = now
        try:
            self._look(now)
        except Exception:
            log.exception("a look failed")
        pause = self._pause
        late = GRACE_SECONDS if pause == CALM_SECONDS else 0.0
        self._timer = asyncio.get_running_loop().call_later(pause + late, self._rung)

    def _rung(self) -> None:
        self._turn(time.monotonic())
