"""The settings of OTLP export, and the environment variables that OpenTelemetry defines for it.

opentelemetry.io/docs/specs/otel/protocol/exporter has the variables. They alone cause nothing to be sent: a settings
file asks for it, by `[otlp]` or by a receiver.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple
from urllib.parse import unquote

from sentinel.config.links import is_http
from sentinel.config.quantities import Duration
from sentinel.config.receivers import Endpoint
from sentinel.errors import ConfigError

Signal = Literal["metrics", "traces", "logs"]

DEFAULT = "http://localhost:4318"
"""Address of a collector that speaks HTTP, by the specification."""
INSTALL = "pip install 'training-sentinel[otlp]'"
_PREFIX = "OTEL_EXPORTER_OTLP_"


class OtlpSettings(Endpoint, frozen=True, kw_only=True):
    """`[otlp]`: metrics and spans, pushed to an OpenTelemetry collector."""

    signals: tuple[Literal["metrics", "traces"], ...] = ("metrics", "traces")
    """Signals that are sent. Incidents go to a receiver."""
    interval: Duration = Duration(60)
    timeout: Duration | None = None
    """Time for one request, including the answer. None: as in the environment, else 10 s."""


class Export(NamedTuple):
    """Where one signal is sent, and how."""

    url: str
    headers: dict[str, str]
    compressed: bool
    timeout: float | None
    """Seconds that the environment allows; None: it does not say."""


def find_export(settings: Endpoint, signal: Signal) -> Export:
    """Return the export of a signal, read now: from the settings, else from the environment. Raises ConfigError, which
    shows no secret."""
    variable, compression = _read(signal, "COMPRESSION")
    if compression not in ("", "none", "gzip"):
        raise ConfigError(f"{variable} is {compression!r}; there are: gzip, none")
    if settings.has_address:
        url = f"{settings.address().rstrip('/')}/v1/{signal}"
    else:
        variable, protocol = _read(signal, "PROTOCOL")
        if protocol not in ("", "http/protobuf"):
            what = f"{variable} is {protocol!r}, and Sentinel speaks http/protobuf"
            raise ConfigError(f"{what}; name the collector's port for that: url = {DEFAULT!r}")
        url = _read_url(signal)
    headers = {**_read_headers(signal), **settings.authorization()}
    return Export(url, headers, compression == "gzip", _read_timeout(signal))


def read_resource() -> dict[str, str]:
    """Return the attributes of the sender, from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME."""
    named = _read_pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    service = os.environ.get("OTEL_SERVICE_NAME") or named.get("service.name") or "sentinel"
    return {**named, "service.name": service}


def _read(signal: Signal, name: str) -> tuple[str, str]:
    """Return the variable that applies, and its value: the signal's own variable precedes the common one."""
    for variable in (f"{_PREFIX}{signal.upper()}_{name}", f"{_PREFIX}{name}"):
        if value := os.environ.get(variable, "").strip():
            return variable, value
    return f"{_PREFIX}{name}", ""


def _read_url(signal: Signal) -> str:
    variable, url = _read(signal, "ENDPOINT")
    if url and not is_http(url):
        raise ConfigError(f"{variable} holds no http:// or https:// URL")
    if url and signal.upper() in variable:
        return url  # as it stands: the specification adds the path only to the common one
    return f"{(url or DEFAULT).rstrip('/')}/v1/{signal}"


def _read_headers(signal: Signal) -> dict[str, str]:
    variable, text = _read(signal, "HEADERS")
    found = _read_pairs(text)
    if not all(part.isascii() and part.isprintable() for pair in found.items() for part in pair):
        raise ConfigError(f"{variable} holds a line end or a character that no header has")
    return found


def _read_timeout(signal: Signal) -> float | None:
    variable, text = _read(signal, "TIMEOUT")
    if text and not (text.isascii() and text.isdecimal() and int(text)):
        raise ConfigError(f"{variable} holds no number of milliseconds")
    return int(text) / 1000 if text else None


def _read_pairs(text: str) -> dict[str, str]:
    """Read `key=value,key=value`, percent-encoded (W3C Baggage)."""
    pairs = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {unquote(key.strip()): unquote(value.strip()) for key, _, value in pairs}
