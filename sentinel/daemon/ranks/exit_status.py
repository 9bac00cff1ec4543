"""How the process of a rank ended: asked of the kernel.

A process that has ended is a zombie until its parent asks for its exit status; torchrun does ten times a second. Until
then /proc/<pid>/stat has the status (proc(5), field 52), readable by a process that may trace it. Afterwards the
pidfd has it, from Linux 6.15 on (PIDFD_GET_INFO, include/uapi/linux/pidfd.h). Whether the kernel killed it for its
memory is counted by its cgroup (memory.events in v2, memory.oom_control in v1: `oom_kill`).
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from sentinel.daemon.ranks.cgroups import file_of
from sentinel.runs import Ending

_COUNTERS = (("", "memory.events"), ("memory", "memory.oom_control"))
"""Of cgroup v2 and v1: the controller, the file."""
_INFO = struct.Struct("<Q52xi")
"""struct pidfd_info: its mask first, its exit code last."""
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)"""


class ExitStatuses:
    """Those of one attempt's processes."""

    def __init__(self) -> None:
        self._kills: dict[int, tuple[Path, int]] = {}

    def watch_process(self, process: int) -> None:
        """A process is there: what its cgroup counts by now is not its own."""
        if process and (counter := file_of(process, _COUNTERS)) is not None:
            self._kills[process] = counter, _kills(counter)

    def explain_ending(self, process: int, status: int | None, now: float) -> Ending:
        """A process has ended this very moment."""
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
    """Of a process that has ended, by its pidfd, as `subprocess` has it: a signal is negative. None where its launcher
    was quicker, on older kernels, and in a container of its own."""
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
