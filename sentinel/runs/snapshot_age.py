"""How old the newest good snapshot is: as a daemon's status has it, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sentinel.wire import RollbackTerms


class SnapshotAge(msgspec.Struct, frozen=True):
    """Of an armed run: what a rollback would go back to now."""

    newest_good: int | None
    """Seq of the newest good snapshot; None where there is none."""
    steps: int
    """Since it was taken; without one since the first step of the attempt, or of its stage."""


def age_limit(terms: RollbackTerms) -> int:
    """The age in steps from which a newest good snapshot is stale. Good is one after `margin` steps, and the next comes
    `every` steps later: with a margin over `every`, three times `every` may be nothing unusual."""
    return max(3 * terms.every, terms.margin + 2 * terms.every)


def in_words(rollback: Mapping[str, Any]) -> str:
    """Of a run's `rollback` in a daemon's status; empty where none is armed, or an older daemon does not say."""
    if not rollback["armed"] or rollback.get("age_steps") is None:
        return ""
    newest, ago = rollback["newest_good"], f"{rollback['age_steps']:,} steps"
    said = f"none in {ago}" if newest is None else f"step {newest:,}, {ago} ago"
    withheld = ", ".join(rollback["withheld_by"])
    return f"newest good snapshot: {said}" + (f"; none is taken because of {withheld}" if withheld else "")
