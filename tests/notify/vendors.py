"""Servers that check requests against the documents of Slack, PagerDuty and Alertmanager, and answer as they do.

Lengths are counted in UTF-16 units, the strictest way to read "characters".
"""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEADLINE_SECONDS = 60.0
BOT_TOKEN = "xoxb-s3cr3ts3cr3ts3cr3ts3cr3t"
HOOK_PATH = "/services/T0S3CR3T/B0S3CR3T/s3cr3ts3cr3ts3cr3ts3cr3t"
ROUTING_KEY = "s3cr3ts3cr3ts3cr3ts3cr3ts3cr3t00"
assert len(ROUTING_KEY) == 32

Reply = tuple[int, dict[str, str], bytes]


class Wrong(Exception):
    """A request that the vendor does not accept, with the vendor's own error message."""


class Allowance:
    """A limit of `count` requests in `seconds`; beyond it 429, with the time to wait."""

    def __init__(self, count: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._seconds, self._clock = count, seconds, clock
        self._times: deque[float] = deque()
        self._lock = threading.Lock()
        self.refused = 0

    def refuse(self) -> dict[str, str] | None:
        """Return the headers of a refusal; None: the request is allowed."""
        with self._lock:
            now = self._clock()
            while self._times and now - self._times[0] >= self._seconds:
                self._times.popleft()
            if len(self._times) < self._count:
                self._times.append(now)
                return None
            self.refused += 1
            return {"Retry-After": str(max(1, round(self._seconds - (now - self._times[0]))))}


class Vendor:
    """A vendor's server. `taken` has what it accepted, in order; `refused` the errors of what it did not."""

    def __init__(self) -> None:
        self.url = ""
        self.taken: queue.Queue[dict[str, Any]] = queue.Queue()
        self.refused: list[str] = []
        self.answers: list[Reply] = []
        """Answers to give first, instead of its own; a status of None cuts the connection."""
        self.allowance = Allowance(1000, 1.0)

    def next(self) -> dict[str, Any]:
        """Wait for the next accepted message, and return it."""
        return self.taken.get(timeout=DEADLINE_SECONDS)

    def all(self) -> list[dict[str, Any]]:
        """Return all messages accepted since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.taken.get_nowait())
        return found

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        """Return the vendor's answer to a request."""
        raise NotImplementedError


class Slack(Vendor):
    """docs.slack.dev: incoming webhooks, chat.postMessage, chat.update, the limits of blocks."""

    METHODS = ("chat.postMessage", "chat.update")

    def __init__(self) -> None:
        super().__init__()
        self.channels = {"#training": "C0123456789", "C0123456789": "C0123456789"}
        self.messages: dict[str, dict[str, Any]] = {}
        """Messages by their `ts`."""
        self.allowance = Allowance(1000, 1.0)

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if (again := self.allowance.refuse()) is not None:
            return 429, again, b"rate_limited"
        if path == HOOK_PATH:
            return self._hook(headers, body)
        method = path.rpartition("/")[2]
        assert method in self.METHODS, path
        try:
            answer: dict[str, Any] = {"ok": True, **self._method(method, headers, body)}
        except Wrong as wrong:
            self.refused.append(str(wrong))
            answer = {"ok": False, "error": str(wrong)}
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def _hook(self, headers: dict[str, str], body: bytes) -> Reply:
        try:
            assert headers["content-type"].startswith("application/json")
            message = slack_message(body)
        except Wrong as wrong:
            self.refused.append(str(wrong))
            return 400, {}, str(wrong).encode()
        self.taken.put(message)
        return 200, {}, b"ok"

    def _method(self, method: str, headers: dict[str, str], body: bytes) -> dict[str, Any]:
        if headers.get("authorization") != f"Bearer {BOT_TOKEN}":
            raise Wrong("invalid_auth")
        assert headers["content-type"] == "application/json; charset=utf-8"  # otherwise Slack warns of missing_charset
        message = slack_message(body)
        channel = self.channels.get(message.get("channel", ""))
        if channel is None:
            raise Wrong("channel_not_found")
        if method == "chat.update":
            if message["channel"] not in self.channels.values():
                raise Wrong("channel_not_found")  # it needs the id, unlike chat.postMessage
            if message.get("ts") not in self.messages:
                raise Wrong("message_not_found")
            ts = message["ts"]
            if message.keys() & {"unfurl_links", "unfurl_media", "thread_ts"}:
                raise Wrong("invalid_arguments")
        else:
            if message.get("thread_ts", next(iter(self.messages), None)) not in [*self.messages, None]:
                raise Wrong("thread_not_found")
            ts = f"1700000000.{len(self.messages):06}"
        self.messages[ts] = message
        self.taken.put({"method": method, **message})
        return {"channel": channel, "ts": ts}


def slack_message(body: bytes) -> dict[str, Any]:
    """Return a message that is within the documented limits; otherwise raise Wrong with Slack's error."""
    try:
        message = json.loads(body.decode("utf-8"))
    except ValueError:
        raise Wrong("invalid_payload") from None
    if "\ud800" <= max(json.dumps(message, ensure_ascii=False), default="") <= "\udfff":
        raise Wrong("invalid_payload")
    blocks = message.get("blocks", [])
    if not message.get("text") and not blocks:
        raise Wrong("no_text")
    if units(message.get("text", "")) > 40_000:
        raise Wrong("msg_too_long")
    slack_markup(message.get("text", ""))
    if len(blocks) > 50:
        raise Wrong("invalid_blocks")
    total = 0
    for block in blocks:
        total += slack_block(block)
    if total > 13_200:
        raise Wrong("msg_blocks_too_long")
    return dict(message)


def slack_block(block: dict[str, Any]) -> int:
    """Check a block; return its number of characters."""
    match block:
        case {"type": "header", "text": {"type": "plain_text", "text": str(text), **rest}}:
            longest = 150
            if rest.keys() - {"emoji"}:
                raise Wrong("invalid_blocks")
        case {"type": "section", "text": {"type": "mrkdwn", "text": str(text), **rest}}:
            longest = 3000
            if rest.keys() - {"verbatim"}:
                raise Wrong("invalid_blocks")
            slack_markup(text)
        case _:
            raise Wrong("invalid_blocks")
    if block.keys() - {"type", "text", "block_id"} or not text.strip() or units(text) > longest:
        raise Wrong("invalid_blocks")
    return units(text)


def slack_markup(text: str) -> None:
    """Check that a text mentions no user and links only what the settings name: `<`, `>` and `&` are escaped."""
    if re.search(r"[<>]|&(?!amp;|lt;|gt;)", re.sub(r"<https://\w+\.example/[^<>|\s]*\|\w+>", "", text)):
        raise Wrong("invalid_blocks")


class PagerDuty(Vendor):
    """developer.pagerduty.com/docs/events-api-v2: events, change events, their limits."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[str] = set()
        self.triggered: list[str] = []

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if len(body) > 512 * 1024:
            self.refused.append("too large")
            return 413, {}, b"Request Entity Too Large"
        if (again := self.allowance.refuse()) is not None:
            return 429, again, b'{"status":"throttle exceeded","message":"Requests for this service are arriving..."}'
        try:
            event = json.loads(body.decode("utf-8"))
            checked = {"enqueue": pagerduty_event, "change/enqueue": pagerduty_change}[path.partition("/v2/")[2]]
            checked(event)
        except (Wrong, ValueError) as wrong:
            self.refused.append(str(wrong))
            errors = {"status": "invalid event", "message": "Event object is invalid", "errors": [str(wrong)]}
            return 400, {}, json.dumps(errors).encode()
        if event.get("event_action") == "trigger":
            self.open.add(event["dedup_key"])
            self.triggered.append(event["dedup_key"])
        elif event.get("event_action") == "resolve":
            self.open.discard(event["dedup_key"])
        self.taken.put({"path": path, **event})
        return 202, {}, b'{"status":"success","message":"Event processed"}'


def pagerduty_event(event: dict[str, Any]) -> None:
    """Raise Wrong if an event is not as documented."""
    _key(event)
    if event.get("event_action") not in ("trigger", "acknowledge", "resolve"):
        raise Wrong("'event_action' is missing or invalid")
    if not 0 < units(event.get("dedup_key", "x")) <= 255:
        raise Wrong("'dedup_key' is longer than 255 characters")
    if event["event_action"] != "trigger":
        if "dedup_key" not in event:
            raise Wrong("'dedup_key' is missing or blank")
        return
    payload = _payload(event, {"component", "group", "class", "severity"})
    if payload.get("severity") not in ("critical", "error", "warning", "info"):
        raise Wrong("'payload.severity' is invalid (must be one of: 'critical', 'warning', 'error' or 'info')")
    if not payload.get("source"):
        raise Wrong("'payload.source' is missing or blank")
    wanted = {"routing_key", "event_action", "dedup_key", "payload", "images", "links", "client", "client_url"}
    if event.keys() - wanted:
        raise Wrong(f"unknown {event.keys() - wanted}")


def pagerduty_change(event: dict[str, Any]) -> None:
    """Raise Wrong if a change event is not as documented."""
    _key(event)
    _payload(event, set())
    if event.keys() - {"routing_key", "payload", "links", "images"}:
        raise Wrong("unknown keys")


def _key(event: dict[str, Any]) -> None:
    if event.get("routing_key") != ROUTING_KEY:
        raise Wrong("Invalid routing key")


def _payload(event: dict[str, Any], more: set[str]) -> dict[str, Any]:
    payload = event.get("payload")
    if not isinstance(payload, dict) or payload.keys() - {"summary", "source", "timestamp", "custom_details", *more}:
        raise Wrong("'payload' is missing or invalid")
    if not payload.get("summary", "").strip():
        raise Wrong("'payload.summary' is missing or blank")
    if units(payload["summary"]) > 1024:
        raise Wrong("'payload.summary' is longer than 1024 characters")
    datetime.datetime.fromisoformat(payload.get("timestamp", "2020-01-01"))
    if not isinstance(payload.get("custom_details", {}), dict):
        raise Wrong("'payload.custom_details' is no object")
    for link in event.get("links", []):
        if not re.match("https?://", link["href"]):
            raise Wrong("'links.href' is no URL")
    return payload


class Alertmanager(Vendor):
    """Postable alerts of prometheus/alertmanager's api/v2/openapi.yaml, and what its validation refuses."""

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        assert path == "/api/v2/alerts", path
        alerts = json.loads(body.decode("utf-8"))
        try:
            for alert in alerts:
                postable_alert(alert)
        except Wrong as wrong:
            self.refused.append(str(wrong))
            return 400, {}, json.dumps(str(wrong)).encode()
        for alert in alerts:
            self.taken.put(alert)
        return 200, {}, b""


def postable_alert(alert: dict[str, Any]) -> None:
    """Raise Wrong if an alert is not as documented."""
    if alert.keys() - {"labels", "annotations", "startsAt", "endsAt", "generatorURL"}:
        raise Wrong("unknown keys")
    for name, value in {**alert["labels"], **alert.get("annotations", {})}.items():
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or not isinstance(value, str):
            raise Wrong(f"invalid label set: {name}")
    if not any(alert["labels"].values()):
        raise Wrong("at least one label pair required")
    start, end = (datetime.datetime.fromisoformat(alert[name]) for name in ("startsAt", "endsAt"))
    if end < start:
        raise Wrong("start time must be before end time")


def units(text: str) -> int:
    """Return the length in UTF-16 units. Raises UnicodeEncodeError for a lone surrogate, which no server accepts."""
    return len(text.encode("utf-16-le")) // 2


@contextlib.contextmanager
def serving(vendor: Vendor) -> Iterator[None]:
    """Serve on a free port of loopback; its address is then in `vendor.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if len(body) < int(self.headers["Content-Length"]):
                return  # the client died
            headers = {name.lower(): value for name, value in self.headers.items()}
            own = vendor.answers.pop(0) if vendor.answers else vendor.answer(self.path, headers, body)
            status, more, content = own
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:  # the client hung up
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    vendor.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
