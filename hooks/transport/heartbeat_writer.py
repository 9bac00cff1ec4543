"""Writes the heartbeat page, on the sender's thread.

The training thread only counts (`StepAccumulator.progress`). Here it is noticed when the count stands still; after a
second of that the stack is looked at, once a second, for as long as it does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from sentinel.hooks.loop.loop_locator import moves
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.transport.stack_dumps import StackDumps
from sentinel.wire.heartbeat_page import BLANK, PAGE, SIZE, Heartbeat, Place, pack_heartbeat

LOOK_SECONDS = 1.0
"""Of no progress before the stack is looked at, and between two looks."""
LEARN_STEPS = 2
"""Steps after which gaps are learned from: the first ones compile and warm up."""
ABSENT_SECONDS = 5.0
"""A thread that did not come to beat for so long was stopped, or the GIL was held: what did so is over."""


class HeartbeatWriter:
    """The heartbeat page of this process. `beat` and `close` are called on the sender's thread. Raises OSError where
    there is no memfd (macOS)."""

    def __init__(self, accumulator: StepAccumulator) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self.stacks = StackDumps()
        self._ended = False
        try:
            self.page = os.memfd_create(PAGE, os.MFD_CLOEXEC)
            os.ftruncate(self.page, SIZE)
        except OSError:
            self.stacks.close()
            raise
        self.unsignalled = False
        """The daemon cannot signal this process: faulthandler's timer dumps the stacks, as it does where other code
        handles the signal."""
        self._accumulator = accumulator
        self._beat = self._progressed = time.monotonic()
        self._progress, self._paused = -1, False
        self._look_at = self._moved = self._longest = self._cpu = 0.0
        self._place = Place.UNKNOWN
        self._stack: tuple[int, ...] = ()
        self._signal = self.stacks.signal()

    @property
    def descriptors(self) -> tuple[int, int]:
        """What the daemon gets."""
        return self.page, self.stacks.descriptor

    def beat(self) -> None:
        """Write the page."""
        now = time.monotonic()
        accumulator = self._accumulator
        if now - self._beat > ABSENT_SECONDS:
            self._moved = now
        if accumulator.progress != self._progress:
            self._learn(now)
            self._progress, self._progressed = accumulator.progress, now
            self._place, self._moved, self._look_at = Place.UNKNOWN, 0.0, now + LOOK_SECONDS
            self._stack = ()
        elif now >= self._look_at:
            self._look(now)
        self._beat, self._paused = now, accumulator.paused or accumulator.captured
        if self.unsignalled or not self._signal:
            self.stacks.wind()
        heartbeat = Heartbeat(
            beat=now, progress=accumulator.progress, progressed=self._progressed, steps=accumulator.steps,
            work=accumulator.work,
            place=self._place, paused=int(self._paused), longest=self._longest, cpu=self._cpu,
            thread=accumulator.native, ident=accumulator.thread, moved=self._moved, signal=self._signal,
        )  # fmt: skip
        os.pwrite(self.page, pack_heartbeat(heartbeat), 0)

    def close(self) -> None:
        """Give everything back, once: the numbers of closed descriptors are soon the user's. A page that is blank is
        judged no more, and the daemon signals no process for it."""
        if not self._ended:
            with contextlib.suppress(OSError):
                os.pwrite(self.page, BLANK, 0)
        self._end(self.stacks.close)

    def abandon(self) -> None:
        """In a forked child: the signal's handler would write into the parent's file. The page stays the parent's."""
        self._end(self.stacks.abandon)

    def _end(self, stacks: Callable[[], None]) -> None:
        if not self._ended:
            self._ended = True
            stacks()
            os.close(self.page)

    def _learn(self, now: float) -> None:
        """A gap is over. What was in a phase, in a checkpoint or beyond the loop says nothing of the loop."""
        in_loop = self._place in (Place.UNKNOWN, Place.LOOP, Place.AWAITS) and not self._paused
        if self._accumulator.steps > LEARN_STEPS and in_loop:
            self._longest = max(self._longest, now - max(self._progressed, self._moved))

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_SECONDS
        place, stack = self._accumulator.loop_locator.look(self._accumulator.thread, self._accumulator.native)
        if self._stack and moves(self._stack, stack):
            self._moved = now
        if self._place in (Place.LEFT, Place.DEBUGGER) and place != self._place:
            self._progressed = now  # a notebook's cell that is run again the next morning
        self._place, self._stack = place, stack
        self._cpu = _cpu_seconds(self._accumulator.native)
        self._signal = self.stacks.signal()


def _cpu_seconds(thread: int) -> float:
    """Seconds that a thread of ours ran or wanted to, by the scheduler's count; 0 where that is not known."""
    try:
        running, waiting, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return (int(running) + int(waiting)) * 1e-9
    except (OSError, ValueError):
        return 0.0
