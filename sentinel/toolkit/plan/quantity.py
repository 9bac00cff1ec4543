"""Reads and writes sizes and counts as people write them."""

from __future__ import annotations

import re

from sentinel.errors import ConfigError

_FORM = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MOST = 1e18


def parse_bytes(text: str) -> int:
    """Return the bytes of "80GB", "24 GiB", "8e10". Raises ConfigError."""
    return _parse_quantity(text, _BYTES, "a size, such as 80GB or 24GiB")


def parse_count(text: str) -> int:
    """Return the number in "7.5e9", "7.5B", "350M". Raises ConfigError."""
    return _parse_quantity(text, _COUNTS, "a number, such as 7.5e9, 7.5B or 350M")


def _parse_quantity(text: str, units: dict[str, int], wanted: str) -> int:
    match = _FORM.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ConfigError(f"{text!r} is not {wanted}")
    value = float(match[1]) * units[match[2].lower()]
    if not 1 <= value <= _MOST:
        raise ConfigError(f"{text!r} is out of range: {wanted}, from 1 to 1e18")
    return round(value)


def readable_count(number: float) -> str:
    """Return a count with three digits: 7.5 B, 350 M."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"
