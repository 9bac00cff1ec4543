"""The result of the opening examination: which rules could judge a run's first steps, and what fired in them.

A check is a rule with `from_start` that applies to the run. A check without enough samples is not done: the examination
had reached its limit (hooks/core/opening.py), or the run ended before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sentinel.engine import Rule, RuleStatus
from sentinel.signals import OPENING_STEPS
from sentinel.text import format_count


class OpeningReport(msgspec.Struct, frozen=True):
    """The result for one attempt."""

    steps: int
    """Number of steps that were judged."""
    unseen: int
    """Number of first steps that never reached the daemon."""
    checks: int
    missing: tuple[str, ...]
    """Checks that were not done."""
    found: tuple[str, ...]
    """Alerts that fired in these steps, of any rule."""
    offset: int = 0
    """The step that the attempt began with: of a run that goes on, with another optimizer or after a restart, the first
    steps are examined again."""

    @property
    def text(self) -> str:
        """The result in one line."""
        if not self.steps:
            return f"first {OPENING_STEPS} steps: not examined, as the first {self.unseen:,} steps were not seen"
        checks = format_count(self.checks, "check")
        parts = [checks, "found " + ", ".join(self.found) if self.found else "nothing found"]
        if self.missing:
            names = ", ".join(self.missing)
            parts.append(f"{len(self.missing)} of {checks} not done (too few samples): {names}")
        if self.unseen:
            parts.append(f"the first {self.unseen} were not seen")
        since = f" from step {self.offset:,} on" if self.offset else ""
        return f"first {self.unseen + self.steps} steps{since}: {parts[0]}, {'; '.join(parts[1:])}"


def make_opening_report(
    rules: Iterable[Rule], statuses: Iterable[RuleStatus], alerts: Sequence[str], *, first: int, last: int, offset: int
) -> OpeningReport:
    """Return the report from the `statuses` of rules and the `alerts` that fired; `first`, `last`: judged steps;
    `offset`: the step that the attempt began with."""
    if first >= OPENING_STEPS:
        return OpeningReport(steps=0, unseen=first, checks=0, missing=(), found=())
    checks = {rule.name: max(rule.for_.times, 1) for rule in rules if rule.from_start}  # samples to find anything
    judged, warming = set[str](), set[str]()
    for status in statuses:
        if status.rule not in checks:
            continue
        if status.judged >= checks[status.rule] and status.values:  # `absent(x)` is judged without any
            judged.add(status.rule)
        elif status.state == "warming" or (status.judged and status.values):
            warming.add(status.rule)
    return OpeningReport(
        steps=min(last + 1, OPENING_STEPS) - first,
        unseen=first,
        checks=len(judged | warming),
        missing=tuple(sorted(warming - judged)),
        found=tuple(dict.fromkeys(alerts)),
        offset=offset,
    )
