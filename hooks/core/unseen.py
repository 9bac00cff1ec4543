"""What one run does not see, by name: for a moment, as the machine has nothing to spare, or for good after a fault.

    passing error   EMFILE, ENOMEM, a failed allocation: the sample is left out and counted, and the next ones too for a
                    pause that doubles; then it is tried again
    other fault     the part that raised is put out of action

Each is said once on the terminal, and told to the daemon by the hello for as long as it holds: status, metrics and
history have it from there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.passing_errors import is_passing

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 8.0
"""Seconds, between two tries of what failed for an error that passes."""
_LETTERS = 120
"""Of an error that are told."""


def _nothing() -> None:
    pass


class Unseen:
    """What one run does not see. On any thread, each name on one of them."""

    def __init__(self) -> None:
        self.skipped = 0
        """Samples that were left out for errors that passed."""
        self.changed: Callable[[], None] = _nothing
        """Called when there is something else to be told."""
        self._texts: dict[str, str] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        """Name -> (seconds, until when) of what is tried again."""
        self._said: set[str] = set()

    @property
    def texts(self) -> tuple[str, ...]:
        """What is not seen at present, and why."""
        return tuple(dict(self._texts).values())

    @property
    def pausing(self) -> bool:
        """Whether anything is tried again later: at nearly every step nothing is."""
        return bool(self._pauses)

    def record_failure(self, what: str, where: str, consequence: str) -> bool:
        """Take note of the exception that is being handled; whether it is a fault that lasts, and not one that passes.

        `what` is not seen for it, in words; `where` and `consequence` are for the log (see `faults.swallow`). Raises
        the exception again where a signal handler of the user's raised it.
        """
        error = sys.exception()
        assert error is not None
        fault_guard.let_through(error)
        if not is_passing(error):
            self.lose(what, f"internal fault: {_words(error)}")
            fault_guard.swallow(where, consequence)
            return True
        self.skipped += 1
        seconds = min(2 * self._pauses[what][0], LONGEST_PAUSE) if what in self._pauses else FIRST_PAUSE
        self._pauses[what] = seconds, time.monotonic() + seconds
        if what not in self._said:
            self._said.add(what)
            fault_guard.say(f"not seen for now: {what} ({_words(error)}); training goes on, and it is tried again")
        self._tell(what, f"{what}, for now: {_words(error)}")
        return False

    def lose(self, what: str, reason: str) -> None:
        """`what` is seen no more."""
        self._pauses.pop(what, None)
        self._tell(what, f"{what} ({reason})")

    def is_paused(self, what: str) -> bool:
        """Whether it is not to be tried again yet."""
        return what in self._pauses and time.monotonic() < self._pauses[what][1]

    def skip(self) -> None:
        """Count a sample that is left out in a pause."""
        self.skipped += 1

    def restore(self, what: str) -> None:
        """`what` was seen again, if it was not."""
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


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:_LETTERS]
    except Exception:  # of its own __str__
        return type(error).__name__
