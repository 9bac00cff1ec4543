"""Formats of the daemon's log: text for people, or a JSON object per line for programs that collect logs.

Its size is limited: it lies in /tmp, where training has its files, too.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sentinel.text import spell_controls, spell_line

PERIOD_SECONDS = 3600.0
MOST = 500
"""Most records of one line of code per period. A thousand ranks say hello in two lines, a tick that fails has 3 kB."""


class LineFormatter(logging.Formatter):
    """Format for people: time, level, message, and a traceback below it. Control characters are spelled out."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return one line, whatever a peer has sent: a peer cannot forge another record."""
        return spell_line(super().formatMessage(record))

    def formatException(self, error: Any) -> str:
        """Return the traceback's lines."""
        return spell_controls(super().formatException(error))


class JsonLines(logging.Formatter):
    """Format for programs: `time` (RFC 3339, UTC), `level`, `logger`, `message`, and `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Sparing(logging.Filter):
    """Drops what one line of code logs over and over: a fault at every tick, a peer at every second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts = Counter[tuple[str, int]]()
        self._until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        if (now := self._clock()) >= self._until:
            self._counts.clear()
            self._until = now + PERIOD_SECONDS
        key = record.pathname, record.lineno
        self._counts[key] += 1
        if self._counts[key] == MOST:
            record.msg, record.args = f"{record.getMessage()} (more of these are left out for an hour)", ()
        return self._counts[key] <= MOST
