"""Make calls that may never return, without letting them block anything else.

A driver that is stuck blocks its caller, uninterruptibly. So each device has its own thread, and a caller waits for it
no longer than until a deadline. A device that owes an answer is not asked again until it has given it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Patient(Generic[T]):
    """Asks one device, on a daemon thread, so that a call that never returns does not keep the process from ending."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self.name = name
        self._call = call
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answer: T | Exception | None = None
        self._answered = threading.Event()
        self._asked_at: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def silent_since(self) -> float | None:
        """Monotonic seconds at which the call began that has not returned; None where no call is running."""
        return self._asked_at

    def order(self) -> None:
        """Ask, unless an answer is still owed."""
        if self._asked_at is not None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"sentinel-{self.name}", daemon=True)
            self._thread.start()
        self._asked_at = time.monotonic()
        self._answered.clear()
        self._orders.put(True)

    def collect(self, deadline: float) -> T | None:
        """Return the answer to the order, or None where it has not arrived by `deadline` (monotonic seconds). An answer
        is returned once. Raises what the call raised."""
        if self._asked_at is None or not self._answered.wait(max(deadline - time.monotonic(), 0.0)):
            return None
        self._asked_at = None
        answer, self._answer = self._answer, None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Let the thread end after its call returns."""
        self._orders.put(False)

    def _serve(self) -> None:
        while self._orders.get():
            try:
                self._answer = self._call()
            except Exception as error:
                self._answer = error
            self._answered.set()
