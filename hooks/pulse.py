"""Writes the heartbeat page, on the sender's thread.

The training thread only counts (`Ledger.progress`). Here it is noticed when the count stands still; after a second of
that the stack is looked at, once a second, for as long as it does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from sentinel.heartbeat import PAGE, SIZE, Heartbeat, Place, packed
from sentinel.hooks.stacks import Stacks
from sentinel.hooks.tally import Ledger

LOOK_SECONDS = 1.0
"""Of no progress before the stack is looked at, and between two looks."""
LEARN_STEPS = 2
"""Steps after which gaps are learned from: the first ones compile and warm up."""


class Pulse:
    """See above. `beat` and `close` on the sender's thread. Raises OSError where there is no memfd (macOS)."""

    def __init__(self, ledger: Ledger) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd")
        self.page = os.memfd_create(PAGE, os.MFD_CLOEXEC)
        os.ftruncate(self.page, SIZE)
        self.stacks = Stacks()
        self._ended = False
        self.unsignalled = False
        """The daemon cannot signal this process."""
        self._ledger = ledger
        self._progress, self._progressed = -1, time.monotonic()
        self._look_at = 0.0
        self._longest = 0.0
        self._cpu = 0.0
        self._place, self._signature, self._changes = Place.UNKNOWN, 0, 0

    @property
    def descriptors(self) -> tuple[int, int]:
        """What the daemon gets."""
        return self.page, self.stacks.descriptor

    def beat(self) -> None:
        """Write the page."""
        now = time.monotonic()
        ledger = self._ledger
        if ledger.progress != self._progress:
            self._learn(now)
            self._progress, self._progressed = ledger.progress, now
            self._place, self._changes, self._look_at = Place.UNKNOWN, 0, now + LOOK_SECONDS
        elif now >= self._look_at:
            self._look(now)
        if self.unsignalled:
            self.stacks.wind()
        heartbeat = Heartbeat(
            beat=now, progress=ledger.progress, progressed=self._progressed, steps=ledger.steps, work=ledger.work,
            place=self._place, paused=int(ledger.paused), longest=self._longest, cpu=self._cpu,
            thread=ledger.native, ident=ledger.thread, changes=self._changes,
        )  # fmt: skip
        os.pwrite(self.page, packed(heartbeat), 0)

    def close(self) -> None:
        """Give everything back, once: the numbers of closed descriptors are soon the user's."""
        self._end(self.stacks.close)

    def abandon(self) -> None:
        """In a forked child: the signal's handler would write into the parent's file."""
        self._end(self.stacks.abandon)

    def _end(self, stacks: Callable[[], None]) -> None:
        if not self._ended:
            self._ended = True
            stacks()
            os.close(self.page)

    def _learn(self, now: float) -> None:
        in_loop = self._place in (Place.UNKNOWN, Place.LOOP) and not self._ledger.paused
        if self._ledger.steps > LEARN_STEPS and in_loop:
            self._longest = max(self._longest, now - self._progressed)

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_SECONDS
        self._place, signature = self._ledger.whereabouts.look(self._ledger.thread)
        self._changes += self._signature not in (0, signature)
        self._signature = signature
        self._cpu = _cpu_seconds(self._ledger.native)


def _cpu_seconds(thread: int) -> float:
    """CPU time of a thread of ours, by the scheduler's count; 0 where that is not known."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0
