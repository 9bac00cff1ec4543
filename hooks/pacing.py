"""How often the costly statistics are taken, so that all of it stays within its share of the loop's time.

Spacings are powers of two and a tier is taken where seq % k == 0, so that every schedule holds the coarser ones: ranks
that chose differently still meet. Tier 0 is taken at every step.
"""

from __future__ import annotations

DECIDE_EVERY = 50
"""Steps between two decisions."""
FIRST = {1: 1, 2: 8}
"""Spacing by tier until the cost has been measured."""
COARSEST = 64
ATTENTION = 50
"""Steps for which everything is sampled after a value that was not finite."""
_NEWEST = 0.25
"""Weight of the newest measurement in the running mean of a tier's cost."""


class Pacing:
    """Chooses the spacings of tiers 1 and 2. Fed by the thread that trains; `attend`, `order`, `sent` come from any."""

    def __init__(self, overhead: float) -> None:
        self.spacing = dict(FIRST)
        self.cost = 0.0
        """Share of the loop's time that hooks and sender took, over the last `DECIDE_EVERY` steps."""
        self._overhead = overhead
        self._means: dict[int, list[float]] = {1: [], 2: []}
        self._attend_until = -1
        self._order: tuple[int, dict[int, int]] | None = None
        self._governed = True
        self._sender_seconds = 0.0
        self._begin()

    def _begin(self) -> None:
        self._steps, self._loop, self._own, self._tiers, self._sender = 0, 0.0, 0.0, 0.0, self._sender_seconds

    def due(self, tier: int, seq: int) -> bool:
        """Whether this tier is to be sampled at this step."""
        return seq <= self._attend_until or seq % self.spacing[tier] == 0

    def attend(self, seq: int, steps: int = ATTENTION) -> None:
        """Sample everything from `seq` on, for `steps` steps."""
        self._attend_until = max(self._attend_until, seq + steps - 1)

    def order(self, at: int, tiers: dict[int, int]) -> None:
        """The daemon's word: one spacing for all ranks from step `at` on. From then on this rank does not decide."""
        self._order = (at, {tier: max(every, 1) for tier, every in tiers.items()})

    def sent(self, seconds: float) -> None:
        """The sender's thread used `seconds` of CPU."""
        self._sender_seconds += seconds

    def sampled(self, tier: int, seconds: float) -> None:
        """One sample of a tier took `seconds`."""
        self._tiers += seconds
        mean = self._means[tier]
        if len(mean) < 2:  # the first sample pays for cold caches, and is forgotten when there is a second
            mean.append(seconds)
        else:
            mean[1] += _NEWEST * (seconds - mean[1])

    def stepped(self, seq: int, loop: float, own: float) -> None:
        """Step `seq` took `loop` seconds, `own` of them ours."""
        if self._order is not None and seq + 1 >= self._order[0]:
            self.spacing.update(self._order[1])
            self._order, self._governed = None, False
        self._steps += 1
        self._loop += loop
        self._own += own
        if self._steps == DECIDE_EVERY:
            self._decide()
            self._begin()

    def _decide(self) -> None:
        sender = self._sender_seconds - self._sender
        if self._loop <= 0.0:
            return
        self.cost = (self._own + sender) / self._loop
        if not self._governed:
            return
        fixed = self._own - self._tiers + sender
        budget = (self._overhead * (self._loop - self._own) - fixed) / self._steps
        for tier, mean in self._means.items():
            if mean:
                self.spacing[tier] = coarsened(mean[-1], budget / len(self._means))


def coarsened(seconds: float, budget: float) -> int:
    """The closest spacing, a power of two up to `COARSEST`, at which a sample of `seconds` costs `budget` a step."""
    spacing = 1
    while spacing < COARSEST and seconds > budget * spacing:
        spacing *= 2
    return spacing
