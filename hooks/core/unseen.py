"""Records by name what a run does not see: for now, while the machine is short of resources, or for good after a fault.

    passing error   EMFILE, ENOMEM, a failed allocation, no thread: the sample is left out and counted, and so are the
                    next ones during a pause that doubles each time; then it is tried again
    other fault     the part that raised is switched off; or it goes on, where its samples do not depend on each other

Each is reported once on the terminal, and in the hello message as long as it holds: from there it comes to status,
metrics and history. Before training, what fails is tried again for a minute (`Retry`).
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sentinel.hooks.core import fault_guard

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 8.0
"""Shortest and longest pause between two tries after a passing error, in seconds."""
_LETTERS = 120
"""Most characters of an error's text that are reported."""


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

        `what` names what is not seen because of it; `where` and `consequence` are for the log (`fault_guard.swallow`).
        Raises the exception again where a signal handler of the user's raised it.
        """
        error = sys.exception()
        assert error is not None
        fault_guard.let_through(error)
        if not is_passing(error):
            self.lose(what, f"internal fault: {fault_guard.describe(error)[:_LETTERS]}")
            fault_guard.swallow(where, consequence)
            return True
        self.skipped += 1
        seconds = min(2 * self._pauses[what][0], LONGEST_PAUSE) if what in self._pauses else FIRST_PAUSE
        self._pauses[what] = seconds, time.monotonic() + seconds
        words = fault_guard.describe(error)[:_LETTERS]
        if what not in self._said:
            self._said.add(what)
            fault_guard.say(f"not seen for now: {what} ({words}); training goes on, and it is tried again")
        self._tell(what, f"{what}, for now: {words}")
        return False

    def swallow(self, what: str, where: str, consequence: str) -> None:
        """Swallow the exception being handled, in code that goes on whatever it is. A passing error is counted and
        reported (then call `recover` at the next success); any other fault is logged once."""
        error = sys.exception()
        if error is not None and is_passing(error):
            self.record_failure(what, where, consequence)
        else:
            fault_guard.swallow(where, consequence)

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
        self._tell(what, f"{what} ({reason})")

    def is_paused(self, what: str) -> bool:
        """Whether `what` is in a pause, and must not be tried yet."""
        return what in self._pauses and time.monotonic() < self._pauses[what][1]

    def skip(self) -> None:
        """Count a sample that is left out in a pause."""
        self.skipped += 1

    def restore(self, what: str) -> None:
        """Record that `what` is seen again, if it was not."""
        self._pauses.pop(what, None)
        self._tell(what, "")

    def _tell(self, what: str, text: str) -> None:
        if self._texts.get(what, "") == text:
            return
        if text:
            self._texts[what] = text
        else:
            del self._texts[what]
        self.changed()


RETRY_SECONDS = 60.0
"""Seconds for which a read that fails is tried again before training: a file server that is away comes back."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0
_NUMBERS = frozenset(
    {
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT, errno.EINTR
    }
)  # fmt: skip
_NO_MEMORY = ("can't allocate memory", "out of memory")
"""Texts of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), of CUDA's driver and of MPS."""
_NO_THREAD = "can't start new thread"
"""Text of the RuntimeError that Python makes of EAGAIN when it starts a thread."""


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
        self._pause = _FIRST_PAUSE_SECONDS

    @property
    def over(self) -> bool:
        """Whether it was tried for `RETRY_SECONDS`."""
        return self._begun is not None and time.monotonic() - self._begun > RETRY_SECONDS

    def pause(self) -> None:
        """Wait until the next try."""
        if self._begun is None:
            self._begun = time.monotonic()
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
