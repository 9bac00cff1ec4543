"""Text from a run, made fit for terminals and other people's programs."""

from __future__ import annotations

from sentinel.text import drop_controls


def cut(text: str, limit: int) -> str:
    """`text`, plain, in at most `limit` UTF-16 units, as JavaScript and Java count; an ellipsis where it was longer."""
    units = drop_controls(text).encode("utf-16-le")
    if len(units) <= 2 * limit:
        return units.decode("utf-16-le")
    return units[: 2 * (limit - 1)].decode("utf-16-le", "ignore") + "\u2026"  # half a pair is ignored
