"""Rules: what a rule file says, checked and compiled (`loading` does that)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sentinel.engine.expressions.builder import Term, Vocabulary
from sentinel.engine.expressions.plan import SEQ, Plan, Scan
from sentinel.engine.observation import Scope
from sentinel.engine.rules.template import Template
from sentinel.engine.source import YamlNode
from sentinel.engine.span import Hold, Span
from sentinel.errors import RuleError
from sentinel.signals import CLOCK, SIGNALS

SEVERITIES = ("info", "warning", "critical")
OVER = "over"
"""The annotation that is rendered when the rule ends its incident, and not when it fires."""
ANNOTATIONS = ("summary", "description", "remedy", OVER, "runbook")
RULE_KEYS = ("alert", "scope", "needs", "let", "expr", "members", "for", "warmup", "keep_firing", "keep_while",
             "rebase_after", "every", "at", "min_samples", "from_start", "severity", "problem", "consequence_of",
             "actions", "downgrade", "evidence", "layers", "annotations")  # fmt: skip
DOWNGRADE_KEYS = ("when", "severity", "actions")
OVERRIDE_KEYS = ("override", "disable", *(key for key in RULE_KEYS if key != "alert"))


@dataclass(frozen=True, slots=True)
class Definition:
    """A rule as it is written, value by value: an override changes some of the values, and the rule is compiled
    again."""

    name: YamlNode
    fields: Mapping[str, YamlNode]
    """All keys but lets and annotations."""
    lets: Mapping[str, tuple[YamlNode, YamlNode]]
    """Name -> the node of the name, and its expression."""
    annotations: Mapping[str, YamlNode]
    group: str
    vocabulary: Vocabulary
    written: str
    """The whole text of the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A compiled condition on the entities of one scope, with the numbers that explain it."""

    plan: Plan
    term: Term
    shown: tuple[tuple[str, Term], ...]
    """Metrics and lets by name."""
    finite: tuple[int, ...]
    """Slots whose values must be finite for the condition to have a meaning."""
    needs: tuple[int, ...]
    """Slots that must have had a sample for the rule to apply to this run."""
    sources: Mapping[int, frozenset[int]]
    """Slot -> the inputs that it comes from: where one of them is empty there is no data, and the rule is not just
    warming."""
    scan: Scan | None
    """Judges all entities of a table together; None where the plan is not `momentary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Downgrade:
    """Where its condition holds when the rule fires, the incident has this severity and these actions."""

    term: Term
    when: str
    """The condition as it is written."""
    severity: str
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a file, ready to run."""

    name: str
    group: str
    scope: Scope
    needs: tuple[str, ...]
    """Metrics without which the rule does not apply to a run."""
    expr: str
    """The condition as it is written."""
    lets: Mapping[str, str]
    condition: Condition
    members: Condition | None
    """Which other entities to name while the rule fires."""
    for_: Hold
    warmup: Span
    keep_firing: Span
    keep_while: Term | None
    """A condition under which the rule goes on firing, although its own condition does not hold."""
    rebase_after: int
    """Steps for which a baseline may be frozen, at most."""
    every: int
    """It judges every n-th of the steps that have a sample for it, beginning with the first."""
    at: tuple[str, ...]
    """The only metrics whose samples make it judge; empty: the samples of all its metrics do."""
    min_samples: int
    from_start: bool
    """Whether its mistake exists from a run's first step on: then it is a check of the opening examination."""
    severity: str
    problem: str
    """The problem that it is a sign of: alerts on one problem that come close together are one problem. Empty: it
    stands alone."""
    consequence_of: tuple[str, ...]
    """Problems that cause it: while one of them lasts, it is a consequence of that problem."""
    actions: tuple[str, ...]
    downgrade: Downgrade | None
    evidence: tuple[str, ...]
    """Evidence that ranks are asked for when it fires."""
    layers: bool
    """Whether its diagnosis tells which layers' gradients grew."""
    templates: Mapping[str, Template]
    annotations: Mapping[str, str]
    """The annotations as they are written."""
    runbook: str
    metrics: frozenset[str]
    file: str
    line: int
    """Line of the alert's name."""

    @property
    def timed(self) -> bool:
        """Whether it needs steps with a time: its condition, its `for` or its `warmup` is in seconds."""
        return self.condition.plan.timed or bool(self.for_.span.seconds or self.warmup.seconds)

    @property
    def clocked(self) -> bool:
        """Whether it reads only what is measured by the clock, between steps."""
        return all(metric in SIGNALS and SIGNALS[metric].tier == CLOCK for metric in self.metrics)

    def find_severities(self, action: str) -> set[str]:
        """Return the severities of those of its incidents that ask for this action."""
        return {graded.severity for graded in (self, self.downgrade) if graded is not None and action in graded.actions}

    @property
    def undoable(self) -> bool:
        """Whether it reads what a rollback takes back (`Signal.undoable`), or numbers of the user's own."""
        return any(metric not in SIGNALS or SIGNALS[metric].undoable for metric in self.metrics)

    @property
    def staged(self) -> bool:
        """Whether it reads what another task or other data change (`Signal.staged`), or numbers of the user's own: then
        it starts over with a stage."""
        return any(metric not in SIGNALS or SIGNALS[metric].staged for metric in self.metrics)

    @property
    def scopes(self) -> frozenset[str]:
        """The scopes whose entities it judges or reads one by one."""
        return self.condition.plan.scopes

    @property
    def always(self) -> bool:
        """Whether a step without a sample may be news, as `age` or `absent` asks about it."""
        return self.condition.plan.always or (self.members is not None and self.members.plan.always)

    @property
    def may_rest(self) -> bool:
        """Whether a step without a sample can only change what is open, or what waits for its time; only for rules
        without feeds: `RuleState.idle`."""
        plans, awaited = plans_of([self]), self.condition.plan.awaited
        return self.condition.plan.always and not awaited >> SEQ & 1 and not any(plan.subplans for plan in plans)

    text: str
    """The whole rule as it stands in the file: a stored state belongs to rules with the same text."""
    definition: Definition


@dataclass(frozen=True, slots=True)
class RuleFile:
    """A rule file, checked."""

    file: str
    group: str
    rules: tuple[Rule, ...]
    signals: Mapping[str, str]
    """Metrics that the file declares, with their meaning."""
    disabled: tuple[str, ...]
    """Rules of other files that it switches off."""


def rules_of(files: Iterable[RuleFile]) -> tuple[Rule, ...]:
    """Return the rules of several files. Raises RuleError where two have the same name."""
    rules: dict[str, Rule] = {}
    for rule in (rule for file in files for rule in file.rules):
        if other := rules.get(rule.name):
            raise RuleError(f"alert {rule.name!r} is there twice; the first is in {other.file}, line {other.line}",
                            file=rule.file, line=rule.line)  # fmt: skip
        rules[rule.name] = rule
    return tuple(rules.values())


def plans_of(rules: Iterable[Rule]) -> list[Plan]:
    """Return all plans that rules run."""
    return [part.plan for rule in rules for part in (rule.condition, rule.members) if part is not None]
