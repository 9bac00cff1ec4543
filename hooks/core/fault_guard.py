"""Keeps Sentinel out of the user's way: our own faults are swallowed, the user's signals deferred.

Also the only way to print a line for the person at the terminal.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType

from sentinel.text import write_lines

log = logging.getLogger(__name__)

_told: set[str] = set()


def swallow(where: str, consequence: str) -> None:
    """Log the exception being handled, once for each `where`. `consequence` says what the user does without.

    Raises the exception again where a signal handler of the user's raised it."""
    error = sys.exception()
    if error is not None:
        let_through(error)
    if where not in _told:
        _told.add(where)
        with contextlib.suppress(Exception):  # raised by a log handler of the user's
            log.warning("sentinel: internal fault in %s; training goes on, %s", where, consequence, exc_info=error)


def let_through(error: BaseException) -> None:
    """Raise `error`, or the cause that it was raised from, again where a signal handler raised that. The signal came
    while our code ran, or code that it called; its exception is meant for the user's loop. An exception of the user's
    code that we called is not."""
    trace = error.__traceback__
    while trace is not None:
        if _handles_signal(trace.tb_frame):
            raise error
        trace = trace.tb_next
    if error.__cause__ is not None:
        let_through(error.__cause__)


def _handles_signal(frame: FrameType) -> bool:
    """Whether `frame` runs a signal handler: one that is in force, or a function that was called with a signal's number
    and a frame in sequence, as only handlers are. Its code may be in any library, and another handler in force now."""
    if any(getattr(signal.getsignal(one), "__code__", None) is frame.f_code for one in signal.valid_signals()):
        return True
    known = inspect.getargvalues(frame)
    values = [known.locals.get(name) for name in known.args]
    values += known.locals.get(known.varargs, ()) if known.varargs is not None else ()
    return any(
        isinstance(number, int) and isinstance(interrupted, FrameType) and number in signal.valid_signals()
        for number, interrupted in pairwise(values)
    )


@contextlib.contextmanager
def swallow_faults(where: str, consequence: str) -> Iterator[None]:
    """Swallow what the block raises. Off the hot path: entering costs a microsecond."""
    try:
        yield
    except Exception:
        swallow(where, consequence)


def describe(error: BaseException) -> str:
    """Return the error's class and, where it has any, the first line of its text."""
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # raised by the error's own __str__
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def say(text: str) -> None:
    """Print one line on stderr, apart from the run's own output. A closed stderr raises nothing."""
    write_lines(f"sentinel: {text}", sys.stderr)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Deliver signals that Python code handles after the block: their handlers may raise into whatever runs. Does
    nothing off the main thread, since only that one is ever interrupted."""
    handlers = {number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    came: dict[int, None] = {}  # in order of arrival, each once, as the system keeps pending signals
    try:
        for number in handlers:
            signal.signal(number, lambda which, _: came.setdefault(which))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for which in came:
            signal.raise_signal(which)
