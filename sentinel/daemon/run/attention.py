"""Has the ranks sample every step, and take no snapshots, while rules are pending or firing.

Only rules that may roll back withhold snapshots: an alert on slow data says nothing against the weights. Sampling is
bounded for each rule, since an alert may stay open for the rest of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sentinel import wire
from sentinel.runs import Attempt, RankLink

ATTEND_STEPS = 50
"""Least number of steps that one message is valid for."""
ATTEND_SECONDS = 1.0
"""Least seconds that it is valid for: in a loop of 1 ms steps, 50 of them are over before the next batch arrives."""
MESSAGES = 10
"""Most messages' worth of steps that are sampled closely for one rule: from its first sign to its evidence."""
RECOVERY_STEPS = 10
"""Steps without a sign of a rule that restore one step of its sampling."""


class Attention:
    """Directs the ranks of one attempt."""

    def __init__(self, attempt: Attempt, link: RankLink) -> None:
        self._attempt, self._link = attempt, link
        self._attending_until = self._withheld_until = self._last = -1
        self._spent: dict[str, int] = {}
        """Steps that were sampled closely for each rule, less those that were restored."""

    def advance(
        self, seq: int, suspicions: Sequence[str], withheld_by: Sequence[str], rare: Sequence[str] = ()
    ) -> None:
        """Send the ranks what follows from the steps judged up to `seq`.

        `suspicions`: rules that need samples; `withheld_by`: rules that roll back or may do so soon; `rare`: those of
        the suspicions that tier 3 decides.
        """
        steps = max(ATTEND_STEPS, math.ceil(ATTEND_SECONDS / max(self._attempt.step_seconds(), 1e-4)))
        self._recover(seq, suspicions)
        limit = MESSAGES * steps
        short = {name for name in suspicions if self._spent.get(name, 0) < limit}
        if seq >= self._attending_until - steps // 2 and short:
            added = steps + min(seq - self._attending_until, 0)
            self._spent.update({name: self._spent.get(name, 0) + added for name in suspicions})
            self._attending_until = seq + steps
            self._broadcast(wire.Attend(steps=steps, rare=not short.isdisjoint(rare)))
        self._attempt.withheld_by = tuple(withheld_by)
        if withheld_by and seq >= self._withheld_until - steps // 2:
            self._withheld_until = seq + steps
            self._broadcast(wire.Withhold(steps=steps))
        elif not withheld_by and seq < self._withheld_until:
            self._withheld_until = seq
            self._broadcast(wire.Withhold(steps=0))

    def _recover(self, seq: int, suspicions: Sequence[str]) -> None:
        turns = seq // RECOVERY_STEPS - self._last // RECOVERY_STEPS
        self._last = seq
        for name in self._spent.keys() - suspicions if turns else ():
            self._spent[name] = max(self._spent[name] - turns, 0)

    def _broadcast(self, message: wire.Message) -> None:
        for rank in self._attempt.live:
            self._link.send(rank.identity.rank, message)
