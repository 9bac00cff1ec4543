"""Format the stacks of a case for people: the training thread first, with the user's own code marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sentinel.diagnose.standstill.stacks import StackFrame, Thread, threads

RANKS = 8
FRAMES = 25
"""Most innermost frames of the training thread, and the user's beyond them; of other threads only the innermost frame
and the user's code that called it."""


def format_stacks(stacks: Mapping[str, str]) -> str:
    """Return a block per rank; empty without stacks. `>` marks the innermost frame of the user's own code."""
    blocks = [block for rank, dump in list(stacks.items())[:RANKS] for block in _rank(rank, threads(dump))]
    if len(stacks) > RANKS:
        blocks.append(f"\n  {len(stacks) - RANKS} more ranks: see --json")
    return "\n" + "\n".join(blocks) if blocks else ""


def _rank(rank: str, found: list[Thread]) -> Iterator[str]:
    if not found:
        return
    training, *others = found
    yield f"\n  stack of rank {rank}, the innermost call first"
    shown, rest = training.frames[:FRAMES], training.frames[FRAMES:]
    yield from (_mark(frame, training.users) for frame in shown)
    if rest:
        yield f"    {len(rest)} more"
    if training.users in rest:
        yield _mark(training.users, training.users)
    if any(not thread.ours for thread in others):
        yield "\n  its other threads"
    for thread in others:
        if thread.frames and not thread.ours:
            yield f"    {thread.name + ': ' if thread.name else ''}{_locate(thread)}"


def _mark(frame: StackFrame, users: StackFrame | None) -> str:
    return f"  {'>' if frame is users else ' '} {_line(frame)}"


def _locate(thread: Thread) -> str:
    inner, own = thread.frames[0], thread.users
    return _line(inner) if own in (None, inner) else f"{_line(inner)}\n      for {_line(own or inner)}"


def _line(frame: StackFrame) -> str:
    """Return a frame's line; file and line number come first and stay whole, to be copied."""
    return f"{frame.file}:{frame.line}  {frame.function}"
