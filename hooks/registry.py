"""The watches of this process: who watches which optimizer, and what happens to them at fork and at the end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import types

from sentinel import wire
from sentinel.hooks import faults
from sentinel.hooks.identity import in_notebook, printable
from sentinel.hooks.watch import Watch

GOODBYE_SECONDS = 2.0
"""How long the end of the process waits at most for the daemon to take what is queued."""

_watches: list[Watch] = []
_made = 0
_prepared = False


def add(watch: Watch) -> None:
    """Keep a watch until it ends."""
    global _made, _prepared
    if not _prepared:
        _prepared = True
        atexit.register(_leave)
        os.register_at_fork(before=_halt, after_in_child=_abandon)
    _made += 1
    _watches.append(watch)


def made() -> int:
    """How many watches this process has had."""
    return _made


def of(optimizers: list[object]) -> Watch | None:
    """The live watch over one of these optimizers."""
    return next((watch for watch in _watches if not watch.ended and any(map(watch.watches, optimizers))), None)


def let_go_of_the_dead(names: dict[str, object]) -> None:
    """End the watches that nobody can mean any more, before a new one begins.

    Those whose optimizers are gone, some of which the collector has yet to find. In a notebook also those whose
    optimizers `names`, its variables, do not hold any longer: IPython keeps old results and tracebacks alive.
    """
    for watch in _watches:
        if watch.ended:
            watch.unhook()
    _watches[:] = [watch for watch in _watches if not watch.ended]
    if not _watches:
        return
    gc.collect()
    for watch in _watches:
        if not watch.streams or (interactive() and not _is_named(watch, names)):
            end(watch)


def end(watch: Watch) -> None:
    """End a watch because a new one takes its place."""
    faults.say(f"run {watch.who.name!r} is watched no more")
    watch.end(wire.Goodbye(reason="detach", next_seq=watch.next_seq), GOODBYE_SECONDS)


def take_over(watch: Watch) -> None:
    """End a watch that nobody asked for: the next one goes on with its run."""
    global _made
    faults.say(f"run {watch.who.name!r}: the script's own attach takes over")
    watch.end(wire.Goodbye(reason="detach", next_seq=watch.next_seq), GOODBYE_SECONDS)
    _made -= 1


def interactive() -> bool:
    """Whether a person types: a notebook or a prompt."""
    return hasattr(sys, "ps1") or in_notebook()


def _is_named(watch: Watch, names: dict[str, object]) -> bool:
    held: list[object] = []
    for value in list(names.values()):
        held += value if isinstance(value, list | tuple) else [value]
        held += value.values() if isinstance(value, dict) else []
        held += vars(value).values() if isinstance(value, types.SimpleNamespace) else []
    return any(map(watch.watches, held))


def _leave() -> None:
    """The process ends."""
    # The interpreter sets these before it prints a traceback; at a prompt they may be of hours ago.
    error = getattr(sys, "last_value", None) if not interactive() else None
    for watch in _watches:
        if not watch.ended:
            with faults.shielded("the end of the process", "without a goodbye"):
                watch.end(_goodbye(watch, error), GOODBYE_SECONDS)


def _goodbye(watch: Watch, error: BaseException | None) -> wire.Goodbye:
    seq = watch.next_seq
    if watch.stopped:
        return wire.Goodbye(reason="stopped", next_seq=seq, detail=watch.stopped)
    if error is None:
        return wire.Goodbye(reason="exit", next_seq=seq)
    watch.failed(error, backward=False)
    return wire.Goodbye(reason="exception", next_seq=seq, detail=_words(error))


def _words(error: BaseException) -> str:
    try:
        return printable(f"{type(error).__name__}: {error}".split("\n")[0][:200])
    except Exception:  # of its own __str__
        return type(error).__name__


def _halt() -> None:
    for watch in _watches:
        watch.sender.halt()


def _abandon() -> None:
    for watch in _watches:
        watch.abandon()
    _watches.clear()
