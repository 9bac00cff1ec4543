"""Waits for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DEADLINE_SECONDS = 60.0
LOOK_SECONDS = 0.05


def until(found: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Call `found` until it returns something true, and return that; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(LOOK_SECONDS)
    return answer
