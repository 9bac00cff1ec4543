"""`a, b, c and 61 more`: the first of many names, as they stand in a sentence."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int, total: int = 0) -> str:
    """The first `most` names, and how many more there are. `total`: how many there are, where `names` has not all."""
    total = max(total, len(names))
    return ", ".join(names[:most]) + (f" and {total - most} more" if total > most else "")
