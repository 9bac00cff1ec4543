"""Read the settings: a TOML file, as frozen structs.

    --config FILE, SENTINEL_CONFIG, attach(config=)    named: must exist
    $XDG_CONFIG_HOME/sentinel/sentinel.toml            ~/.config where that is unset
    /etc/sentinel/sentinel.toml                        else the defaults

Never looked for in the working directory: a cloned repository must not choose who gets alerts. Paths in a
file are relative to it. Secrets are not in it: it names environment variables (`url_env`, `token_env`) or files
(`url_file`, `token_file`), which are read when the secret is used. Every mistake is a ConfigError, `file:line: what;
the fix`, without the secret.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sentinel.config.cluster import ClusterSettings
from sentinel.config.links import LinkSettings, check_link
from sentinel.config.otlp import OtlpSettings
from sentinel.config.quantities import Duration, Rate, Size, duration, rate, size
from sentinel.config.receivers import (
    RECEIVER_ENTRY_POINTS,
    SEVERITIES,
    Grouping,
    HeartbeatSettings,
    ReceiverKind,
    ReceiverSettings,
    RouteSettings,
    Severity,
    find_kind,
    find_missing_address,
    list_own_types,
    mistakes,
)
from sentinel.config.trackers import TrackerSettings
from sentinel.errors import ConfigError
from sentinel.node import small_files

__all__ = [
    "RECEIVER_ENTRY_POINTS", "SEVERITIES", "ClusterSettings", "DaemonSettings", "Duration", "Grouping",
    "HeartbeatSettings", "HistorySettings", "LinkSettings", "ReceiverKind", "ReceiverSettings", "RouteSettings",
    "Settings", "Severity", "TrackerSettings", "duration", "find_kind", "find_missing_address", "home",
    "list_own_types", "load", "own_file", "parse_settings", "path", "size",
]  # fmt: skip

FILE = "sentinel.toml"
HTTP_PORT = 9477

_READERS: dict[type, Callable[[str], object]] = {Duration: duration, Rate: rate, Size: size}


class DaemonSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[daemon]`: how the daemon serves."""

    http: int | str = HTTP_PORT
    """Port on 127.0.0.1; 0: any free one; `"off"`: none. If the port is taken, a free one is used."""
    listen: str = "127.0.0.1"
    """Address to listen on; `"0.0.0.0"` serves other hosts, as in a pod. Without a token it only gives /metrics and
    the health checks."""
    file_sd: Path | None = None
    """Folder for the target file of Prometheus' service discovery (file_sd_configs); none: in the state directory."""
    rules: tuple[Path, ...] = ()
    """Rule files and folders to use with the stock rules; a rule of the same name replaces the stock one."""
    external_url: str = ""
    """Link added to every alert, such as a dashboard; `{run}` and `{run_id}` are filled in."""

    def __post_init__(self) -> None:
        check_link("external_url", self.external_url)
        if self.http != "off" and not (isinstance(self.http, int) and 0 <= self.http <= 65535):
            raise ValueError(f'http: {self.http!r} is no port; write 1 to 65535, 0 for any free one, or "off"')
        try:
            ipaddress.IPv4Address(self.listen)
        except ValueError:
            raise ValueError(
                f"listen: {self.listen!r} is no IPv4 address; write 127.0.0.1, or 0.0.0.0 for all"
            ) from None


class HistorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[history]`: which runs are kept. Each run has a file; daemons delete what is over the limits when they start."""

    max_age: Duration = Duration(90 * 86400)
    """Runs whose last write is longer ago are deleted."""
    max_size: Size = Size(20e9)
    """Size of all histories of a user together; above it the oldest are deleted."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A settings file."""

    daemon: DaemonSettings = DaemonSettings()
    links: LinkSettings = LinkSettings()
    grouping: Grouping = Grouping()
    cluster: ClusterSettings = ClusterSettings()
    history: HistorySettings = HistorySettings()
    trackers: TrackerSettings = TrackerSettings()
    receivers: tuple[ReceiverSettings, ...] = ()
    routes: tuple[RouteSettings, ...] = ()
    heartbeat: HeartbeatSettings | None = None
    otlp: OtlpSettings | None = None


def path(named: Path | None = None) -> Path | None:
    """Return the settings file in force; None: there is none, and the defaults apply. Raises ConfigError where one is
    named and does not exist."""
    if named is None and os.environ.get("SENTINEL_CONFIG"):
        named = Path(os.environ["SENTINEL_CONFIG"])
    if named is not None:
        if not os.path.isfile(named):  # `Path.is_file` raises where a folder above may not be read
            raise ConfigError(f"{named}: no such settings file; `sentinel init` writes one")
        return named
    found = [Path("/etc/sentinel") / FILE]
    with contextlib.suppress(ConfigError):
        found.insert(0, home() / FILE)
    return next((place for place in found if os.path.isfile(place)), None)


def home() -> Path:
    """Return the folder of a user's own settings. Raises ConfigError where there is none: in a container a user may
    have no home, so `~` stays as it is and would be a folder in the working directory."""
    found = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "sentinel"
    if not found.is_absolute():
        raise ConfigError(
            f"{found}: no folder for settings of your own; set HOME or XDG_CONFIG_HOME to an absolute one"
        )
    return found


def own_file() -> Path:
    """Return the path of a user's own settings file, whether it exists or not. Raises ConfigError as `home` does."""
    named = os.environ.get("SENTINEL_CONFIG")
    return Path(named) if named else home() / FILE


def load(named: Path | None = None) -> Settings:
    """Read the settings in force. Raises ConfigError."""
    file = path(named)
    if file is None:
        return Settings()
    try:
        text = small_files.text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({_reason(error)})") from None
    return parse_settings(text, file)


def parse_settings(text: str, file: Path) -> Settings:
    """Return the settings in the text of a file. Raises ConfigError."""
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
        if (read := _READERS.get(kind)) is not None:
            return read(value)
        try:
            return folder / Path(value).expanduser()
        except RuntimeError:  # a user that is not known here, or one without a home, as in a container
            raise ValueError(f"{value!r}: there is no such home directory; write the path from the root") from None

    try:
        settings = msgspec.convert(content, Settings, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise ConfigError(_describe_error(str(error), text, file)) from None
    for mistake in mistakes(settings.receivers, settings.routes, settings.heartbeat, settings.otlp):
        raise ConfigError(f"{file}:{_line(text, mistake.table, mistake.number, mistake.key)}: {mistake.what}")
    return settings


_KINDS = {
    "object": "a table",
    "array": "a list in [ ]",
    "str": "text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
"""msgspec's names of kinds -> words for people."""


def _describe_error(error: str, text: str, file: Path) -> str:
    """Translate msgspec's message and path (`$.receivers[1].url`) into Sentinel's words and a line."""
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
        what = f"{what.removeprefix('Invalid enum value ')} is not one of {', '.join(SEVERITIES)}"
    missing = re.search(r"missing required field `([^`]+)`", what)
    if missing is not None:
        what = f"{missing[1]} is missing; add {missing[1]} = ..."
    named = re.match(r"(\w+): ", what)  # from a __post_init__ of these structs
    if named is None and unknown is None and missing is None:
        what = re.sub(r"`([^`]+)`", lambda kinds: " or ".join(_KINDS.get(k, k) for k in kinds[1].split(" | ")), what)
        what = f"{key or table}: {what[:1].lower()}{what[1:]}"
    line = _line(text, table or key or "", int(index or 0), named[1] if named else key if table else None)
    return f"{file}:{line}: {what[:1].lower()}{what[1:]}"


def _fields(table: str | None) -> tuple[str, ...]:
    tables: dict[str | None, type[msgspec.Struct]] = {
        "daemon": DaemonSettings,
        "links": LinkSettings,
        "grouping": Grouping,
        "cluster": ClusterSettings,
        "history": HistorySettings,
        "trackers": TrackerSettings,
        "heartbeat": HeartbeatSettings,
        "otlp": OtlpSettings,
        "receivers": ReceiverSettings,
        "routes": RouteSettings,
    }
    return tables.get(table, Settings).__struct_encode_fields__


def _line(text: str, table: str, index: int, key: str | None) -> int:
    """Return the line of a key in a table, or of the table's header if the key is not there; tomllib keeps no
    places."""
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


if not TYPE_CHECKING:  # a type checker would accept any name of this module

    def __getattr__(name: str) -> type[msgspec.Struct]:
        """Return classes by their names of version 0.1, which receivers of other packages may import."""
        renamed = {"Receiver": ReceiverSettings, "Route": RouteSettings}.get(name)
        if renamed is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"{__name__}.{name} is called {renamed.__name__} now", DeprecationWarning, stacklevel=2)
        return renamed
