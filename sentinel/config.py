"""Settings: a TOML file, as frozen structs.

    --config FILE, SENTINEL_CONFIG, attach(config=)    named: must be there
    $XDG_CONFIG_HOME/sentinel/sentinel.toml            ~/.config where that is unset
    /etc/sentinel/sentinel.toml                        else the defaults

Never looked for in the working directory: a repository that somebody cloned must not choose who is told. Paths in a
file are relative to it. Secrets are not in it: it names environment variables (`url_env`, `token_env`) or files
(`url_file`, `token_file`), which are read when the secret is used. Every mistake is a ConfigError, `file:line: what;
the mend`, without the secret.
"""

from __future__ import annotations

import os
import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import msgspec

from sentinel.errors import ConfigError

FILE = "sentinel.toml"
HTTP_PORT = 9477
Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
RECEIVER_TYPES = ("terminal", "slack", "pagerduty", "webhook")
RECEIVER_ENTRY_POINTS = "sentinel.receivers"
TOKEN_LENGTH = 20
"""A part of a URL's path this long is taken for a token. Slack's webhooks end in 24 characters, a UUID has 32."""

_SIZES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


class Duration(float):
    """Seconds, written `500ms`, `90s`, `5m`, `2h`, `1d`."""


def duration(text: str) -> Duration:
    """Read a duration. Raises ValueError, in words."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no duration; write 90s, 5m, 2h or 1d")
    return Duration(float(found[1]) * _UNITS[found[2]])


class Size(float):
    """Bytes, written `500MB`, `10GB`."""


def size(text: str) -> Size:
    """Read a size. Raises ValueError, in words."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write 500MB or 10GB")
    return Size(float(found[1]) * _SIZES[found[2]])


