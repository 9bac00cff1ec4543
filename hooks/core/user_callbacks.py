"""Hands alerts to the functions that the user gave to `monitor.on_alert`: one thread, and a queue with an end.

What they do may take long or raise, and neither the training nor the sender waits for it. What they hold, a trainer
with its model, they hold no longer than the optimizer lives, whose stream has them: not the session, nor the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from sentinel.hooks.core import fault_guard

Alert = dict[str, Any]
_Functions = tuple[Callable[[Alert], object], ...]
_Waiting = tuple[Alert, _Functions]

QUEUE_ALERTS = 100
"""Alerts that wait for a slow function. Then the newest are dropped and counted."""


class UserCallbacks:
    """`add` on any thread, `put` on the sender's."""

    def __init__(self) -> None:
        self.dropped = 0
        self.functions: _Functions = ()
        """Of the user's."""
        self._queue = SimpleQueue[_Waiting | None]()
        self._thread: threading.Thread | None = None

    def add(self, function: Callable[[Alert], object]) -> None:
        """Call it at each alert from now on."""
        self.functions = (*self.functions, function)

    def put(self, alert: Alert) -> None:
        """Hand it over; returns at once."""
        if not self.functions:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name="sentinel-alerts", daemon=True)
            self._thread.start()
        if self._queue.qsize() < QUEUE_ALERTS:
            self._queue.put((alert, self.functions))
            return
        self.dropped += 1
        if self.dropped == 1:
            fault_guard.say("on_alert: a function is slower than the alerts come; some are not handed to it")

    def __del__(self) -> None:
        """The optimizer is gone: the thread ends once it has told what waits."""
        self._queue.put(None)


def _serve(queue: SimpleQueue[_Waiting | None]) -> None:
    while _call_functions(queue.get()):  # a call, so that nothing of what was told is held while it waits for more
        pass


def _call_functions(waiting: _Waiting | None) -> bool:
    if waiting is None:
        return False
    alert, functions = waiting
    for function in functions:
        try:
            function(alert)
        except Exception:
            fault_guard.log.warning("sentinel: %r raised", function, exc_info=True)
    return True
