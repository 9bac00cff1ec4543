"""How the process of a rank ended, read from the kernel.

A process that has ended is a zombie until its parent asks for its exit status; torchrun asks ten times a second. Until
then /proc/<pid>/stat has the status (proc(5), field 52), readable by a process that may trace it. Afterwards the pidfd
has it, from Linux 6.15 on (PIDFD_GET_INFO, include/uapi/linux/pidfd.h). Kills for lack of memory are counted by the
cgroup of the process (memory.events in v2, memory.oom_control in v1: `oom_kill`).
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from sentinel.daemon.ranks.cgroups import file_of
from sentinel.runs import Ending

_COUNTERS = (("", "memory.events"), ("memory", "memory.oom_control"))
"""Controller and file that count kills for lack of memory, of cgroup v2 and v1."""
_INFO = struct.Struct("<Q52xi")
"""struct pidfd_info: its mask first, its exit code last."""
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)"""


class ExitStatuses:
    """Finds out how the processes of one attempt ended."""

    def __init__(self) -> None:
        self._kills: dict[int, tuple[Path, int]] = {}

    def watch_process(self, process: int) -> None:
        """Remember what a new process' cgroup has counted before it: those kills are not its own."""
        if process and (counter := file_of(process, _COUNTERS)) is not None:
            self._kills[process] = counter, _kills(counter)

    def explain_ending(self, process: int, status: int | None, now: float) -> Ending:
        """Return how a process that has ended at this moment ended. `status`: its exit status, if known."""
        counter, before = self._kills.pop(process, (None, 0))
        return Ending(now, status, counter is not None and _kills(counter) > before)


def has_ended(process: int) -> bool:
    """Whether a process of this node has ended, reaped or not."""
    try:
        return _stat(process)[0] in "ZX"
    except FileNotFoundError:
        return True
    except (OSError, IndexError):
        return False


def exit_status(process: int, descriptor: int) -> int | None:
    """Return the exit status of a process that has ended; a signal is negative, as in `subprocess`.

    `descriptor`: its pidfd. None if its launcher was quicker, on older kernels, and for a process in another container.
    """
    try:
        state, *_, raw = _stat(process)
        if state in "ZX":
            return os.waitstatus_to_exitcode(int(raw))
    except (OSError, ValueError):
        pass
    info = bytearray(_INFO.size)
    _INFO.pack_into(info, 0, _INFO_EXIT, 0)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    known, code = _INFO.unpack(info)
    return os.waitstatus_to_exitcode(code) if known & _INFO_EXIT else None


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _kills(counter: Path) -> int:
    try:
        counts = dict(line.split() for line in counter.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
