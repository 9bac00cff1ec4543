"""The first steps of a run, or of one of its stages, are looked at whole, whatever the budget.

What is wrong from the start shows there: a layer that gets no gradient, weights that no step moves, a format that is
too small. The examination has a limit of its own, and the limit wins: at most half of any 16 steps' time and 2 s in
all; where the user gave `overhead`, at most that. What is ours of a step counts as at most the processor's time that
the thread had in it: the rest was the turn of another process. A slow step (a compilation, an evaluation) counts as at
most 0.125 s, or as four of the others if that is more: by its own time the samples of the next 16 would be free, and
soon use up the 2 s.

    steps 0 to 63       tiers 1 and 2 at each, tier 3 at every 8th
    steps 64 to 511     tiers 1 and 2 at every 4th, 8th, 16th (twice as far apart each time the step number doubles)
    from step 512       what the governor allows
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from time import monotonic, thread_time

from sentinel.signals import OPENING_END, OPENING_STEPS

STEPS = OPENING_STEPS
"""Steps at which tiers 1 and 2 are sampled each time."""
RARE_EVERY = 8
"""Steps between two samples of tier 3 in them."""
END = OPENING_END
"""From here on the governor's spacing holds."""
RESERVE = 0.25
"""Part of the share that only tier 3 may use: at its few steps the others have spent the rest."""
STAGE_STEPS = 16
"""Steps that are looked at whole where a stage begins."""
STAGE_SECONDS = 600.0
"""Between two stages that get that: curricula may change at every few steps."""
SHARE = 0.5
"""Most of the time of any `WINDOW` steps."""
SECONDS = 2.0
"""Most of the time of the thread that trains, in all."""
WINDOW = 16
SLOW = 4.0
"""Times the median of the window that a step's time counts for at most, or `SLOW_SECONDS` where that is more."""
SLOW_SECONDS = SECONDS / WINDOW
"""So a step buys at most a sixteenth of all that may be spent, and a loop of which each tenth step is slow, as of
rollouts, has as many samples as its time allows."""
UNMARKED = 64
"""Steps that are said to be none of its own, once it is over: rules look at every 5th, and learn of it there."""


class Opening:
    """Says at which of the first steps the costly tiers are sampled beyond the governor's spacing."""

    def __init__(self, share: float | None = None) -> None:
        """`share`: most of the loop's time that it may take, where that is less than `SHARE`."""
        self._share = SHARE if share is None else min(share, SHARE)
        self._first, self._whole = 0, STEPS
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW - 1)
        """(seconds of a step that were not ours, seconds that were)."""
        self._spent = 0.0
        self._used = 0.0
        """Of the processor's time, by the thread that trains, up to the last step."""
        self._stage_at = -STAGE_SECONDS
        self._taken, self._unmarked = -1, 0

    def begin_stage(self, seq: int) -> None:
        """A stage begins with step `seq`."""
        if seq >= self._first + STEPS and monotonic() - self._stage_at >= STAGE_SECONDS:
            self._stage_at = monotonic()
            self._first, self._whole, self._spent, self._unmarked = seq, STAGE_STEPS, 0.0, 0
            self._window.clear()

    def is_over(self, seq: int) -> bool:
        """Whether step `seq` is after the examination."""
        return seq >= self._first + (END if self._whole == STEPS else STAGE_STEPS)

    def wants(self, tier: int, seq: int, expected: float) -> bool:
        """Whether a tier is to be sampled at step `seq`, which takes about `expected` seconds with the tiers below it.
        Never where it would go over the limit."""
        if self.is_over(seq):
            return False
        at = seq - self._first
        if tier == 3:
            every = RARE_EVERY if at < self._whole else END
        else:
            every = 1 if at < self._whole else 4 << (at.bit_length() - STEPS.bit_length())
        share = self._share * (1.0 if tier == 3 else 1.0 - RESERVE)
        if at % every == 0 and self._affords(expected, share):
            self._taken = seq
            return True
        return False

    def forbids(self, expected: float) -> bool:
        """Whether a sample of about `expected` seconds goes over the limit of them all, or over the share that the user
        gave. What the usual share affords is not asked: step 0 was slow for its cold caches."""
        given = 0.0 < self._share < SHARE
        return self._spent + expected > SECONDS or (given and not self._affords(expected, self._share))

    def mark(self, seq: int) -> float | None:
        """1 for a step that is looked at because of it, which costs caches and memory and is no measure for later ones;
        0 for another; None long after it."""
        if self.is_over(seq):
            self._unmarked += 1
            return 0.0 if self._unmarked <= UNMARKED else None
        return float(self._share > 0.0 and (seq - self._first < self._whole or seq == self._taken))

    def record_first_step(self, own: float) -> None:
        """The first step took `own` seconds of ours, cold as caches are. It counts in the total, and against a share
        that the user gave."""
        ours = self._count_own(own)
        self._spent += ours
        if self._share < SHARE:
            self._window.append((0.0, ours))

    def record_step(self, seq: int, seconds: float, own: float) -> None:
        """Step `seq` took `seconds`, `own` of them ours. Called by the thread that trains."""
        if self.is_over(seq):
            return
        ours = self._count_own(own)
        self._window.append((max(seconds - own, 0.0), ours))
        self._spent += ours

    def _count_own(self, own: float) -> float:
        """Of `own` seconds of ours since the last step, those that count."""
        before, self._used = self._used, thread_time()
        return min(own, max(self._used - before, 0.0))

    def _affords(self, expected: float, share: float) -> bool:
        if self._spent + expected > SECONDS:
            return False
        if not self._window:
            return share > 0.0
        own = expected + sum(ours for _, ours in self._window)
        most = max(SLOW * median_low(bare for bare, _ in self._window), SLOW_SECONDS)
        bare = [min(bare, most) for bare, _ in self._window]
        return own <= share * (own + sum(bare) + sum(bare) / len(bare))
