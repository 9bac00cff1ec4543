"""A webhook consumer that checks Alertmanager's documented contract, and can misbehave."""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import re
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEADLINE_SECONDS = 60.0
HANG = "hang"
CLOSE = "close"
GARBAGE = "garbage"

Answer = int | str | tuple[int, dict[str, str]]


class Consumer:
    """Answers with `answers` in turn, then with 200. `received` has all payloads, unchecked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.received: queue.Queue[dict[str, Any]] = queue.Queue()
        self.hung = threading.Event()
        """Set once a request is kept waiting."""
        self.release = threading.Event()
        """Set at the end: releases the requests that are kept waiting."""
        self.url = ""
        self.authorizations: list[str | None] = []

    def next(self) -> dict[str, Any]:
        """Wait for the next payload, and return it."""
        return self.received.get(timeout=DEADLINE_SECONDS)


@contextlib.contextmanager
def consumer(*answers: Answer) -> Iterator[Consumer]:
    """Serve on a free port of loopback; yields the consumer."""
    state = Consumer()
    state.answers = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/json"
            state.authorizations.append(self.headers["Authorization"])
            answer = state.answers.pop(0) if state.answers else 200
            if answer == HANG:
                state.hung.set()
                state.release.wait(DEADLINE_SECONDS)
                return
            state.received.put(json.loads(body))
            if answer == CLOSE:
                self.wfile.write(b"HTTP/1.1 20")
                return
            if answer == GARBAGE:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n\x00\xff{" * 3)
                return
            status, headers = answer if isinstance(answer, tuple) else (int(answer), {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # the client hung up
            pass

    assert issubclass(Server, socketserver.TCPServer)
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/hook"
    try:
        yield state
    finally:
        state.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def shape(value: Any) -> Any:
    """Return a payload's keys and types; for label sets and annotations, whose keys are the sender's, "texts"."""
    if isinstance(value, dict):
        if value and all(isinstance(item, str) for item in value.values()) and "status" not in value:
            return "texts"
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def check(payload: dict[str, Any]) -> None:
    """Check a payload against prometheus.io/docs/alerting/latest/configuration/#webhook_config."""
    assert shape(payload) == {
        "version": "str",
        "groupKey": "str",
        "truncatedAlerts": "int",
        "status": "str",
        "receiver": "str",
        "groupLabels": "texts",
        "commonLabels": "texts",
        "commonAnnotations": "texts",
        "externalURL": "str",
        "alerts": [
            {
                "status": "str",
                "labels": "texts",
                "annotations": "texts",
                "startsAt": "str",
                "endsAt": "str",
                "generatorURL": "str",
                "fingerprint": "str",
            }
        ],
    }
    assert payload["version"] == "4"
    assert payload["status"] in ("firing", "resolved")
    assert payload["status"] == ("firing" if any(a["status"] == "firing" for a in payload["alerts"]) else "resolved")
    for alert in payload["alerts"]:
        assert payload["groupLabels"].items() <= alert["labels"].items()
        assert payload["commonLabels"].items() <= alert["labels"].items()
        assert payload["commonAnnotations"].items() <= alert["annotations"].items()
        assert all(re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) for name in alert["labels"])
        began, ended = (datetime.datetime.fromisoformat(alert[key]) for key in ("startsAt", "endsAt"))
        assert (ended.year == 1) == (alert["status"] == "firing")
        assert alert["status"] == "firing" or ended >= began
        assert re.fullmatch("[0-9a-f]{16}", alert["fingerprint"])
