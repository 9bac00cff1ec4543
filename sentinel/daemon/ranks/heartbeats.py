"""Whether a rank hangs, by its heartbeat page: judged here, because a process that hangs may hold its own GIL.

    stalled_seconds        in one place without progress, where the loop should make some. 0 beyond the loop, in a
                           debugger, in a phase that was declared, while the process is stopped, in a checkpoint or a
                           compiler. It starts over whenever the stack is another: a rank that evaluates moves
    stall_limit_seconds    how long that may last: ten times what the run itself has shown, within bounds that depend
                           on what the process does meanwhile, and on whether others wait for it

What takes long with reason has two hours, and counts from then on. What the stack shows is only known where the
watchdog can look at it. Where the beat itself stands still, the GIL is held, or the whole process starved; then
its last record counts.
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
"""Nothing shorter is a hang. Ten times the step of a large model (6 s), and a cold file system."""
CEILING_SHARE = 0.8
"""Of the process group's own time-out, which takes the evidence away."""
CEILING_SECONDS = 600.0 * CEILING_SHARE
"""Where the group's is not known, or longer: NCCL's is 10 minutes (torch.distributed.constants)."""
GAP_FACTOR = 10.0
GAP_LEAST = 2.0
"""The limit is never less than so many times what the run has shown and survived, whatever the ceiling."""
ALONE_FLOOR_SECONDS = CEILING_SECONDS
AWAITS_FLOOR_SECONDS = 1800.0
"""Of a single rank that waits, and of one that waits in a sleep or for a thread, a future or a process. Nobody else
stands meanwhile, and no process group's time-out takes the evidence away; a checkpoint that goes to slow storage takes
minutes, in code of which the stack may tell nothing."""
BUSY_FACTOR = 10.0
BUSY_CEILING_SECONDS = 1800.0
"""For a thread that computes, in one and the same place: it may be one long call. gloo's own time-out. Not with several
ranks: a rank that waits in CUDA for the others spins, and looks as if it computed."""
LONG_SECONDS = 7200.0
"""Granted to checkpoints, compilers, exports; to work that moves on in the loop and is not training's; to a first step
that computes."""
FIRST_STEPS = 2
"""The first steps compile, tune and join process groups."""
MOVING_SECONDS = 2.5
"""After the stack was last another, it is still said to move: two looks and a half."""
BUSY_SHARE = 0.5
"""Of one core."""


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
    """`now`: monotonic seconds. `busy`: the training thread computes. `stopped`: by SIGSTOP or a debugger.
    `resumed`: when it last went on after a stop. `unseen`: seconds since its last sign in which it was not observed;
    they are not counted. `alone`: the only rank. `ceiling`: of the limit."""
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
    """The heartbeat and the stacks of one rank, as far as it handed them over."""

    def __init__(self, descriptors: list[int], process: int, *, alone: bool = True, timeout: float = 0.0) -> None:
        """Takes the descriptors, and closes those that are no files in memory of ours. `alone`: the only rank;
        `timeout`: of its process group, in seconds, where there is one."""
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
        self._cpu: tuple[int, float, float] | None = None
        self._busy: bool | None = None
        self._looked: float | None = None
        self._resumed = self._sign = self._unseen = 0.0

    @property
    def stacks(self) -> int:
        """Descriptor of the file that dumps go to; -1: none."""
        return self._stacks

    def look(self, now: float) -> Stall | None:
        """Judge this moment; None where nothing can be said: the rank gave no page, or is looked at for the first time,
        and what its thread does is not known yet."""
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
            # The container was frozen, and we with it; or we starved. A case that is open stays open.
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
        """Whether the thread used half a core since this stall was first seen; None for a second from then."""
        used = self._estimate_cpu(heartbeat)
        if self._cpu is None or self._cpu[0] != heartbeat.progress:
            self._cpu, self._busy = (heartbeat.progress, now, used), None
        elif now - self._cpu[1] > 1.0:
            self._busy = used - self._cpu[2] > BUSY_SHARE * (now - self._cpu[1])
        return self._busy

    def _estimate_cpu(self, heartbeat: Heartbeat) -> float:
        """Seconds that the thread that trains computed, or would have with a core of its own: by the kernel where that
        can be asked, else by the page."""
        try:
            running, waiting, _ = Path(f"/proc/{self.process}/task/{heartbeat.thread}/schedstat").read_text().split()
            return (int(running) + int(waiting)) * 1e-9
        except (OSError, ValueError):  # in a container of its own
            return heartbeat.cpu

    def _is_stopped(self) -> bool:
        """Whether the process is stopped, traced, or in a container that is paused."""
        try:
            state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in "tT" or is_frozen(self.process)
