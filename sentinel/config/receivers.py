"""`[[receivers]]`, `[[routes]]`, `[heartbeat]`: the settings of which receivers get which alerts.

Secrets are not in them: they name an environment variable or a file, which is read when the secret is used.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from sentinel.config.links import is_http
from sentinel.config.quantities import Duration, Rate
from sentinel.errors import ConfigError

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
RECEIVER_ENTRY_POINTS = "sentinel.receivers"
_OWN = "sentinel.notify.receivers"
"""The package of Sentinel's own receivers, with a module for each type, named like it. They are above this package, and
are found by name, like those of other packages."""
TOKEN_LENGTH = 20
"""Length from which on a part of a URL's path is taken for a token. Slack's webhooks end in 24 characters, a UUID has
32."""


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A URL, with a token where one is needed."""

    url: str = ""
    """The URL, if it contains no secret; else use one of the next two."""
    url_env: str = ""
    url_file: Path | None = None
    token_env: str = ""
    """Slack's bot token, PagerDuty's routing key, or another receiver's bearer token; never written out."""
    token_file: Path | None = None

    def __post_init__(self) -> None:
        for key in ("interval", "timeout"):
            if getattr(self, key, None) == 0:
                raise ValueError(f"{key}: 0 s leaves no time; write one such as 10s")

    def address(self) -> str:
        """Return the URL, read now. Raises ConfigError, which does not show it."""
        where, url = self.text("url")
        if not is_http(url):
            raise ConfigError(f"{where} holds no http:// or https:// URL")
        return url

    def token(self) -> str:
        """Return the token, read now; empty where none is named. Raises ConfigError, which does not show it."""
        if not self.has_token:
            return ""
        where, token = self.text("token")
        if not (token.isascii() and token.isprintable()):
            raise ConfigError(f"{where} holds a line end or a character that no token has")
        return token

    def authorization(self) -> dict[str, str]:
        """Return the header for the token: `Bearer`, or another scheme that is written before the token."""
        token = self.token()
        return {"Authorization": token if " " in token else f"Bearer {token}"} if token else {}

    @property
    def has_token(self) -> bool:
        """Whether a token is named."""
        return bool(self.token_env or self.token_file)

    @property
    def has_address(self) -> bool:
        """Whether a URL is named."""
        return bool(self.url or self.url_env or self.url_file)

    def text(self, what: Literal["url", "token"]) -> tuple[str, str]:
        """Return where the URL or token is, in words, and its value, read now. Raises ConfigError where there is
        none."""
        variable = self.url_env if what == "url" else self.token_env
        file = self.url_file if what == "url" else self.token_file
        if variable:
            where, found = f"environment variable {variable}", os.environ.get(variable, "").strip()
        elif file is None:
            where, found = what, self.url
        else:
            try:
                where, found = str(file), file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
                raise ConfigError(f"{file} cannot be read ({reason})") from None
        if not found:
            raise ConfigError(f"{where} is empty or not set; put the {'URL' if what == 'url' else what} there")
        return where, found


