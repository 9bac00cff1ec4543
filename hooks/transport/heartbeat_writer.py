"""Lets the daemon see a hang: writes the heartbeat page, and dumps the stacks of all threads.

The training thread only counts (`StepAccumulator.progress`). The sender's thread writes the page: it notices when the
count stands still; after a second of that it looks at the stack, once a second, until the count moves again.

Stacks are dumped by the process itself when the daemon asks, whichever thread holds the GIL. The sender's thread
answers, if it gets the GIL. Else faulthandler does: its handler runs in C at a signal and writes into a file in memory
that the daemon holds, too. If the daemon cannot signal this process, a timer of faulthandler is reset again and again,
and fires once the resets stop. Neither may run while a thread runs Python: they read frames without the GIL, and one
dump in some thousand ends in a segmentation fault (CPython 3.11).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from sentinel.hooks.loop.loop_locator import moves
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.wire.heartbeat_page import BLANK, PAGE, SIGNAL, SIZE, STACKS, Heartbeat, Place, pack_heartbeat

LOOK_SECONDS = 1.0
"""Time without progress before the stack is looked at, and between two looks."""
LEARN_STEPS = 2
"""Steps after which gaps are learned from: the first ones compile and warm up."""
ABSENT_SECONDS = 5.0
"""Time without a beat after which this thread counts as stopped, or the GIL as held: what caused it is over."""
REWIND_SECONDS = 5.0
"""Time between two resets of the timer: one costs 0.16 ms."""
TIMER_SECONDS = 30.0
_FRAMES = 60


class StackDumps:
    """The file for dumps, and what writes them. May be made on any thread; raises OSError if such a file cannot be
    made."""

    def __init__(self) -> None:
        caught = _caught()  # first: if it fails, no descriptor is left behind
        self.descriptor = os.memfd_create(STACKS, os.MFD_CLOEXEC)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)  # so that the reader may empty it
        self._registered = self._wound = False
        self._wind_at = 0.0
        if not caught:
            faulthandler.register(SIGNAL, file=self.descriptor, all_threads=True, chain=False)
            self._registered = True

    def signal(self) -> int:
        """Return the signal that makes a dump; 0 if other code handles it, from before us or since."""
        return SIGNAL if self._registered and not _is_taken_over() else 0

    def wind(self) -> None:
        """Reset the timer once more. For daemons that cannot signal us."""
        now = time.monotonic()
        if now >= self._wind_at:
            self._wind_at, self._wound = now + REWIND_SECONDS, True
            faulthandler.dump_traceback_later(TIMER_SECONDS, file=self.descriptor)

    def halt(self) -> None:
        """Stop the timer until it is reset again. Called before a fork, on the thread that forks; it takes 0.1 ms.

        The timer's thread does not exist in the child, whose interpreter would wait for it at its end and never return.
        """
        if self._wound:
            # It must not be reset before the fork either, during which the GIL is released.
            self._wind_at, self._wound = time.monotonic() + REWIND_SECONDS, False
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Release the signal, unless other code has taken it."""
        if self.signal():
            faulthandler.unregister(SIGNAL)
        self.halt()
        os.close(self.descriptor)

    def abandon(self) -> None:
        """Close in a forked child: as `close`, except for the timer, which belongs to the parent."""
        self._wound = False
        self.close()


class HeartbeatWriter:
    """The heartbeat page of this process. Raises OSError if there is no memfd (macOS).

    `beat` and `close` are called on the sender's thread.
    """

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
        """Whether the daemon cannot signal this process.

        If so, faulthandler's timer dumps the stacks, as it does where other code handles the signal.
        """
        self._accumulator = accumulator
        self._beat = self._progressed = time.monotonic()
        self._progress, self._paused = -1, False
        self._look_at = self._moved = self._longest = self._cpu = 0.0
        self._place = Place.UNKNOWN
        self._stack: tuple[int, ...] = ()
        self._signal = self.stacks.signal()

    @property
    def descriptors(self) -> tuple[int, int]:
        """The file descriptors that the daemon gets: of the page and of the stacks."""
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
        """Release everything, once: the numbers of closed descriptors may soon be the user's.

        A blank page is no longer judged, and the daemon signals no process for it.
        """
        if not self._ended:
            with contextlib.suppress(OSError):
                os.pwrite(self.page, BLANK, 0)
        self._end(self.stacks.close)

    def abandon(self) -> None:
        """Release everything in a forked child: the signal's handler would write into the parent's file.

        The page stays the parent's.
        """
        self._end(self.stacks.abandon)

    def _end(self, stacks: Callable[[], None]) -> None:
        if not self._ended:
            self._ended = True
            stacks()
            os.close(self.page)

    def _learn(self, now: float) -> None:
        """Learn from a gap that is over. A gap in a phase, in a checkpoint or outside the loop says nothing about the
        loop."""
        in_loop = self._place in (Place.UNKNOWN, Place.LOOP, Place.AWAITS) and not self._paused
        if self._accumulator.steps > LEARN_STEPS and in_loop:
            self._longest = max(self._longest, now - max(self._progressed, self._moved))

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_SECONDS
        place, stack = self._accumulator.loop_locator.look(self._accumulator.thread, self._accumulator.native)
        if self._stack and moves(self._stack, stack):
            self._moved = now
        if self._place in (Place.LEFT, Place.DEBUGGER) and place != self._place:
            self._progressed = now  # e.g. a notebook's cell that is run again the next morning
        self._place, self._stack = place, stack
        self._cpu = _cpu_seconds(self._accumulator.native)
        self._signal = self.stacks.signal()


def _cpu_seconds(thread: int) -> float:
    """Return the seconds that a thread ran or waited to run, by the scheduler's count; 0 if that is not known."""
    try:
        running, waiting, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return (int(running) + int(waiting)) * 1e-9
    except (OSError, ValueError):
        return 0.0


def format_stacks() -> str:
    """Return the stacks of all threads now, as Python sees them. Needs the GIL."""
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
