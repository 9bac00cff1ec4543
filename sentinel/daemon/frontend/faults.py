"""Counts the daemon's own faults: whatever it logs with a traceback."""

from __future__ import annotations

import logging


class FaultCounter(logging.Handler):
    """A log handler for the root logger, to which asyncio and the HTTP server report, too."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count the record if it has a traceback."""
        self.count += bool(record.exc_info)
