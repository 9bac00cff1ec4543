"""Judges from its heartbeat page whether a rank hangs: done here, because a hanging process may hold its own GIL.

    stalled_seconds        time in one place without progress, while the loop should make some. 0 after the loop, in a
                           debugger, in a declared phase, while the process is stopped, in a checkpoint or a compiler.
                           It starts over whenever the stack changes: the stack of a rank that evaluates does
    stall_limit_seconds    how long that may last: ten times the longest gap that the run has shown, within bounds that
                           depend on what the process does meanwhile, and on whether others wait for it

Work that takes long for a good reason has two hours, and counts after that. What the stack shows is only known while
the watchdog can look at it. If the beat itself stands still, the GIL is held or the whole process is starved; then its
last record counts.
"""

from __future__ import annotations

import os
from pathlib import Path

from sentinel.daemon.ranks.cgroups import is_frozen
from sentinel.wire.heartbeat_page import (
    BEAT_SECONDS,
    BLANK,
    PAGE,
    SIZE,
    STACKS,
    Heartbeat,
    Kind,
    Place,
    Stall,
    is_ours,
    unpack_heartbeat,
)

FLOOR_SECONDS = 60.0
"""Least stall that counts as a hang: ten times the step of a large model (6 s), and a cold file system."""
CEILING_SHARE = 0.8
"""Highest limit as a share of the process group's own time-out, which destroys the evidence."""
CEILING_SECONDS = 600.0 * CEILING_SHARE
"""Highest limit if the group's time-out is unknown or longer: NCCL's is 10 minutes (torch.distributed.constants)."""
GAP_FACTOR = 10.0
"""The limit as a multiple of the longest gap that the run has shown and survived."""
GAP_LEAST = 2.0
"""Least limit as a multiple of that gap, whatever the ceiling."""
ALONE_FLOOR_SECONDS = CEILING_SECONDS
"""Least limit of a single rank that waits: no other rank waits for it, and no process group's time-out destroys the
evidence; a checkpoint to slow storage takes minutes, in code that the stack may not reveal."""
AWAITS_FLOOR_SECONDS = 1800.0
"""Least limit of a single rank that waits in a sleep or for a thread, a future or a process, for the same reasons."""
BUSY_FACTOR = 10.0
BUSY_CEILING_SECONDS = 1800.0
"""Highest limit of a thread that computes in one and the same place, perhaps in one long call: gloo's time-out. Not
with several ranks: a rank that waits in CUDA for the others spins, and looks as if it computed."""
LONG_SECONDS = 7200.0
"""Seconds granted to checkpoints, compilers and exports, to a loop that does other work than training, and to a first
step that computes."""
FIRST_STEPS = 2
"""Number of first steps, which compile, tune and join process groups."""
MOVING_SECONDS = 2.5
"""Seconds after a change of the stack for which it counts as moving: two looks and a half."""
BUSY_SHARE = 0.5
"""Least share of one core that a computing thread uses."""


def judge_heartbeat(
    heartbeat: Heartbeat,
    now: float,
    *,
    busy: bool = False,
    stopped: bool = False,
    resumed: float = 0.0,
    unseen: float = 0.0,
    alone: bool = True,
    ceiling: float = CEILING_SECONDS,
) -> Stall:
    """Judge a heartbeat.

    `now`: monotonic seconds. `busy`: the training thread computes. `stopped`: by SIGSTOP or a debugger. `resumed`: when
    the process last went on after a stop. `unseen`: seconds since its last sign in which it was not observed; they are
    not counted. `alone`: it is the only rank. `ceiling`: the highest limit, in seconds.
    """
    quiet = now - heartbeat.progressed
    seconds = max(0.0, now - max(heartbeat.progressed, heartbeat.moved, resumed) - unseen)
    kind = _kind(heartbeat, now, busy)
    starting = heartbeat.steps < FIRST_STEPS
    floor = FLOOR_SECONDS
    if alone and kind == Kind.BLOCKED:
        floor = AWAITS_FLOOR_SECONDS if heartbeat.place == Place.AWAITS else ALONE_FLOOR_SECONDS
    limit = _limit(heartbeat.longest, busy, alone, ceiling, floor, starting=starting)
    elsewhere = heartbeat.place in (Place.LEFT, Place.DEBUGGER) or heartbeat.paused or stopped
    if elsewhere or not (heartbeat.progress or kind == Kind.HOLDING):
        return Stall(limit=limit, quiet=quiet)
    if kind == Kind.LONG:
        seconds = 0.0
    elif not heartbeat.progress:  # nothing was expected before the GIL was taken
        return Stall(max(0.0, now - max(heartbeat.beat, resumed) - unseen), limit, kind, quiet)
    return Stall(max(seconds, now - max(heartbeat.progressed, resumed) - unseen - LONG_SECONDS), limit, kind, quiet)


