"""A block that the end of the process waits for: nobody shall save a checkpoint of half a restore."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Their handlers, Python's own or the user's, raise into whatever runs."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What comes of these signals meanwhile comes once the block is over. Only the main thread is ever interrupted."""
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    came: list[tuple[signal.Signals, FrameType | None]] = []
    try:
        for number in handlers:
            signal.signal(number, lambda which, frame: came.append((signal.Signals(which), frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came[:1]:
            handlers[number](number, frame)
