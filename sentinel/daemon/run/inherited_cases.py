"""Open cases of an earlier daemon whose rules this daemon has not judged yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sentinel.daemon.run.incident_log import find_number
from sentinel.diagnose.case import Case
from sentinel.engine import Entity, Evaluator, Observation, Rule, Transition


class InheritedCases:
    """Cases of rules whose state is lost, kept open until each rule says whether its case goes on.

    Such rules read measurements between steps, which cannot be judged again from the history.
    """

    def __init__(self, cases: Iterable[Case] = (), seq: int = -1, time: float = 0.0) -> None:
        """`seq`, `time`: the step and the time of the run at which the cases were taken over."""
        self._cases = {case.alert: case for case in cases}
        self._seq, self._time = seq, time

    def continue_in(self, found: Transition) -> bool:
        """Return whether what a rule found is one of these cases; if so, its incident gets the case's number."""
        case = self._cases.pop(found.incident.rule, None) if found.kind == "fired" else None
        if case is not None:
            found.incident.id = find_number(case)
        return case is not None

    def remove_ended(self, measured: Observation, rules: Sequence[Rule], evaluator: Evaluator) -> Iterator[Case]:
        """Remove and return the cases whose rules have judged all members with this measurement, and find nothing."""
        if not self._cases:
            return
        names = {name for values in measured.values.values() for name in values}
        for rule in rules:
            case = self._cases.get(rule.name)
            kept_up = not rule.keep_firing.is_reached(measured.seq - self._seq, measured.time - self._time)
            if case is None or kept_up or rule.metrics.isdisjoint(names):
                continue
            rows = (row for row in evaluator.status() if row.rule == rule.name)
            inactive = {row.entity for row in rows if row.state == "inactive"}
            if all(Entity(member.scope, member.name) in inactive for member in case.members):
                yield self._cases.pop(rule.name)

    def remove(self, rules: Iterable[str]) -> list[Case]:
        """Remove and return the cases of these rules: they are not judged here any more."""
        return [self._cases.pop(rule) for rule in self._cases.keys() & set(rules)]
