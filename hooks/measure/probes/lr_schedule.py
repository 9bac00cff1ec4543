"""At the first step: whether the scheduler had been stepped before it, so that each rate comes one step too early.

Only the first step tells: from then on `scheduler.step(); optimizer.step()` and the right order look alike. So it is
asked only where the rate differs from the one at attach; the scheduler itself then says how often it was stepped. One
that was stepped several times was brought to where a resumed run goes on.

And where the rate is 0 after some steps: how often its scheduler was stepped by then.
"""

from __future__ import annotations

from typing import Any

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import discovery

_ONCE = 2
"""`_step_count` of a scheduler that was stepped once: it steps itself when it is made."""
_LOOK = 8
"""The step after which a rate of 0 is looked into: a warm-up's first one may be, and SchedulerMisused fires at 16."""


class LrSchedule(Probe):
    """`scheduler_first`: the rate that the first step should have had, by the schedule; none where it had it.
    `scheduler_steps`: how often the scheduler was stepped; -1: there is none; none where the rate is over 0."""

    tier = 3

    def __init__(self, optimizer: Any) -> None:
        """At the attach."""
        self._planned = _rates(optimizer)
        self._early = False

    def enter(self, step: Step) -> None:
        if step.seq == 0:
            moved = self._planned and _rates(step.optimizer) != self._planned and not step.optimizer.state
            self._early = bool(moved) and _was_scheduler_stepped(step.optimizer)

    def after(self, step: Step) -> None:
        if step.seq == 0 and self._early:
            step.values["scheduler_first"] = max(self._planned, default=0.0)

    def over(self, step: Step) -> None:
        if step.seq == _LOOK:
            rates = [group["lr"] for group in step.optimizer.param_groups]
            if all(isinstance(rate, float | int) and rate == 0 for rate in rates):
                _, schedulers = discovery.bystanders([step.optimizer])
                counts = [getattr(one, "_step_count", 1) - 1 for one in schedulers]
                step.values["scheduler_steps"] = float(max(counts, default=-1))


def _rates(optimizer: Any) -> list[float]:
    """Of the groups that a scheduler looks after; those on a device are not asked."""
    groups = [group for group in optimizer.param_groups if "initial_lr" in group]
    return [group["lr"] for group in groups if isinstance(group["lr"], float)]


def _was_scheduler_stepped(optimizer: Any) -> bool:
    _, schedulers = discovery.bystanders([optimizer])
    return any(getattr(one, "_step_count", 0) == _ONCE and getattr(one, "last_epoch", 0) > 0 for one in schedulers)
