"""Counts the daemon's own faults: whatever it logs with a traceback."""

from __future__ import annotations

import logging


class FaultCounter(logging.Handler):
    """Put on the root logger: asyncio and the HTTP server report there, too."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """One more, if it is one."""
        self.count += bool(record.exc_info)