class ReceiverSettings(Endpoint, frozen=True, kw_only=True):
    """`[[receivers]]`: a channel that gets alerts."""

    name: str
    """Letters, digits, `_`, `.`, `-`; at most 40: it becomes a label of metrics."""
    type: str
    channel: str = ""
    """Slack's channel, where there is a bot token."""
    severities: tuple[Severity, ...] = SEVERITIES
    """Severities of the alerts that it gets."""
    rate_limit: Rate | None = None
    """Rate of messages, at most. Further messages wait, critical ones first."""
    timeout: Duration = Duration(10)
    """Time for one delivery, including the answer."""
    options: dict[str, Any] = {}
    """Options for types that another package brings (entry points `sentinel.receivers`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", self.name):
            raise ValueError(f"name: {self.name!r} is not 1 to 40 letters, digits, `_`, `.` and `-`")


class Grouping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[grouping]`: when receivers get alerts. A group is one problem of one run. The terminal shows alerts at once."""

    wait: Duration = Duration(5)
    """Time from the first change to the message; ranks that join in that time are in it."""
    interval: Duration = Duration(60)
    """Least time between two messages about one group."""
    repeat: Duration = Duration(4 * 3600)
    """Time after which an alert that still fires is sent again."""

    def __post_init__(self) -> None:
        if not self.repeat:
            raise ValueError("repeat: 0 s sends alerts again and again; write one such as 4h")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverKind:
    """The properties of one type of receivers; `KIND` in its file."""

    make: Callable[[ReceiverSettings], Any] | None
    """Makes a `sentinel.notify.Receiver`; may raise ImportError. None: the run's own terminal, of which there is
    one."""
    find_mistake: Callable[[ReceiverSettings], str] = lambda _: ""
    """Returns what is wrong with a receiver's settings, with the fix; empty where nothing is."""
    limit: tuple[int, float] | None = None
    """(messages, seconds) that the vendor accepts."""
    grouping: Grouping | None = None
    """The grouping of a type that groups by itself, where the settings' grouping does not apply."""
    edits: Callable[[ReceiverSettings], bool] = lambda _: False
    """Whether another message about a group edits the first one, without a second notification."""
    tracks: bool = False
    """Whether it tracks each alert by itself, and notifies people of none that is sent again unchanged. It also gets
    silenced alerts that it knows, unchanged: Alertmanager ends what is not sent again."""
    secret_url: bool = False
    """Whether its URLs always contain a secret, and may have another scheme than http."""
    install: str = ""
    """How to install the package that it needs."""


class RouteSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"go_on": "continue"}
):
    """`[[routes]]`: the first that matches an alert names its receivers. Without routes all receivers get it."""

    receivers: tuple[str, ...]
    severities: tuple[Severity, ...] = SEVERITIES
    rules: tuple[str, ...] = ("*",)
    """Names of alerts, or patterns: `Loss*`."""
    runs: tuple[str, ...] = ("*",)
    """Names or ids of runs, or patterns."""
    go_on: bool = False
    """`continue`: whether the routes after it are tried too."""

    def matches(self, alert: str, severity: str, run: str, run_id: str) -> bool:
        """Return whether the route matches this alert."""
        return (
            severity in self.severities
            and any(fnmatch.fnmatchcase(alert, pattern) for pattern in self.rules)
            and any(fnmatch.fnmatchcase(name, pattern) for name in (run, run_id) for pattern in self.runs)
        )


class HeartbeatSettings(Endpoint, frozen=True, kw_only=True):
    """`[heartbeat]`: a dead man's switch elsewhere, which is notified at each interval that the daemon works."""

    interval: Duration = Duration(60)
    timeout: Duration = Duration(10)


def select_receivers(routes: Sequence[RouteSettings], alert: str, severity: str, run: str, run_id: str) -> set[str]:
    """Return the names of the receivers that routes give an alert to."""
    found = set[str]()
    for route in routes:
        if route.matches(alert, severity, run, run_id):
            found.update(route.receivers)
            if not route.go_on:
                break
    return found


def list_own_types() -> list[str]:
    """Return the types of Sentinel's own receivers."""
    return [module.name for module in pkgutil.iter_modules(importlib.import_module(_OWN).__path__)]


def find_kind(name: str) -> ReceiverKind | None:
    """Return one of Sentinel's own types; None: it belongs to another package, or is unknown."""
    if name not in list_own_types():
        return None
    kind: ReceiverKind = importlib.import_module(f"{_OWN}.{name}").KIND
    return kind


def find_missing_address(receiver: ReceiverSettings) -> str:
    """Return the mistake of a receiver that needs a URL and names none; empty where it names one."""
    return "" if receiver.has_address else f"{receiver.type} needs one of url, url_env and url_file, and has none"


class Mistake(NamedTuple):
    """A mistake in the table of this name and number, at `key`. Does not show a URL: it may be a secret."""

    table: str
    number: int
    key: str
    what: str


