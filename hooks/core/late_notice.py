"""A line about what the training thread waits for without a time limit, as it does for a file server that hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.worker import start_thread

LATE_SECONDS = 30.0


@contextlib.contextmanager
def say_if_late(doing: str, *, speaks: bool) -> Iterator[None]:
    """Say what the block is doing where it is not over after `LATE_SECONDS`. It goes on all the same: no call to the
    system can be given up. `speaks`: for other ranks, too, that do the same beside this one."""
    timer: threading.Timer | None = None
    if speaks:
        with contextlib.suppress(RuntimeError, MemoryError):  # without the line, but the block is done
            late = (
                f"{doing} has taken {LATE_SECONDS:g} s so far and goes on; if it does not end, check that file system"
            )
            timer = threading.Timer(LATE_SECONDS, fault_guard.say, (late,))
            timer.daemon = True
            start_thread(timer)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
