"""Stacks of all threads, by the process itself when the daemon asks, whichever thread holds the GIL.

The sender's thread answers, if it gets the GIL. Else faulthandler does: its handler runs in C at a signal and writes
into a file in memory that the daemon holds, too. Where the daemon cannot signal this process, a timer of faulthandler's
is reset again and again, and fires once it is not. Neither may run while a thread runs Python: they read frames
without the GIL, and one dump in some thousand ends in a segmentation fault (CPython 3.11).
"""

from __future__ import annotations

import faulthandler
import fcntl
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from sentinel.wire.heartbeat_page import SIGNAL, STACKS

REWIND_SECONDS = 5.0
"""Between two windings of the timer: one costs 0.16 ms."""
TIMER_SECONDS = 30.0
_FRAMES = 60


class StackDumps:
    """Where dumps go. May be made on any thread; raises OSError if such a file cannot be made."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(STACKS, os.MFD_CLOEXEC)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)  # so that the reader may empty it
        self._registered = self._wound = False
        self._wind_at = 0.0
        if not _caught():
            faulthandler.register(SIGNAL, file=self.descriptor, all_threads=True, chain=False)
            self._registered = True

    def signal(self) -> int:
        """The signal that makes a dump; 0 if other code handles it, from before us or since."""
        return SIGNAL if self._registered and not _is_taken_over() else 0

    def wind(self) -> None:
        """Put the timer off once more. For daemons that cannot signal us."""
        now = time.monotonic()
        if now >= self._wind_at:
            self._wind_at, self._wound = now + REWIND_SECONDS, True
            faulthandler.dump_traceback_later(TIMER_SECONDS, file=self.descriptor)

    def halt(self) -> None:
        """Stop the timer until it is wound again, before a fork: its thread is not in the child, whose interpreter
        would wait for it at its end and never return. On the thread that forks; it takes 0.1 ms."""
        if self._wound:
            # Nor is it wound between this and the fork, for which the GIL is let go of.
            self._wind_at, self._wound = time.monotonic() + REWIND_SECONDS, False
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Give the signal back, unless other code has taken it."""
        if self.signal():
            faulthandler.unregister(SIGNAL)
        self.halt()
        os.close(self.descriptor)

    def abandon(self) -> None:
        """In a forked child: as `close`, except for the timer, which belongs to the parent."""
        self._wound = False
        self.close()


def text() -> str:
    """Stacks of all threads now, as Python sees them. Needs the GIL."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = [f"Thread 0x{ident:016x} [{names.get(ident, '?')}] (most recent call first):"]
        # Not by `traceback`: it reads the sources, and their file system may be what hangs.
        found = itertools.islice(traceback.walk_stack(frame), _FRAMES)
        lines += [f'  File "{f.f_code.co_filename}", line {number} in {f.f_code.co_name}' for f, number in found]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _caught() -> bool:
    """Whether the signal is handled already, in Python or in C."""
    caught = next(
        (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt")),
        "0",
    )
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def _is_taken_over() -> bool:
    """Whether Python code has set a handler since. Ours is in C, which `signal.getsignal` does not show."""
    return signal.getsignal(SIGNAL) not in (signal.SIG_DFL, None)
