"""Read stack dumps as faulthandler writes them: which thread, in which functions, at which lines.

Thread 0x00007f3c (most recent call first):
  File "/home/me/train.py", line 12 in main
"""

from __future__ import annotations

import importlib.util
import re

import msgspec

from sentinel.runs import Rank

LOADER = ("torch/utils/data/dataloader.py",)
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
DEEPEST = 100
"""Frames of a thread that are kept: as many as faulthandler writes. A framework may have forty between the innermost
function and the user's."""
THREADS = 64

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python3[^/]*)/|^<(?:frozen |eval_with_key)")
_KNOWN = re.compile(r"/(?:torch|torchvision|transformers|lightning|pytorch_lightning|accelerate|deepspeed|numpy)/")
_INSTALLED = re.compile(r"/(?:site-packages|dist-packages)/")


def _own() -> tuple[str, ...]:
    """Return the folders of Sentinel's code on the stacks of a training process: the hooks, and the launcher of
    `sentinel run`."""
    specs = filter(None, map(importlib.util.find_spec, ("sentinel.hooks", "sentinel.launch")))
    return tuple(f"{folder}/" for spec in specs for folder in spec.submodule_search_locations or ())


_OWN = _own()


class StackFrame(msgspec.Struct, frozen=True):
    """One function that is being run."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def users(self) -> bool:
        """Whether it is user code, not a library's."""
        return _LIBRARY.search(self.file) is None and not self.file.startswith(_OWN)

    @property
    def installed(self) -> bool:
        """Whether it is from an installed package that is none of the usual ones: a project's own."""
        packaged = _INSTALLED.search(self.file) is not None and _KNOWN.search(self.file) is None
        return packaged and not self.file.startswith(_OWN)


class Thread(msgspec.Struct, frozen=True):
    """One thread's stack, the innermost function first."""

    ident: int
    name: str
    frames: tuple[StackFrame, ...]

    def __str__(self) -> str:
        name = f" [{self.name}]" if self.name else ""
        head = f"Thread 0x{self.ident:016x}{name} (most recent call first):"
        return "\n".join(
            [head, *(f'  File "{each.file}", line {each.line} in {each.function}' for each in self.frames)]
        )

    @property
    def ours(self) -> bool:
        """Whether it is the sender."""
        return any(frame.file.startswith(_OWN) for frame in self.frames)

    @property
    def users(self) -> StackFrame | None:
        """The innermost function of the user's own code: where to look."""
        own = (frame for frame in self.frames if frame.users)
        return next(own, None) or next((frame for frame in self.frames if frame.installed), None)

    def stands_in(self, files: tuple[str, ...]) -> bool:
        """Return whether a frame before the first of the user's, from the innermost on, is in one of these files."""
        own = next((index for index, frame in enumerate(self.frames) if frame.users), len(self.frames))
        return any(file in frame.file for frame in self.frames[:own] for file in files)


def threads(dump: str) -> list[Thread]:
    """Return the threads of the last dump in a text; cut-off parts are left out. Each dump of the timer has a head
    line."""
    found: list[tuple[int, str, list[StackFrame]]] = []
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
            if len(found[-1][2]) < DEEPEST:
                found[-1][2].append(StackFrame(frame[1], number, frame[3]))
    return [Thread(ident, name, tuple(frames)) for ident, name, frames in found[:THREADS]]


def training(dump: str, ident: int) -> Thread | None:
    """Return the training thread in the last dump; where it is not known, the last one, which is the main thread."""
    found = threads(dump)
    return next((thread for thread in found if thread.ident == ident), found[-1] if found else None)


def find_place(rank: Rank) -> str:
    """Return where the user's code of a rank stood, by the last dump of its stacks: `file:line in function`. Empty
    where there is no dump."""
    thread = training(rank.dump, rank.heartbeat.ident if rank.heartbeat is not None else 0)
    place = thread and thread.users
    return str(place) if place else ""


def arrange_dump(dump: str, ident: int) -> str:
    """Return the last dump in a text, with one thread first."""
    found = sorted(threads(dump), key=lambda thread: thread.ident != ident)
    return "\n\n".join(str(thread) for thread in found)