class Daemon(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[daemon]`: how the daemon serves."""

    http: int | str = HTTP_PORT
    """Port on loopback; 0: any free one; "off": none. Where it is taken, a free one is used."""
    file_sd: Path | None = None
    """Folder for a file that tells Prometheus where to scrape (file_sd_configs)."""
    rules: tuple[Path, ...] = ()
    """Rule files and folders beside the stock rules; a rule of the same name replaces the stock one."""
    external_url: str = ""
    """Where people see a run, such as a dashboard: every alert links to it. `{run}` and `{run_id}` are filled in."""

    def link(self, run: str, run_id: str) -> str:
        """`external_url` of a run."""
        filled = {"{run}": run, "{run_id}": run_id}
        return re.sub(r"\{run(_id)?\}", lambda place: quote(filled[place[0]], safe=""), self.external_url)

    def __post_init__(self) -> None:
        if self.external_url and not (_is_http(self.external_url) and not urlsplit(self.external_url).username):
            raise ValueError("external_url: no http:// or https:// URL, or one with a user in it")
        if self.http != "off" and not (isinstance(self.http, int) and 0 <= self.http <= 65535):
            raise ValueError(f'http: {self.http!r} is no port; write 1 to 65535, 0 for any free one, or "off"')


class Grouping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[grouping]`: when receivers are told. A group is one rule in one run. The terminal is told at once."""

    wait: Duration = Duration(5)
    """From the first change to the message: ranks that join by then are in it."""
    interval: Duration = Duration(60)
    """Between two messages about one group, at least."""
    repeat: Duration = Duration(4 * 3600)
    """An alert that still fires is told again."""


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[history]`: which runs are kept. A file a run; daemons delete what is over when they start."""

    max_age: Duration = Duration(90 * 86400)
    """Since it was written to last."""
    max_size: Size = Size(20e9)
    """Of all of a user's together: the oldest go first."""


class Receiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[receivers]]`: somebody who is told."""

    name: str
    """Letters, digits, `_`, `.`, `-`; at most 40: it becomes a label of metrics."""
    type: str
    url: str = ""
    """Where there is no secret in it; else one of the next two."""
    url_env: str = ""
    url_file: Path | None = None
    token_env: str = ""
    """Slack's bot token, PagerDuty's routing key, or the bearer token of a webhook; never written out."""
    token_file: Path | None = None
    channel: str = ""
    """Slack's, where there is a bot token."""
    severities: tuple[Severity, ...] = SEVERITIES
    """Of the alerts that it is told of."""
    timeout: Duration = Duration(10)
    """For one delivery, answer included."""
    options: dict[str, Any] = {}
    """For types that another package brings (entry points `sentinel.receivers`)."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", self.name):
            raise ValueError(f"name: {self.name!r} is not 1 to 40 letters, digits, `_`, `.` and `-`")

    def address(self) -> str:
        """The URL, read now. Raises ConfigError, which does not show it."""
        where, url = self._read("url", self.url, self.url_env, self.url_file)
        if not url:
            raise ConfigError(f"receiver {self.name}: {where} is empty or not set; put the URL there")
        if not _is_http(url):
            raise ConfigError(f"receiver {self.name}: {where} holds no http:// or https:// URL")
        return url

    def token(self) -> str:
        """The token, read now; empty where none is named. Raises ConfigError, which does not show it."""
        if not self.has_token:
            return ""
        where, token = self._read("token", "", self.token_env, self.token_file)
        if not token:
            raise ConfigError(f"receiver {self.name}: {where} is empty or not set; put the token there")
        if not (token.isascii() and token.isprintable()):
            raise ConfigError(f"receiver {self.name}: {where} holds a line end or a character that no token has")
        return token

    def authorization(self) -> dict[str, str]:
        """The header for the token: `Bearer`, or another scheme where it is written before the token."""
        token = self.token()
        return {"Authorization": token if " " in token else f"Bearer {token}"} if token else {}

    @property
    def has_token(self) -> bool:
        """Whether one is named."""
        return bool(self.token_env or self.token_file)

    @property
    def has_address(self) -> bool:
        """Whether a URL is named."""
        return bool(self.url or self.url_env or self.url_file)

    def _read(self, what: str, plain: str, variable: str, file: Path | None) -> tuple[str, str]:
        if variable:
            return f"environment variable {variable}", os.environ.get(variable, "").strip()
        if file is None:
            return what, plain
        try:
            return str(file), file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"receiver {self.name}: {file} cannot be read ({_reason(error)})") from None


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A settings file."""

    daemon: Daemon = Daemon()
    grouping: Grouping = Grouping()
    history: History = History()
    receivers: tuple[Receiver, ...] = ()


def path(named: Path | None = None) -> Path | None:
    """The settings file in force; None: the defaults are. Raises ConfigError where one is named and not there."""
    if named is None and os.environ.get("SENTINEL_CONFIG"):
        named = Path(os.environ["SENTINEL_CONFIG"])
    if named is not None:
        if not named.is_file():
            raise ConfigError(f"{named}: no such settings file; `sentinel init` writes one")
        return named
    return next((place for place in (home() / FILE, Path("/etc/sentinel") / FILE) if os.path.isfile(place)), None)


def home() -> Path:
    """The folder of a person's own settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "sentinel"


def load(named: Path | None = None) -> Settings:
    """Read the settings in force. Raises ConfigError."""
    file = path(named)
    if file is None:
        return Settings()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({_reason(error)})") from None
    return parsed(text, file)


def parsed(text: str, file: Path) -> Settings:
    """Settings from the text of a file. Raises ConfigError."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).rpartition(" (at ")
        line = re.match(r"line (\d+)", place)
        at = int(line[1]) if line else text.rstrip().count("\n") + 1
        raise ConfigError(f"{file}:{at}: not TOML: {what[:1].lower()}{what[1:]}; see toml.io") from None
    folder = file.absolute().parent

    def decode(kind: type, value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"expected text in quotes, got {value!r}")
        if kind is Size:
            return size(value)
        return duration(value) if kind is Duration else folder / Path(value).expanduser()

    try:
        settings = msgspec.convert(content, Settings, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise ConfigError(_described(str(error), text, file)) from None
    _check_receivers(settings.receivers, text, file)
    return settings


def _check_receivers(receivers: tuple[Receiver, ...], text: str, file: Path) -> None:
    """What the types alone do not say. A message does not show a URL: it may be the secret that it should not be."""
    known = {*RECEIVER_TYPES, *(entry.name for entry in entry_points(group=RECEIVER_ENTRY_POINTS))}
    for index, receiver in enumerate(receivers):

        def wrong(key: str, what: str, index: int = index) -> ConfigError:
            return ConfigError(f"{file}:{_line(text, 'receivers', index, key)}: {what}")

        if receiver.name in (other.name for other in receivers[:index]):
            raise wrong("name", f"a second receiver {receiver.name!r}; give each a name of its own")
        if receiver.type not in known:
            raise wrong("type", f"unknown type {receiver.type!r}; there are: {', '.join(sorted(known))}")
        if receiver.url and not _is_http(receiver.url):
            raise wrong("url", "url is no http:// or https:// URL")
        if _secret(receiver.url):
            raise wrong("url", "url seems to hold a secret; put it into a variable or a file: url_env or url_file")
        for what in ("url", "token"):
            keys = {what, f"{what}_env", f"{what}_file"}
            given = [key for key in receiver.__struct_fields__ if key in keys and getattr(receiver, key)]
            if len(given) > 1:
                raise wrong(given[1], f"{' and '.join(given)}: name one of them")
        if (lacking := _lacking(receiver)) is not None:
            raise wrong("type", lacking)
        if receiver.type == "terminal" and receiver.type in (other.type for other in receivers[:index]):
            raise wrong("type", "a second terminal; there is one, that of the training")


def _lacking(receiver: Receiver) -> str | None:
    """What a receiver of this type needs and has not."""
    url, token = receiver.has_address, receiver.has_token
    match receiver.type:
        case "webhook" if not url:
            return "a webhook needs one of url, url_env and url_file, and has none"
        case "pagerduty" if not token:
            return "pagerduty needs the routing key of an Events API v2 integration: token_env or token_file"
        case "slack" if not url and not token:
            return (
                "slack needs url_env or url_file (an incoming webhook), or token_env or token_file (a bot) and channel"
            )
        case "slack" if token and not receiver.channel:
            return 'slack with a bot\'s token needs a channel: channel = "#training", or its id'
        case "slack" if receiver.channel and not token:
            return "slack with an incoming webhook has the webhook's channel; leave out channel, or name a bot's token"
    return None


def _secret(url: str) -> bool:
    """Whether somebody who reads this URL could use it."""
    parts = urlsplit(url)
    return bool(parts.username or parts.password or parts.query) or any(
        len(part) >= TOKEN_LENGTH for part in parts.path.split("/")
    )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc) and url.isprintable() and " " not in url


def _described(error: str, text: str, file: Path) -> str:
    """msgspec's words and path (`$.receivers[1].url`) as ours and a line."""
    what, _, where = error.partition(" - at `$")
    table, index, key = re.match(r"(?:\.(\w+))?(?:\[(\d+)\])?(?:\.(\w+))?", where.rstrip("`")).groups()  # type: ignore[union-attr]
    unknown = re.search(r"unknown field `([^`]+)`", what)
    if unknown is not None:
        key = unknown[1]
        there = _fields(table)
        what = f"unknown key {key!r}; there are: {', '.join(there)}"
        if re.search("token|password|secret|key|authorization", key, re.IGNORECASE):
            what += "; and a secret is never written here, but named: token_env, token_file"
    if "enum value" in what:
        what += f"; there are: {', '.join(SEVERITIES)}"
    missing = re.search(r"missing required field `([^`]+)`", what)
    if missing is not None:
        what = f"{missing[1]} is missing; add {missing[1]} = ..."
    named = re.match(r"(\w+): ", what)  # by a __post_init__ of ours
    if named is None and unknown is None and missing is None:
        what = f"{key or table}: {what[:1].lower()}{what[1:]}"
    line = _line(text, table or key or "", int(index or 0), named[1] if named else key if table else None)
    return f"{file}:{line}: {what[:1].lower()}{what[1:]}"


def _fields(table: str | None) -> tuple[str, ...]:
    tables: dict[str | None, type[msgspec.Struct]] = {
        "daemon": Daemon,
        "grouping": Grouping,
        "history": History,
        "receivers": Receiver,
    }
    return tables.get(table, Settings).__struct_fields__


def _line(text: str, table: str, index: int, key: str | None) -> int:
    """Where a key of a table is written; the table's header where the key is not; tomllib keeps no places."""
    header = re.compile(rf"\s*\[\[?\s*{re.escape(table)}\s*\]\]?")
    at, seen = 1, -1
    for number, line in enumerate(text.splitlines(), start=1):
        if header.match(line):
            seen += 1
            if seen == index:
                at = number
        elif line.lstrip().startswith("[") and seen == index:
            break
        if (seen == index or not key) and re.match(rf"\s*{re.escape(key or table)}\s*=", line):
            return number
    return at


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "not text in UTF-8"