def _kind(heartbeat: Heartbeat, now: float, busy: bool) -> Kind:
    if heartbeat.place == Place.LONG:
        return Kind.LONG
    if now - heartbeat.beat > BEAT_SECONDS:
        return Kind.HOLDING
    if heartbeat.steps < FIRST_STEPS:
        return Kind.STARTING
    if now - heartbeat.moved < MOVING_SECONDS:
        return Kind.MOVING
    return Kind.BUSY if busy else Kind.BLOCKED


def _limit(longest: float, busy: bool, alone: bool, ceiling: float, floor: float, *, starting: bool) -> float:
    if starting:
        return LONG_SECONDS if busy else ceiling
    limit = min(max(GAP_FACTOR * longest, floor), max(ceiling, floor))
    if busy:
        limit = min(BUSY_FACTOR * limit, BUSY_CEILING_SECONDS if alone else ceiling)
    return max(limit, GAP_LEAST * longest)


class RankHeartbeat:
    """The heartbeat page and the stacks file of one rank, if it handed them over."""

    def __init__(self, descriptors: list[int], process: int, *, alone: bool = True, timeout: float = 0.0) -> None:
        """Take the descriptors, and close those that are not the two memory files of Sentinel.

        `alone`: it is the only rank. `timeout`: that of its process group, in seconds; 0: unknown.
        """
        self.stall = Stall()
        self.process, self._alone = process, alone
        self._ceiling = min(CEILING_SHARE * timeout, CEILING_SECONDS) if timeout > 0 else CEILING_SECONDS
        self.heartbeat: Heartbeat | None = None
        self._page = self._stacks = -1
        for descriptor in descriptors:
            if self._page < 0 and is_ours(descriptor, PAGE):
                self._page = descriptor
            elif self._stacks < 0 and is_ours(descriptor, STACKS):
                self._stacks = descriptor
            else:
                os.close(descriptor)
        self._cpu: tuple[int, float, float, float] | None = None
        """Progress, time of the last move, time of the look, and CPU seconds, from which the use of the CPU counts."""
        self._busy: bool | None = None
        self._looked: float | None = None
        self._resumed = self._sign = self._unseen = 0.0

    @property
    def stacks(self) -> int:
        """Descriptor of the file that dumps are written to; -1: none."""
        return self._stacks

    def look(self, now: float) -> Stall | None:
        """Judge the rank now; None if that is impossible: it gave no page, or it has just begun to stand, and whether
        its thread computes is not known yet."""
        if self._page < 0:
            return None
        page = os.pread(self._page, SIZE, 0)
        read = unpack_heartbeat(page) or unpack_heartbeat(os.pread(self._page, SIZE, 0))
        if read is None:
            if page == BLANK:
                self.heartbeat, self.stall = None, Stall()
            return self.stall
        self.heartbeat = read
        stands = now - read.progressed > 1.0
        stopped = stands and self._is_stopped()
        if stopped:
            self._resumed = now
        sign = max(read.progressed if read.progress else read.beat, read.moved, self._resumed)
        if sign != self._sign:
            self._sign, self._unseen = sign, 0.0
        if self._looked is not None and now - self._looked > BEAT_SECONDS:
            # The container was frozen, and this daemon with it; or it was starved. An open case stays open.
            self._unseen += max(0.0, now - max(self._looked, sign))
        self._looked = now
        busy = self._computes(read, now) if stands else False
        if busy is None:
            return None
        self.stall = judge_heartbeat(
            read,
            now,
            busy=busy,
            stopped=stopped,
            resumed=self._resumed,
            unseen=self._unseen,
            alone=self._alone,
            ceiling=self._ceiling,
        )
        return self.stall

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self._page, self._stacks):
            if descriptor >= 0:
                os.close(descriptor)
        self._page = self._stacks = -1

    def _computes(self, heartbeat: Heartbeat, now: float) -> bool | None:
        """Whether the thread has used half a core since it came where it stands; None in the first second without
        progress."""
        present = heartbeat.progress, heartbeat.moved, now, self._estimate_cpu(heartbeat)
        if self._cpu is None or self._cpu[0] != heartbeat.progress:
            self._cpu, self._busy = present, None
            return None
        _, moved, since, before = self._cpu
        if now - since > 1.0:
            self._busy = present[-1] - before > BUSY_SHARE * (now - since)
            if moved != heartbeat.moved:  # not at each move: a thread may move more often than once a second
                self._cpu = present
        return self._busy

    def _estimate_cpu(self, heartbeat: Heartbeat) -> float:
        """Return the seconds that the training thread computed, or would have computed with a core of its own: from
        the kernel if it tells them, otherwise from the page."""
        try:
            running, waiting, _ = Path(f"/proc/{self.process}/task/{heartbeat.thread}/schedstat").read_text().split()
            return (int(running) + int(waiting)) * 1e-9
        except (OSError, ValueError):  # the rank is in another container
            return heartbeat.cpu

    def _is_stopped(self) -> bool:
        """Whether the process is stopped, traced, or in a container that is paused."""
        try:
            state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in "tT" or is_frozen(self.process)
