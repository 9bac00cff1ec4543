"""Read quantities as they are written in settings and on the command line."""

from __future__ import annotations

import re

_SIZES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB|TB)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_RATE = re.compile(r"(\d+) per (\d*[a-z]+)")


class Duration(float):
    """Seconds, written `500ms`, `90s`, `5m`, `2h`, `1d`."""


class Size(float):
    """Bytes, written `500MB`, `10GB`."""


class Rate(str):
    """A number per time, written `20 per 1h`."""

    most: int
    seconds: float


def duration(text: str) -> Duration:
    """Read a duration. Raises ValueError with a message for people."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no duration; write 90s, 5m, 2h or 1d")
    return Duration(float(found[1]) * _SECONDS[found[2]])


def size(text: str) -> Size:
    """Read a size. Raises ValueError with a message for people."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write 500MB or 10GB")
    return Size(float(found[1]) * _SIZES[found[2]])


def rate(text: str) -> Rate:
    """Read a rate. Raises ValueError with a message for people."""
    found = _RATE.fullmatch(text.strip())
    made = Rate(text)
    try:
        made.most, made.seconds = int(found[1]), duration(found[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is no rate; write 20 per 1h") from None
    if not made.most or not made.seconds:
        raise ValueError(f"{text!r} lets nothing through; write 20 per 1h")
    return made
