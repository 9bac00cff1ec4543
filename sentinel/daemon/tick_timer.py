"""When a daemon looks at everything: once a second while all is well, and more often while something is open.

Where batches come, beside one of them: the daemon is awake then, and its code is in the processor's caches, which are
training's otherwise. A timer of its own has it look where none came in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

OPEN_SECONDS = 0.25
"""Between two looks while something is open: an alert, a rollback, a run whose ranks are gone."""
CALM_SECONDS = 0.9
"""The same while all is well: batches are judged as they come. A little less than they are apart, to be beside each."""
GRACE_SECONDS = 0.5
"""By which the timer is late while all is well, so that a batch can be earlier."""
OVERSLEPT_SECONDS = 5.0
"""After so long without a look, this process or its machine was stopped. What came meanwhile is read before a rank is
said not to have answered in time."""
READ_SECONDS = 0.2


class TickTimer:
    """Calls `look` at these times, in the running event loop."""

    def __init__(self, look: Callable[[float], None], restless: Callable[[], bool]) -> None:
        """`look` is called with monotonic seconds; `restless`: whether something is open."""
        self._look, self._restless = look, restless
        self._looked = 0.0
        self._reading = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look, and go on, in the running loop."""
        self._turn(time.monotonic())

    def tick_if_due(self, now: float) -> None:
        """Something has come: look if it is time."""
        if self._timer is not None and not self._reading and now - self._looked >= self._pause:
            self._turn(now)

    def stop(self) -> None:
        """No more looks."""
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
