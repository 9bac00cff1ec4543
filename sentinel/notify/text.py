"""Text from a run, made fit for terminals and other people's programs."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (a terminal obeys ESC), marks that turn the direction of what follows, and lone surrogates, which
UTF-8 cannot carry. Tab and line feed stay."""


def plain(text: str) -> str:
    """`text` without them."""
    return _CONTROL.sub("", text)


def cut(text: str, limit: int) -> str:
    """`text`, plain, in at most `limit` UTF-16 units, as JavaScript and Java count; an ellipsis where it was longer."""
    units = plain(text).encode("utf-16-le")
    if len(units) <= 2 * limit:
        return units.decode("utf-16-le")
    return units[: 2 * (limit - 1)].decode("utf-16-le", "ignore") + "\u2026"  # half a pair is ignored
