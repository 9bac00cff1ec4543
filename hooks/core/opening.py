"""Examines the first steps of a run, or of one of its stages, in full, whatever the budget.

What is wrong from the start shows there: a layer that gets no gradient, weights that no step moves, a format that is
too small. The examination has a limit of its own, and the limit wins: at most half of the time of any 16 steps, and 2 s
in all; where the user gave `overhead`, at most that share. Our part of a step counts as at most the processor time that
the thread used in it: the rest was another process's turn. A slow step (a compilation, an evaluation) counts as at most
0.125 s, or as four times the others if that is more: at its full time the samples of the next 16 steps would be free,
and soon use up the 2 s.

    steps 0 to 63       tiers 1 and 2 at each step, tier 3 at every 8th
    steps 64 to 511     tiers 1 and 2 at every 4th, 8th, 16th (twice as far apart each time the step number doubles)
    from step 512       as the governor allows
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from time import monotonic, thread_time

from sentinel.signals import OPENING_END, OPENING_STEPS

STEPS = OPENING_STEPS
"""Number of first steps at which tiers 1 and 2 are sampled every time."""
RARE_EVERY = 8
"""Steps between two samples of tier 3 among these."""
END = OPENING_END
"""First step at which only the governor's spacing holds."""
RESERVE = 0.25
"""Part of the share that only tier 3 may use: at its few steps the other tiers have spent the rest."""
STAGE_STEPS = 16
"""Number of first steps of a stage that are examined in full."""
STAGE_SECONDS = 600.0
"""Least seconds between two stages that are examined: curricula may change every few steps."""
SHARE = 0.5
"""Largest share of the time of any `WINDOW` steps."""
SECONDS = 2.0
"""Most seconds of the training thread's time, in all."""
WINDOW = 16
SLOW = 4.0
"""A step's time counts as at most this many times the window's median, or `SLOW_SECONDS` where that is more."""
SLOW_SECONDS = SECONDS / WINDOW
"""Seconds that any step's time may count as. Thus a step pays for at most a sixteenth of all that may be spent, and a
loop in which every tenth step is slow, as with rollouts, gets as many samples as its time allows."""
UNMARKED = 64
"""Steps after the examination that are marked 0: rules read every 5th step, and see there that it is over."""


class Opening:
    """Says at which of the first steps the costly tiers are sampled beyond the governor's spacing."""

    def __init__(self, share: float | None = None) -> None:
        """`share`: largest share of the loop's time that it may take, where that is less than `SHARE`."""
        self._share = SHARE if share is None else min(share, SHARE)
        self._first, self._full_steps = 0, STEPS
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW - 1)
        """(seconds of a step that were not ours, seconds that were ours), for the last steps."""
        self._spent = 0.0
        self._used = 0.0
        """Processor seconds of the training thread up to the last step."""
        self._stage_at = -STAGE_SECONDS
        self._taken, self._unmarked = -1, 0

    def begin_stage(self, seq: int) -> None:
        """Examine the stage that begins with step `seq`, unless the last examination was too recent."""
        if seq >= self._first + STEPS and monotonic() - self._stage_at >= STAGE_SECONDS:
            self._stage_at = monotonic()
            self._first, self._full_steps, self._spent, self._unmarked = seq, STAGE_STEPS, 0.0, 0
            self._window.clear()

    def is_over(self, seq: int) -> bool:
        """Whether step `seq` is after the examination."""
        return seq >= self._first + (END if self._full_steps == STEPS else STAGE_STEPS)

    def wants(self, tier: int, seq: int, expected: float) -> bool:
        """Whether a tier must be sampled at step `seq`, which takes about `expected` seconds with the tiers below it.
        False where that would exceed the limit."""
        if self.is_over(seq):
            return False
        at = seq - self._first
        if tier == 3:
            every = RARE_EVERY if at < self._full_steps else END
        else:
            every = 1 if at < self._full_steps else 4 << (at.bit_length() - STEPS.bit_length())
        share = self._share * (1.0 if tier == 3 else 1.0 - RESERVE)
        if at % every == 0 and self._affords(expected, share):
            self._taken = seq
            return True
        return False

    def forbids(self, expected: float) -> bool:
        """Whether a sample of about `expected` seconds exceeds the limit on all of them, or the share that the user
        gave. The usual share is not checked: step 0 was slow only for its cold caches."""
        given = 0.0 < self._share < SHARE
        return self._spent + expected > SECONDS or (given and not self._affords(expected, self._share))

    def mark(self, seq: int) -> float | None:
        """Return 1 for a step that is sampled because of the examination, so that its caches and memory are not typical
        of later steps; 0 for another; None long after the examination."""
        if self.is_over(seq):
            self._unmarked += 1
            return 0.0 if self._unmarked <= UNMARKED else None
        return float(self._share > 0.0 and (seq - self._first < self._full_steps or seq == self._taken))

    def record_first_step(self, own: float) -> None:
        """Record that the first step took `own` seconds of ours, with cold caches. They count in the total, and against
        a share that the user gave."""
        ours = self._count_own(own)
        self._spent += ours
        if self._share < SHARE:
            self._window.append((0.0, ours))

    def record_step(self, seq: int, seconds: float, own: float) -> None:
        """Record that step `seq` took `seconds`, `own` of them ours. Called on the training thread."""
        if self.is_over(seq):
            return
        ours = self._count_own(own)
        self._window.append((max(seconds - own, 0.0), ours))
        self._spent += ours

    def _count_own(self, own: float) -> float:
        """Return how many of the `own` seconds of ours since the last step count."""
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
