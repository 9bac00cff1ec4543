"""Keeps Sentinel's own faults out of the user's way, and records by name what a run does not see because of them.

    a sample or a part of a run is left out   `Unseen`, which the run has: status, metrics and history show it
    a part that raised is switched off        `Unseen.record_failure`: its result says whether to
    anything else, or no run is there yet     `swallow`, or around a block `swallow_faults`: logged once

`Unseen` tells two kinds of faults apart:

    passing error   EMFILE, ENOMEM, a failed allocation, no thread: the sample is left out and counted, and so are the
                    next ones during a pause that doubles each time; then it is tried again
    other fault     the part that raised is switched off; or it goes on, where its samples do not depend on each other

Each is reported once on the terminal, and in the hello message as long as it holds. Before training, what fails is
tried again for a minute (`Retry`). `say` is the only way to print a line for the person at the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType

import torch

from sentinel.text import write_lines

log = logging.getLogger(__name__)

_logged: set[str] = set()

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 8.0
"""Shortest and longest pause between two tries after a passing error, in seconds."""
_LETTERS = 120
"""Most characters of an error's text that are reported."""
RETRY_SECONDS = 60.0
"""Seconds for which a read that fails is tried again before training: a file server that is away comes back."""
_RETRY_PAUSE, _LONGEST_RETRY_PAUSE = 0.05, 2.0
_NUMBERS = frozenset(
    {
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT, errno.EINTR
    }
)  # fmt: skip
_NO_MEMORY = ("can't allocate memory", "out of memory")
"""Texts of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), of CUDA's driver and of MPS."""
_NO_THREAD = "can't start new thread"
"""Text of the RuntimeError that Python makes of EAGAIN when it starts a thread."""


def swallow(where: str, consequence: str) -> None:
    """Log the exception being handled, once for each `where`. `consequence` says what the user does without.

    Raises the exception again where a signal handler of the user's raised it."""
    error = sys.exception()
    if error is not None:
        let_through(error)
    if where not in _logged:
        _logged.add(where)
        with contextlib.suppress(Exception):  # raised by a log handler of the user's
            log.warning("sentinel: internal fault in %s; training goes on, %s", where, consequence, exc_info=error)


@contextmanager
def swallow_faults(where: str, consequence: str) -> Iterator[None]:
    """Swallow what the block raises. Off the hot path: entering costs a microsecond."""
    try:
        yield
    except Exception:
        swallow(where, consequence)


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


class Unseen:
    """What one run does not see. Used on any thread, but each name only on one of them."""

    def __init__(self) -> None:
        self.skipped = 0
        """Number of samples that were left out for passing errors."""
        self.changed: Callable[[], None] = lambda: None
        """Called when `texts` has changed."""
        self._texts: dict[str, str] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        """Name -> (seconds of the pause, monotonic time of its end) of what is tried again."""
        self._said: set[str] = set()

    @property
    def texts(self) -> tuple[str, ...]:
        """What is not seen at present, and why."""
        return tuple(dict(self._texts).values())

    @property
    def pausing(self) -> bool:
        """Whether anything is paused, to be tried again: at nearly every step nothing is."""
        return bool(self._pauses)

    def record_failure(self, what: str, where: str, consequence: str) -> bool:
        """Record the exception being handled; return whether it is a permanent fault rather than a passing one.

        `what` names what is not seen because of it; `where` and `consequence` are for the log (`swallow`).
        Raises the exception again where a signal handler of the user's raised it.
        """
        error = sys.exception()
        assert error is not None
        let_through(error)
        if not is_passing(error):
            self.lose(what, f"internal fault: {describe(error)[:_LETTERS]}")
            swallow(where, consequence)
            return True
        self.skipped += 1
        seconds = min(2 * self._pauses[what][0], LONGEST_PAUSE) if what in self._pauses else FIRST_PAUSE
        self._pauses[what] = seconds, time.monotonic() + seconds
        words = describe(error)[:_LETTERS]
        if what not in self._said:
            self._said.add(what)
            say(f"not seen for now: {what} ({words}); training goes on, and it is tried again")
        self._set_text(what, f"{what}, for now: {words}")
        return False

    def swallow(self, what: str, where: str, consequence: str) -> None:
        """Swallow the exception being handled, in code that goes on whatever it is. A passing error is counted and
        reported (then call `recover` at the next success); any other fault is logged once."""
        error = sys.exception()
        if error is not None and is_passing(error):
            self.record_failure(what, where, consequence)
        else:
            swallow(where, consequence)

    def recover(self, what: str) -> None:
        """Record a success of `what`, which ends a pause after a passing error."""
        if what in self._pauses:
            self.restore(what)

    @contextmanager
    def swallow_faults(self, what: str, consequence: str) -> Iterator[None]:
        """Call `swallow` for what the block raises, else `recover`. Off the hot path: entering costs a microsecond."""
        try:
            yield
        except Exception:
            self.swallow(what, what, consequence)
        else:
            self.recover(what)

    def lose(self, what: str, reason: str) -> None:
        """Record that `what` is no longer seen."""
        self._pauses.pop(what, None)
        self._set_text(what, f"{what} ({reason})")

    def is_paused(self, what: str) -> bool:
        """Whether `what` is in a pause, and must not be tried yet."""
        return what in self._pauses and time.monotonic() < self._pauses[what][1]

    def skip(self) -> None:
        """Count a sample that is left out in a pause."""
        self.skipped += 1

    def restore(self, what: str) -> None:
        """Record that `what` is seen again, if it was not."""
        self._pauses.pop(what, None)
        self._set_text(what, "")

    def _set_text(self, what: str, text: str) -> None:
        if self._texts.get(what, "") == text:
            return
        if text:
            self._texts[what] = text
        else:
            del self._texts[what]
        self.changed()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is a failed allocation."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later; also where such an error is the cause (of a RollbackError)."""
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    if is_out_of_memory(error) or (isinstance(error, RuntimeError) and _NO_THREAD in str(error)):
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


class Retry:
    """One operation that is tried again, with growing pauses. Its time counts from the first pause on: the time before
    may have been a wait for another rank."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._pause = _RETRY_PAUSE

    @property
    def over(self) -> bool:
        """Whether it was tried for `RETRY_SECONDS`."""
        return self._begun is not None and time.monotonic() - self._begun > RETRY_SECONDS

    def pause(self) -> None:
        """Wait until the next try."""
        if self._begun is None:
            self._begun = time.monotonic()
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_RETRY_PAUSE)


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
