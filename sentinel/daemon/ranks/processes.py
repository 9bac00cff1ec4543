"""The processes of ranks: their deaths are seen immediately, and signals reach exactly the intended process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable

from sentinel.daemon.ranks.exit_status import exit_status

MESSAGE_SECONDS = 0.1
"""Seconds between the end of a process and its report. What its supervisor sent before the signal that ended it has
arrived in the socket by then, and must be read first."""

_LATE_SECONDS = MESSAGE_SECONDS / 2
"""A timer that is later than this says that the loop stood still, and has hardly read what arrived meanwhile."""

_LONGEST_WAIT_SECONDS = 2.0
"""Seconds after which a death is reported even if the loop is late each time."""


class Processes:
    """Processes by pid, each held by a pidfd: a later process with the same pid is not confused with it."""

    def __init__(self, ended: Callable[[int, int | None], None]) -> None:
        """`ended` is called with the pid of a process that died, and its exit status if that is known."""
        self._ended = ended
        self._descriptors: dict[int, int] = {}
        self._unreported: dict[int, tuple[asyncio.TimerHandle, int | None]] = {}
        """Ended processes by pid: the timer of the report, and the exit status."""
        self._peers: set[int] = set()
        """Pids of processes that opened a connection: of others only a stored number is known."""

    def __contains__(self, pid: int) -> bool:
        return pid in self._descriptors

    def hold(self, pid: int) -> None:
        """Watch for the death of a process known only by its pid: the starter of this daemon, or a rank of the daemon
        before it."""
        if pid not in self._descriptors:
            try:
                self._watch(pid, os.pidfd_open(pid))
            except ProcessLookupError:  # it has ended already
                asyncio.get_running_loop().call_soon(self._ended, pid, None)
            except OSError:
                pass

    def take(self, pid: int, descriptor: int) -> None:
        """Watch for the death of the process that opened a connection: forked DataLoader workers keep its socket open
        for seconds after it. The pidfd `descriptor` is ours from now on, and replaces a former one."""
        loop = asyncio.get_running_loop()
        if (former := self._descriptors.get(pid, -1)) >= 0:
            if has_ended(former):
                self._read_status(pid)
                self._report_death(pid)
            else:
                loop.remove_reader(former)
                os.close(former)
        self._peers.add(pid)
        self._watch(pid, descriptor)

    def can_interrupt(self, pid: int) -> bool:
        """Whether a signal would reach exactly the intended process."""
        return pid in self._peers

    def interrupt(self, pid: int, number: int) -> bool:
        """Send a process a signal; False if that is impossible."""
        if not self.can_interrupt(pid):
            return False
        try:
            signal.pidfd_send_signal(self._descriptors[pid], number)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Release all processes."""
        for timer, _ in self._unreported.values():
            timer.cancel()
        self._unreported.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._peers.clear()

    def _watch(self, pid: int, descriptor: int) -> None:
        self._descriptors[pid] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._read_status, pid)

    def _read_status(self, pid: int) -> None:
        """Read the exit status at once: as soon as the launcher has asked for it, it is gone."""
        if pid not in self._unreported:
            loop, descriptor = asyncio.get_running_loop(), self._descriptors[pid]
            loop.remove_reader(descriptor)
            self._report_later(pid, exit_status(pid, descriptor), loop.time())

    def _report_later(self, pid: int, status: int | None, since: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + MESSAGE_SECONDS

        def report() -> None:
            now = loop.time()
            if now - due > _LATE_SECONDS and now - since < _LONGEST_WAIT_SECONDS:
                self._report_later(pid, status, since)
            else:
                self._report_death(pid)

        self._unreported[pid] = loop.call_at(due, report), status

    def _report_death(self, pid: int) -> None:
        timer, status = self._unreported.pop(pid)
        timer.cancel()
        self._peers.discard(pid)
        os.close(self._descriptors.pop(pid))
        self._ended(pid, status)


def has_ended(descriptor: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
