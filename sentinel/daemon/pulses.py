"""Whether a rank hangs, by its heartbeat page: judged here, because a process that hangs may hold its own GIL.

    stalled_seconds        since the last progress, where the loop should make some: 0 beyond it, in a debugger,
                           in a phase that was declared, while the process is stopped
    stall_limit_seconds    how long that may last: ten times the longest gap that the run itself has shown, within
                           bounds that depend on what the process does meanwhile

What the stack shows is only known where the watchdog can look at it. Where the beat itself stands still, the GIL is
held, or the whole process starved; then the last words count.
"""

from __future__ import annotations

import os
from pathlib import Path

from sentinel.heartbeat import PAGE, SIZE, STACKS, Heartbeat, Kind, Place, Stall, is_ours, unpacked

FLOOR_SECONDS = 60.0
"""Nothing shorter is a hang. Ten times the step of a large model (6 s), and a cold file system."""
CEILING_SECONDS = 480.0
"""0.8 of NCCL's own time-out, which takes the evidence away: 10 minutes (torch.distributed.constants)."""
GAP_FACTOR = 10.0
BUSY_FACTOR = 10.0
BUSY_CEILING_SECONDS = 1800.0
"""For a thread that computes, in one and the same place: it may be one long call. gloo's own time-out."""
LONG_SECONDS = 7200.0
"""For checkpoints, compilers, exports; for work that goes on in the loop and is not training's; for the first step."""
BEAT_SECONDS = 5.0
"""A watchdog that beats ten times a second and has not for so long does not get the GIL."""
BUSY_SHARE = 0.5
"""Of one core."""


def judged(heartbeat: Heartbeat, now: float, *, busy: bool, stopped: bool) -> Stall:
    """`now`: monotonic seconds. `busy`: the thread that trains computes. `stopped`: by SIGSTOP or a debugger."""
    limit = min(max(GAP_FACTOR * heartbeat.longest, FLOOR_SECONDS), CEILING_SECONDS)
    seconds = now - heartbeat.progressed
    elsewhere = heartbeat.place in (Place.LEFT, Place.DEBUGGER) or heartbeat.paused or stopped
    if elsewhere or not heartbeat.progress:
        return Stall(limit=limit, quiet=seconds)
    kind = _kind(heartbeat, now, busy)
    if kind in (Kind.STARTING, Kind.LONG, Kind.MOVING):
        limit = LONG_SECONDS
    elif busy:
        limit = min(BUSY_FACTOR * limit, BUSY_CEILING_SECONDS)
    return Stall(seconds, limit, kind, seconds)


def _kind(heartbeat: Heartbeat, now: float, busy: bool) -> Kind:
    if not heartbeat.steps:
        return Kind.STARTING
    if heartbeat.place == Place.LONG:
        return Kind.LONG
    if now - heartbeat.beat > BEAT_SECONDS:
        return Kind.HOLDING
    if heartbeat.changes:
        return Kind.MOVING
    return Kind.BUSY if busy else Kind.BLOCKED


class Pulse:
    """The heartbeat and the stacks of one rank, as far as it handed them over."""

    def __init__(self, descriptors: list[int], process: int) -> None:
        """Takes the descriptors, and closes those that are no files in memory of ours."""
        self.stall = Stall()
        self.process = process
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
        self._busy = False

    @property
    def stacks(self) -> int:
        """Descriptor of the file that dumps go to; -1: none."""
        return self._stacks

    def look(self, now: float) -> Stall | None:
        """Judge this moment; None where the rank gave no page."""
        if self._page < 0:
            return None
        read = unpacked(os.pread(self._page, SIZE, 0)) or unpacked(os.pread(self._page, SIZE, 0))
        if read is None:
            return None if self.heartbeat is None else self.stall
        self.heartbeat = read
        stands = now - read.progressed > 1.0
        self.stall = judged(read, now, busy=stands and self._computes(read, now), stopped=stands and self._stopped())
        return self.stall

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self._page, self._stacks):
            if descriptor >= 0:
                os.close(descriptor)
        self._page = self._stacks = -1

    def _computes(self, heartbeat: Heartbeat, now: float) -> bool:
        """Whether the thread used half a core since this stall was first seen."""
        used = self._used(heartbeat, now)
        if self._cpu is None or self._cpu[0] != heartbeat.progress:
            self._cpu, self._busy = (heartbeat.progress, now, used), False
        elif now - self._cpu[1] > 1.0:
            self._busy = used - self._cpu[2] > BUSY_SHARE * (now - self._cpu[1])
        return self._busy

    def _used(self, heartbeat: Heartbeat, now: float) -> float:
        """CPU seconds of the thread that trains: by the kernel where it can be asked, else by the page."""
        try:
            text = Path(f"/proc/{self.process}/task/{heartbeat.thread}/schedstat").read_text()
            return int(text.split()[0]) * 1e-9
        except (OSError, ValueError, IndexError):  # in a container of its own
            return heartbeat.cpu

    def _stopped(self) -> bool:
        """Whether the process is stopped, or traced."""
        try:
            return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
        except (OSError, IndexError):
            return False
