"""A governor without the examination of the first steps, for tests of all else that it decides."""

from __future__ import annotations

from sentinel.hooks.core.governor import OVERHEAD, Governor
from sentinel.hooks.core.opening import Opening


class NoOpening(Opening):
    """Wants no sample, forbids none, and is over from the start."""

    def is_over(self, seq: int) -> bool:
        return True

    def forbids(self, expected: float) -> bool:
        return False

    def mark(self, seq: int) -> float | None:
        return None


def make_governor(overhead: float = OVERHEAD, *, norm_first: bool = False) -> Governor:
    return Governor(overhead, NoOpening(), norm_first=norm_first)
