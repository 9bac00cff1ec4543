"""The sessions of this process: which one watches an optimizer, and what happens to them at fork and at the end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import types
from collections.abc import Sequence

from sentinel import wire
from sentinel.hooks.core import faults
from sentinel.hooks.core.identity import in_notebook, printable
from sentinel.hooks.session.session import GOODBYE_SECONDS, RunSession

sessions: list[RunSession] = []
"""The sessions, the newest last; ended ones stay until the next one begins."""
_made = 0
_prepared = False


def add(session: RunSession) -> None:
    """Keep a session until it ends."""
    global _made, _prepared
    if not _prepared:
        _prepared = True
        atexit.register(leave)
        os.register_at_fork(before=_halt, after_in_child=_abandon)
    _made += 1
    sessions.append(session)


def count_sessions() -> int:
    """Return how many sessions this process has had."""
    return _made


def find_session(optimizers: Sequence[object]) -> RunSession | None:
    """Return the live session that watches one of these optimizers; None if there is none."""
    return next((session for session in sessions if not session.ended and any(map(session.watches, optimizers))), None)


def let_go_of_the_dead(names: dict[str, object]) -> None:
    """End the sessions that can no longer be used, before a new one begins.

    These are sessions whose optimizers are gone, some of which the garbage collector has yet to find. In a notebook
    they include those whose optimizers `names`, its variables, no longer hold: IPython keeps old results and tracebacks
    alive.
    """
    for session in sessions:
        if session.ended:
            session.unhook()
            session.say_closing()
    sessions[:] = [session for session in sessions if not session.ended]
    if not sessions:
        return
    gc.collect()
    for session in sessions:
        if not session.monitors or (interactive() and not _is_named(session, names)):
            end(session)


def end(session: RunSession, why: str = " is watched no more") -> None:
    """End a session before the process ends: a new one takes its place."""
    faults.say(f"run {session.who.name!r}{why}")
    session.end(wire.Goodbye(reason="detach", next_seq=session.next_seq), GOODBYE_SECONDS)


def take_over(session: RunSession) -> None:
    """End a session that was attached automatically: the next one goes on with its run."""
    global _made
    end(session, ": the script's own attach takes over")
    _made -= 1


def succeed(session: RunSession, heir: object) -> None:
    """End a session whose optimizer steps no more because `heir` trains its model, which another session watches."""
    instead = "in a run of its own" if find_session([heir]) is not None else "and is watched in its place"
    end(session, f": its optimizer steps no more; {type(heir).__name__} trains the model, {instead}")


def interactive() -> bool:
    """Whether a person types: in a notebook or at a prompt."""
    return hasattr(sys, "ps1") or in_notebook()


def _is_named(session: RunSession, names: dict[str, object]) -> bool:
    held: list[object] = []
    for value in list(names.values()):
        held += value if isinstance(value, list | tuple) else [value]
        held += value.values() if isinstance(value, dict) else []
        held += vars(value).values() if isinstance(value, types.SimpleNamespace) else []
    return any(map(session.watches, held))


def leave() -> None:
    """Say goodbye for all sessions as the process ends."""
    # The interpreter sets `last_value` before it prints a traceback; at a prompt it may be hours old.
    error = getattr(sys, "last_value", None) if not interactive() else None
    for session in sessions:
        with faults.swallow_faults("the end of the process", "without a goodbye"):
            if session.ended:
                session.say_closing()
            else:
                session.leave(_goodbye(session, error), GOODBYE_SECONDS)


def _goodbye(session: RunSession, error: BaseException | None) -> wire.Goodbye:
    seq = session.next_seq
    if (stop := session.stopped) is not None:
        return session.make_goodbye(stop)
    if error is None:
        return wire.Goodbye(reason="exit", next_seq=seq)
    session.report_failure(error, backward=False)
    return wire.Goodbye(reason="exception", next_seq=seq, detail=printable(faults.describe(error)[:200]))


def _halt() -> None:
    for session in sessions:
        session.sender.halt()


def _abandon() -> None:
    for session in sessions:
        session.abandon()
    sessions.clear()
