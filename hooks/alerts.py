"""Hands alerts to the functions that the user gave to `monitor.on_alert`: one thread, and a queue with an end.

What they do may take long or raise, and neither the training nor the sender waits for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from sentinel.hooks import faults

Alert = dict[str, Any]

QUEUE_ALERTS = 100
"""Alerts that wait for a slow function. Then the newest are dropped and counted."""


class Alerts:
    """`add` on any thread, `put` on the sender's."""

    def __init__(self) -> None:
        self.functions: list[Callable[[Alert], object]] = []
        self.dropped = 0
        self._queue = queue.Queue[Alert](maxsize=QUEUE_ALERTS)
        self._thread: threading.Thread | None = None

    def add(self, function: Callable[[Alert], object]) -> None:
        """Call it at each alert from now on."""
        self.functions.append(function)

    def put(self, alert: Alert) -> None:
        """Hand it over; returns at once."""
        if not self.functions:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sentinel-alerts", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                faults.say("on_alert: a function is slower than the alerts come; some are not handed to it")

    def _serve(self) -> None:
        while True:
            alert = self._queue.get()
            for function in list(self.functions):
                try:
                    function(alert)
                except Exception:
                    faults.log.warning("sentinel: %r raised", function, exc_info=True)
