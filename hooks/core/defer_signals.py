"""A block that the end of the process waits for: nobody shall save a checkpoint of half a restore."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_signals() -> Iterator[None]:
    """Signals that Python code handles, whose handlers may raise into whatever runs, come once the block is over.
    Only the main thread is ever interrupted."""
    handlers = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    came: dict[int, None] = {}  # in order, and once each, as the system has it
    try:
        for number in handlers:
            signal.signal(number, lambda which, _: came.setdefault(which))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for which in came:
            signal.raise_signal(which)