def mistakes(
    receivers: Sequence[ReceiverSettings],
    routes: Sequence[RouteSettings],
    heartbeat: HeartbeatSettings | None,
    otlp: Endpoint | None = None,
) -> Iterator[Mistake]:
    """Yield the mistakes that validation by types does not find."""
    others = {entry.name for entry in entry_points(group=RECEIVER_ENTRY_POINTS)}
    kinds = {receiver.type: find_kind(receiver.type) for receiver in receivers}
    for index, receiver in enumerate(receivers):
        former, kind = receivers[:index], kinds[receiver.type]
        if receiver.name in (other.name for other in former):
            what = f"a second receiver {receiver.name!r}; give each a name of its own"
            yield Mistake("receivers", index, "name", what)
        if kind is None and receiver.type not in others:
            what = f"unknown type {receiver.type!r}; there are: {', '.join(sorted({*list_own_types(), *others}))}"
            yield Mistake("receivers", index, "type", what)
        yield from _of_endpoint(
            receiver, "receivers", index, secret_type=receiver.type if kind is not None and kind.secret_url else ""
        )
        if kind is not None and (mistake := kind.find_mistake(receiver)):
            yield Mistake("receivers", index, "type", mistake)
        if kind is not None and kind.make is None and receiver.type in (other.type for other in former):
            what = f"a second {receiver.type}; there is one, that of the training"
            yield Mistake("receivers", index, "type", what)
    routed = [receiver for receiver in receivers if (kind := kinds[receiver.type]) is None or kind.make is not None]
    yield from _of_routes(routes, routed, receivers)
    if otlp is not None:
        yield from _of_endpoint(otlp, "otlp", 0)
    if heartbeat is not None:
        yield from _of_endpoint(heartbeat, "heartbeat", 0)
        if not heartbeat.has_address:
            yield Mistake(
                "heartbeat", 0, "interval", "a heartbeat needs one of url, url_env and url_file, and has none"
            )


def _of_endpoint(endpoint: Endpoint, table: str, number: int, *, secret_type: str = "") -> Iterator[Mistake]:
    for what in ("url", "token"):
        keys = {what, f"{what}_env", f"{what}_file"}
        given = [key for key in endpoint.__struct_fields__ if key in keys and getattr(endpoint, key)]
        if len(given) > 1:
            yield Mistake(table, number, given[1], f"{' and '.join(given)}: name one of them")
    if secret_type:
        if endpoint.url:
            what = f"{secret_type}'s URLs hold secrets; put them into a variable or a file: url_env or url_file"
            yield Mistake(table, number, "url", what)
    elif endpoint.url and not is_http(endpoint.url):
        yield Mistake(table, number, "url", "url is no http:// or https:// URL")
    elif _secret(endpoint.url):
        what = "url seems to hold a secret; put it into a variable or a file: url_env or url_file"
        yield Mistake(table, number, "url", what)


def _of_routes(
    routes: Sequence[RouteSettings], routed: Sequence[ReceiverSettings], receivers: Sequence[ReceiverSettings]
) -> Iterator[Mistake]:
    names = {receiver.name for receiver in routed}
    for index, route in enumerate(routes):
        for name in sorted(set(route.receivers) - names):
            there = f"there are: {', '.join(sorted(names))}" if names else "there is none; add one under [[receivers]]"
            yield Mistake("routes", index, "receivers", f"no receiver is called {name!r}; {there}")
    for index, receiver in enumerate(receivers):
        if routes and receiver in routed and not any(receiver.name in route.receivers for route in routes):
            what = f"no route leads to {receiver.name!r}; name it in one of [[routes]], or take it away"
            yield Mistake("receivers", index, "name", what)


def _secret(url: str) -> bool:
    """Return whether anyone who reads this URL could use it."""
    parts = urlsplit(url)
    return bool(parts.username or parts.password or parts.query) or any(
        len(part) >= TOKEN_LENGTH for part in parts.path.split("/")
    )
