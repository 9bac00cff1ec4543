"""The processes of ranks: of the death of one is learned at once, and signals reach the very one that was meant."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from sentinel.daemon.endings import exit_status


class Processes:
    """By pid, each held by a pidfd: another process that gets its pid one day is not it."""

    def __init__(self, ended: Callable[[int, int | None], None]) -> None:
        """`ended` is called with the pid of one that died, and its exit status where that is known."""
        self._ended = ended
        self._descriptors: dict[int, int] = {}

    def __contains__(self, pid: int) -> bool:
        return pid in self._descriptors

    def hold(self, pid: int) -> None:
        """Learn of its death. Forked DataLoader workers keep its socket open for seconds after it."""
        if pid in self._descriptors:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:  # it was quicker
            asyncio.get_running_loop().call_soon(self._ended, pid, None)
            return
        except OSError:
            return
        self._descriptors[pid] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._died, pid)

    def interrupt(self, pid: int, number: int) -> bool:
        """Send it a signal; False where it cannot be had."""
        try:
            signal.pidfd_send_signal(self._descriptors[pid], number)
        except (KeyError, OSError):
            return False
        return True

    def close(self) -> None:
        """Let go of all."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _died(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        status = exit_status(pid, descriptor)
        os.close(descriptor)
        self._ended(pid, status)
