"""One spacing for all ranks of a run: the coarsest that any of them wants, from a step that is ahead of all.

Each rank's governor says what it would choose for itself (`Pace.wanted`); a rank that is slower, or has more to do,
wants a coarser spacing. Ranks sampled at the same steps can be compared, and none waits for another that samples more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sentinel import wire
from sentinel.runs import Attempt, Rank, RankLink
from sentinel.signals import TIERS

BETWEEN_SECONDS = 1.0
"""Seconds between two looks."""
PATIENCE_SECONDS = 10.0
"""Seconds for which a finer spacing must have been enough for all ranks before it is ordered. A coarser one is ordered
at once: a rank exceeds the budget."""
LEAD_SECONDS = 1.0
"""Least seconds before an order takes effect, so that all ranks have it by then."""
LEAD_STEPS = 8
"""Least steps ahead of the furthest rank at which an order takes effect."""


class Spacings:
    """Orders the spacing for the ranks of one attempt. A single rank governs itself."""

    def __init__(self, attempt: Attempt, link: RankLink) -> None:
        self._attempt, self._link = attempt, link
        self.ordered: wire.Spacing | None = None
        """The last order."""
        self._next_look = 0.0
        self._finer_since: float | None = None

    def tick(self, now: float) -> None:
        """Order another spacing if needed; called several times a second, with `now` in monotonic seconds."""
        if now < self._next_look:
            return
        self._next_look = now + BETWEEN_SECONDS
        ranks = self._attempt.live
        if len(ranks) < 2 or not all(rank.pace.wanted for rank in ranks):
            return
        coarsest = self._coarsest(ranks)
        if not self._is_finer(coarsest):
            self._finer_since = None
        elif self._finer_since is None:
            self._finer_since = now
        if self._finer_since is not None and now - self._finer_since < PATIENCE_SECONDS:
            coarsest = self.ordered.tiers if self.ordered else coarsest
        if any(self._astray(rank, coarsest) for rank in ranks):
            self._order(ranks, coarsest)

    def _coarsest(self, ranks: Sequence[Rank]) -> dict[str, int]:
        tiers = sorted({tier for rank in ranks for tier in rank.pace.wanted})
        return {tier: max(rank.pace.wanted.get(tier, 1) for rank in ranks) for tier in tiers}

    def _is_finer(self, tiers: dict[str, int]) -> bool:
        """Whether these spacings are finer than the last order in one tier, and coarser in none."""
        if self.ordered is None:
            return False
        now = self.ordered.tiers
        return tiers != now and all(every <= now.get(tier, 0) for tier, every in tiers.items())

    def _astray(self, rank: Rank, tiers: dict[str, int]) -> bool:
        """Whether a rank uses another spacing, and has passed the step at which an order changes it."""
        # Only tiers that the rank has are compared: a rank of another version may know others.
        if all(tiers.get(tier, every) == every for tier, every in rank.pace.spacing.items()):
            return False
        under_way = self.ordered is not None and self.ordered.tiers == tiers and rank.last_seq <= self.ordered.at
        return not under_way

    def _order(self, ranks: Sequence[Rank], tiers: dict[str, int]) -> None:
        lead = max(LEAD_STEPS, math.ceil(LEAD_SECONDS / max(self._attempt.step_seconds(), 1e-4)))
        self.ordered = wire.Spacing(at=self._attempt.last_seq + lead, tiers=tiers)
        self._finer_since = None
        for rank in ranks:
            self._link.send(rank.identity.rank, self.ordered)


def describe_spacing(spacing: Mapping[str, int]) -> str:
    """Return in one line how often each tier of a `Pace.spacing` is sampled, in words. Unknown tiers, of a rank of
    another version, are left out."""
    words = {"": "the loss", **{str(tier): name for tier, name in enumerate(TIERS)}}
    return ", ".join(
        f"{words[tier]} at every step" if every == 1 else f"{words[tier]} every {every:,} steps"
        for tier, every in sorted({"": 1, **spacing}.items())
        if tier in words
    )
