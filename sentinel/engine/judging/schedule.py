"""Find the rules to which a step can be news, by what was sampled: most rules have nothing to do at most steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from sentinel.engine.expressions.plan import list_wanted
from sentinel.engine.judging.rule_state import RuleState
from sentinel.engine.observation import Entity, ObservedStep
from sentinel.engine.rules.rule import Rule, plans_of

LIMIT = 512
"""Sets of metrics sampled together, at most, whose rules are remembered. A run has as many sets as its spacings
differ."""

FEW = 4
"""Entities in one step, at most, for which rules are remembered by the entities' names and metrics."""

Due = tuple[Rule, RuleState, bool, bool]
"""A rule with its state; whether it rests: nothing that it reads was sampled, and unless an incident is open or an
entity timed nothing can change; and whether it may be idle: `RuleState.idle` has to be asked."""


class Schedule:
    """Finds the rules that have something to judge in a step, and remembers them by what was sampled."""

    def __init__(self, rules: Sequence[Rule], states: Sequence[RuleState]) -> None:
        self._all = list(zip(rules, states, strict=True))
        self._read = [set[str]().union(*(plan.metrics for plan in plans_of([rule]))) for rule in rules]
        self._wanted = list_wanted(plans_of(rules))
        self._known: set[Entity] = set()
        self._tabled: tuple[Entity, ...] = ()
        """The entities of the last table, all of which are known."""
        self._due: dict[frozenset[str], list[Due]] = {}
        self._alike: dict[tuple[object, ...], list[Due]] = {}
        """The due rules, by the (known) entities that have samples and by their metrics."""

    def due(self, step: ObservedStep) -> list[Due]:
        """Return the rules over a metric that has a sample, and those that read the time; if an entity is new, all
        other rules too, except those that count or choose their samples."""
        if step.table is not None or len(step.values) > FEW:
            return self._due_by_metrics(step)
        key = (*step.values, *map(tuple, step.values.values()))
        due = self._alike.get(key)
        if due is None:
            if self._meets(step):
                return self._list_due(self._list_sampled(step), whole=True)
            if len(self._alike) >= LIMIT:
                self._alike.clear()
            due = self._alike[key] = [
                (rule, state, rests, may_idle and not _has_samples(rule, step))
                for rule, state, rests, may_idle in self._due_by_metrics(step)
            ]
        return due

    def _due_by_metrics(self, step: ObservedStep) -> list[Due]:
        seen = self._list_sampled(step)
        if self._meets(step):
            return self._list_due(seen, whole=True)
        due = self._due.get(seen)
        if due is None:
            if len(self._due) >= LIMIT:
                self._due.clear()
            due = self._due[seen] = self._list_due(seen)
        return due

    def _meets(self, step: ObservedStep) -> bool:
        """Return whether an entity appears for the first time."""
        known = len(self._known)
        if not step.values.keys() <= self._known:
            self._known |= step.values.keys()
        if step.table is not None and step.table.entities is not self._tabled:
            self._tabled = step.table.entities
            self._known.update(self._tabled)
        return len(self._known) > known

    def _list_sampled(self, step: ObservedStep) -> frozenset[str]:
        """Return the metrics of the rules for which some entity has a sample."""
        seen: set[str] = set()
        for scope, group in step.groups():
            names = self._wanted[scope]
            if len(group) == 1:
                seen |= names & group[0][1].keys()
            else:
                seen.update(name for name in names if step.column(scope, name).count(None) < len(group))
        if step.table is not None:
            seen |= self._wanted[step.table.scope] & step.table.columns.keys()
        return frozenset(seen)

    def _list_due(self, seen: Set[str], whole: bool = False) -> list[Due]:
        due = []
        for (rule, state), read in zip(self._all, self._read, strict=True):
            fresh = not read.isdisjoint(seen)
            if not seen.isdisjoint(rule.at) if rule.at else fresh or (rule.every == 1 and (whole or rule.always)):
                due.append((rule, state, not fresh and not whole and rule.may_rest, rule.condition.plan.always))
        return due

    def list_rules_over(self, metrics: Iterable[str]) -> list[Due]:
        """Return the rules over one of these metrics, or that use the steps at which one has a sample."""
        measured = set(metrics)
        return [
            (rule, state, False, rule.condition.plan.always)
            for rule, state in self._all
            if not measured.isdisjoint(rule.at or rule.metrics)
        ]


def _has_samples(rule: Rule, step: ObservedStep) -> bool:
    """Return whether any entity of the rule has a sample for it: then it is not idle."""
    plan = rule.condition.plan
    return any(not plan.reads.isdisjoint(values) for _, values in step.list_sampled(plan.scope))
