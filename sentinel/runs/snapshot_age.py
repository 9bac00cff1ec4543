"""The age of the newest good snapshot: as in a daemon's status, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sentinel.wire import RollbackTerms


class SnapshotAge(msgspec.Struct, frozen=True):
    """What a rollback of an armed run would go back to now."""

    newest_good: int | None
    """Seq of the newest good snapshot; None where there is none."""
    steps: int
    """Steps since it was taken; without one, since the first step of the attempt or its stage."""


def age_limit(terms: RollbackTerms) -> int:
    """Return the age in steps from which a newest good snapshot is stale. A snapshot is good after `margin` steps, and
    the next comes `every` steps later: with a margin over `every`, an age of three times `every` may be normal."""
    return max(3 * terms.every, terms.margin + 2 * terms.every)


def in_words(rollback: Mapping[str, Any]) -> str:
    """Describe a run's `rollback` from a daemon's status; empty where none is armed, or an older daemon does not send
    it."""
    if not rollback["armed"] or rollback.get("age_steps") is None:
        return ""
    newest, ago = rollback["newest_good"], f"{rollback['age_steps']:,} steps"
    said = f"none in {ago}" if newest is None else f"step {newest:,}, {ago} ago"
    withheld = ", ".join(rollback["withheld_by"])
    return f"newest good snapshot: {said}" + (f"; none is taken because of {withheld}" if withheld else "")
