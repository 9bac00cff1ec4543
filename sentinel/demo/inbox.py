"""A receiver of alerts in place of PagerDuty: it stores the messages that it gets.

python -m sentinel.demo.inbox HOST:PORT FILE      a JSON line for each message, with the time at which it arrived
"""

from __future__ import annotations

import http.server
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from sentinel.demo.trainee import Tail


class Sent(msgspec.Struct, frozen=True):
    """One message of the receiver `webhook`."""

    time: float
    """Unix seconds at which it arrived."""
    key: str
    """A key that all messages about one problem share: a pager rings once for each key."""
    firing: bool
    alert: str
    severity: str
    run_id: str
    incident: str
    summary: str
    cause: str
    members: str
    done: str
    step: int


class Inbox:
    """The messages that the receiver got, in the order in which they arrived."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._tail = Tail(path)
        self.messages: list[Sent] = []

    @property
    def pages(self) -> list[Sent]:
        """The first message of each problem."""
        first: dict[str, Sent] = {}
        for message in self.messages:
            if message.firing:
                first.setdefault(message.key, message)
        return list(first.values())

    def take(self) -> list[Sent]:
        """Return the messages that arrived since the last call."""
        new = [_read(json.loads(line)) for line in self._tail.lines()]
        self.messages += new
        return new


def _read(entry: dict[str, Any]) -> Sent:
    body = entry["body"]
    alert = body["alerts"][0]
    labels, notes = alert["labels"], alert["annotations"]
    return Sent(
        time=entry["time"], key=body["groupKey"], firing=body["status"] == "firing", alert=labels["alertname"],
        severity=labels["severity"], run_id=labels["run_id"], incident=notes["incident"], summary=notes["summary"],
        cause=notes.get("description", ""), members=notes.get("members", ""), done=notes.get("done", ""),
        step=int(notes["step"]),
    )  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    """Stores the body of each POST."""

    file: Path

    def do_POST(self) -> None:
        """Store one message."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.file.open("a") as file:
            print(json.dumps({"time": time.time(), "body": body}), file=file)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    Handler.file = Path(sys.argv[2])
    http.server.HTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
