"""The command and all its descendant processes.

torchrun starts each rank in a session of its own, and loaders and compilers have workers: neither a process group nor a
session holds a whole job. This process adopts each process that loses its parent (PR_SET_CHILD_SUBREAPER), so that the
job is all descendants of this process. Sentinel's own daemon is left out: it reports how the job ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE_SECONDS = 15.0
"""Seconds between SIGTERM and SIGKILL, enough for a last checkpoint. Slurm gives 30 s in all (KillWait)."""
KILLED_SECONDS = 5.0
"""Seconds for the kernel to remove a killed process; one in uninterruptible sleep takes longer, and is left to it."""
HELPERS_SECONDS = 2.0
"""Seconds for the keepers of shared memory to remove what killed processes have left."""
_LOOK_SECONDS = 0.05
_HELPERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Keepers of shared memory: they ignore SIGTERM, and exit by themselves after the processes they serve."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class _Process(NamedTuple):
    pid: int
    started: str
    """Start time in clock ticks, which tells the process from a later one with the same pid."""
    words: list[bytes]


class Job:
    """One start of the command. Linux only."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], mask: Collection[int]) -> None:
        """Start the command, with the signal mask `mask`. Raises OSError where it cannot be started.

        At a terminal it shares this process' group, so that the terminal's keys reach it and it may read what is typed;
        elsewhere it has its own group, and gets signals from this process alone.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.shares_group = _in_foreground()

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # a killed supervisor leaves no job behind
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        group = None if self.shares_group else 0
        try:
            self._process = subprocess.Popen(
                list(command), env=dict(environment), process_group=group, preexec_fn=prepare
            )
        except OSError:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # there is no job: undo the setting
            raise
        self.status: int | None = None
        """The command's exit status, or a signal's number, negative; None until it has ended."""

    def reap(self) -> int | None:
        """Reap the processes that have ended. Returns the command's status, once it has one."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._process.pid:
                    self.status = self._process.returncode = os.waitstatus_to_exitcode(status)
        return self.status

    def signal(self, number: int) -> None:
        """Signal the command alone, as if this process did not exist."""
        if self.reap() is None:
            os.kill(self._process.pid, number)

    def end(self, grace: float = GRACE_SECONDS) -> None:
        """End all processes of the job: SIGTERM, and SIGKILL after `grace` seconds."""
        for number, seconds, spared in (
            (signal.SIGTERM, grace, ()),
            (signal.SIGKILL, KILLED_SECONDS, _HELPERS),
            (signal.SIGTERM, HELPERS_SECONDS, ()),
            (signal.SIGKILL, KILLED_SECONDS, ()),
        ):
            if self._signal_all(number, time.monotonic() + seconds, spared):
                return

    def _signal_all(self, number: int, until: float, spared: tuple[bytes, ...]) -> bool:
        """Signal each process but those spared once, also new ones, until none is left or the time `until` has come.
        Returns whether the job has no process left; False where some are spared."""
        told: set[tuple[int, str]] = set()
        while True:
            self.reap()
            try:
                # Twice: new ones may have started while /proc was read.
                left = _but(spared, members()) or _but(spared, members())
            except OSError:  # no descriptor is left: which processes there are is not known yet
                left = None
            if left == [] and not spared:
                return True
            if left == [] or time.monotonic() > until:
                return False
            for process in left or ():
                if (process.pid, process.started) not in told:
                    told.add((process.pid, process.started))
                    _send(process.pid, number)
            time.sleep(_LOOK_SECONDS)


def members() -> list[_Process]:
    """Return the living descendants of this process, without Sentinel's daemons and their descendants. Raises OSError
    where /proc cannot be read."""
    children: dict[int, list[_Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _read(Path("/proc") / entry)) is not None:
            children.setdefault(found[0], []).append(found[1])
    return list(_below(os.getpid(), children))


def count_launched_nodes(wanted: int) -> int | None:
    """Return how many nodes the job of the local ranks has, if each node has as many ranks as this one; None: no
    torchrun that wants `wanted` nodes has started ranks here yet."""
    try:
        processes = members()
    except OSError:
        return None
    for process in processes:
        with contextlib.suppress(OSError, KeyError, ValueError):
            words = (Path("/proc") / str(process.pid) / "environ").read_bytes().split(b"\0")
            said = dict(word.partition(b"=")[::2] for word in words)
            if b"TORCHELASTIC_RUN_ID" in said and int(said[b"GROUP_WORLD_SIZE"]) == wanted:
                return -(-int(said[b"WORLD_SIZE"]) // int(said[b"LOCAL_WORLD_SIZE"]))
    return None


def _but(spared: tuple[bytes, ...], processes: list[_Process]) -> list[_Process]:
    return [process for process in processes if not any(name in word for name in spared for word in process.words)]


def _below(pid: int, children: Mapping[int, list[_Process]]) -> Iterator[_Process]:
    for child in children.get(pid, ()):
        if not _is_daemon(child.words):
            yield child
            yield from _below(child.pid, children)


def _read(folder: Path) -> tuple[int, _Process] | None:
    """Return (parent's pid, process); None if it has ended, reaped or not. Raises OSError where it cannot be read."""
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), _Process(int(folder.name), fields[19], words))


def _is_daemon(words: list[bytes]) -> bool:
    return b"sentinel" in words and words[words.index(b"sentinel") + 1 :][:1] == [b"daemon"]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)  # a stopped process would not handle it


def _in_foreground() -> bool:
    """Whether there is a terminal, and its keys reach this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
