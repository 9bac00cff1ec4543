"""How the daemon's log is written: for people, or a JSON object a line for programs that collect logs."""

from __future__ import annotations

import datetime
import json
import logging

PEOPLE = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


class JsonLines(logging.Formatter):
    """`time` (RFC 3339, UTC), `level`, `logger`, `message`, and `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
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
