"""The heartbeat page: what a training process shows of itself even while it cannot send messages.

An anonymous file in memory (memfd), handed to the daemon with the first bytes of the connection (SCM_RIGHTS): no name,
so nothing is left behind. The sender's thread writes it several times a second. A process that holds the GIL stops
writing, and that is what the daemon then sees; what was written last stays readable.

The page is one struct, little-endian. Times are CLOCK_MONOTONIC, which all processes of a node share. `beat` stands at
both ends: a reader that finds two different ones has read while it was written, and reads again.
"""

from __future__ import annotations

import enum
import os
import signal
import stat
import struct
from typing import NamedTuple

VERSION = 1
PAGE = "sentinel-heartbeat"
STACKS = "sentinel-stacks"
"""Names of the two files in memory, as /proc/<pid>/fd shows them. The second receives the dumps of all threads'
stacks."""

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else 0
"""The signal that asks for a dump. SIGUSR1 and SIGUSR2 are the user's, and schedulers send them before they requeue."""

BEAT_SECONDS = 5.0
"""Seconds without a beat after which the watchdog, which beats ten times a second, is taken not to get the GIL."""

_LAYOUT = struct.Struct("<q d q d q q q q d d q q d q d")
SIZE = _LAYOUT.size
BLANK = bytes(SIZE)
"""A page that is not written yet, or no longer written. It says nothing about the process."""


class Place(enum.IntEnum):
    """Where the training thread is, as far as its stack shows after progress has stopped."""

    UNKNOWN = 0
    """Not looked at, as it progresses or did a moment ago; or it has taken no step yet."""
    LOOP = 1
    """Inside the training loop."""
    LEFT = 2
    """Outside the training loop: the loop has ended, or a notebook is idle."""
    LONG = 3
    """In code that is known to take long: compiling, writing or reading a checkpoint, exporting, sending files; or
    waiting for a thread that does so."""
    DEBUGGER = 4
    """Stopped in a debugger."""
    AWAITS = 5
    """Inside the loop, in a sleep, or waiting for another thread, a future or a process, which may be working."""


class Work(enum.IntEnum):
    """What made progress last."""

    NONE = 0
    STEP = 1
    BATCH = 2
    """A DataLoader gave a batch."""
    FORWARD = 3
    BACKWARD = 4
    LOG = 5
    """`monitor.log` was called."""


class Heartbeat(NamedTuple):
    """The values of the page."""

    beat: float
    progress: int
    """Number of forward passes, backward passes, batches and steps so far."""
    progressed: float
    """When `progress` rose last, to half a second; or when the thread came back into the loop."""
    steps: int
    work: int
    place: int
    paused: int
    """1 in a phase that the loop declared (`monitor.phase`)."""
    longest: float
    """Longest time in seconds, from the second step on, for which it has stood still in the loop and then gone on."""
    cpu: float
    """Seconds for which the training thread ran, or waited for a core."""
    thread: int
    """Native id of the training thread (gettid)."""
    ident: int
    """Id of the training thread in a dump of stacks (pthread_self)."""
    moved: float
    """When the stack was last different from that at the look before, if that was after the last progress; else 0."""
    signal: int
    """Number of the signal that makes the process dump its stacks; 0: other code handles that signal."""


class Kind(enum.StrEnum):
    """What a rank does while it makes no progress."""

    NONE = ""
    BLOCKED = "waits, and uses no processor"
    BUSY = "computes, always in the same place"
    MOVING = "does something else in the loop"
    LONG = "is in a checkpoint, a compiler, an export or other output"
    HOLDING = "holds the GIL"
    STARTING = "has not come through its first two steps"


class Stall(NamedTuple):
    """The verdict on a rank's heartbeat at one moment."""

    seconds: float = 0.0
    """Seconds in one place, where the loop should make progress."""
    limit: float = 0.0
    """Seconds that this may last."""
    kind: Kind = Kind.NONE
    quiet: float = 0.0
    """Seconds without progress, whether any is expected or not."""


def pack_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Return the bytes of the page."""
    return _LAYOUT.pack(
        VERSION, heartbeat.beat, heartbeat.progress, heartbeat.progressed, heartbeat.steps, heartbeat.work,
        heartbeat.place, heartbeat.paused, heartbeat.longest, heartbeat.cpu, heartbeat.thread, heartbeat.ident,
        heartbeat.moved, heartbeat.signal, heartbeat.beat,
    )  # fmt: skip


def unpack_heartbeat(page: bytes) -> Heartbeat | None:
    """Return the page's values; None where another version wrote it, or it was cut, or read while it was written."""
    if len(page) != SIZE:
        return None
    version, *words, again = _LAYOUT.unpack(page)
    return Heartbeat(*words) if version == VERSION and words[0] == again else None


def is_ours(descriptor: int, name: str) -> bool:
    """Return whether a descriptor from a peer is a memory file of this name. Reading anything else could block, or
    reveal another user's file."""
    try:
        kind = os.fstat(descriptor).st_mode
        return stat.S_ISREG(kind) and os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{name} ")
    except OSError:
        return False
