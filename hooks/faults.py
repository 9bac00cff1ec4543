"""Our own faults, kept out of the user's loop; and the one way to speak to the person at the terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

log = logging.getLogger(__name__)

_told: set[str] = set()


def swallow(where: str, consequence: str) -> None:
    """Log the exception that is being handled, once for each `where`. `consequence` says what the user does without."""
    if where not in _told:
        _told.add(where)
        with contextlib.suppress(Exception):  # of a handler of the user's
            log.warning(
                "sentinel: internal fault in %s; training goes on, %s", where, consequence, exc_info=sys.exception()
            )


@contextlib.contextmanager
def shielded(where: str, consequence: str) -> Iterator[None]:
    """Swallow what the block raises. Off the hot path: entering costs a microsecond."""
    try:
        yield
    except Exception:
        swallow(where, consequence)


def say(text: str) -> None:
    """One line on stderr, which stays apart from what the run prints. A closed stderr is no reason to fail."""
    try:
        # One write: print's own newline is a second one, and another thread's line may come between the two.
        print(f"sentinel: {text}\n", end="", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass
