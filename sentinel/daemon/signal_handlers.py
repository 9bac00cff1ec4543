"""Signals to the daemon: SIGTERM and SIGINT end it in order, SIGHUP has it read rules and settings again.

A signal that arrives while the daemon starts waits until it can be handled: a reload must not end the daemon, and its
end must leave nothing behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

HELD_BACK = frozenset({signal.SIGHUP, signal.SIGTERM, signal.SIGINT})


def hold_back() -> None:
    """Block the signals before the start. The process that started us may have done so already."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)


def serve(end: Callable[[], object], reload: Callable[[], object]) -> None:
    """Handle the signals in the running loop, beginning with those that wait."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGINT, end)
    loop.add_signal_handler(signal.SIGHUP, reload)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
