"""Dumps of stacks, as faulthandler writes them, read: which thread, in which functions, at which lines.

Thread 0x00007f3c (most recent call first):
  File "/home/me/train.py", line 12 in main
"""

from __future__ import annotations

import re

import msgspec

SHOWN = 25
"""Frames of a thread that are kept."""
THREADS = 64

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python3[^/]*)/|^<frozen |/sentinel/hooks/|/hooks/")


class Frame(msgspec.Struct, frozen=True):
    """One function that is being run."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def users(self) -> bool:
        """Whether it is of nobody's library."""
        return _LIBRARY.search(self.file) is None


class Thread(msgspec.Struct, frozen=True):
    """One thread's stack, the innermost function first."""

    ident: int
    name: str
    frames: tuple[Frame, ...]

    @property
    def users(self) -> Frame | None:
        """The innermost function of the user's own: where to look."""
        return next((frame for frame in self.frames if frame.users), None)


def threads(dump: str) -> list[Thread]:
    """Those of the last dump in a text; what is cut off is left out. The timer's dumps have a head line each."""
    found: list[tuple[int, str, list[Frame]]] = []
    seen: set[int] = set()
    for line in dump.rpartition("\nTimeout (")[2].splitlines():
        if (head := _THREAD.match(line)) is not None:
            ident = int(head[1], 16)
            if ident in seen:  # another dump begins
                found, seen = [], set()
            seen.add(ident)
            found.append((ident, head[2] or "", []))
        elif found and (frame := _FRAME.match(line)) is not None:
            number = int(frame[2]) if frame[2].isdigit() else 0
            if len(found[-1][2]) < SHOWN:
                found[-1][2].append(Frame(frame[1], number, frame[3]))
    return [Thread(ident, name, tuple(frames)) for ident, name, frames in found[:THREADS]]
