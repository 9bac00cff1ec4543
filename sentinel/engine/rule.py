"""Rules: what a rule file says, checked and compiled. `load_rules` is the door."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sentinel.engine import span
from sentinel.engine.builder import Builder, Term, Vocabulary
from sentinel.engine.compiler import compile_any, compile_condition
from sentinel.engine.functions import FUNCTIONS
from sentinel.engine.observation import SCOPES, Scope
from sentinel.engine.plan import Plan
from sentinel.engine.source import Node, Source, did_you_mean
from sentinel.engine.span import Hold, Span
from sentinel.engine.syntax import Parsed, parse
from sentinel.engine.template import WORDS, Template, template
from sentinel.errors import RuleError
from sentinel.signals import SIGNALS

SEVERITIES = ("info", "warning", "critical")
ANNOTATIONS = ("summary", "description", "remedy", "runbook")
REBASE_AFTER = 500
"""Steps. A new level that lasts as long as this is the new normal."""

_LATER = {"gpu": "GPUs", "node": "nodes"}
RULE_KEYS = ("alert", "scope", "let", "expr", "members", "for", "warmup", "keep_firing", "rebase_after",
              "min_samples", "severity", "actions", "annotations")  # fmt: skip
_ALERT = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on the entities of one scope, compiled, with the numbers that explain it."""

    plan: Plan
    term: Term
    shown: tuple[tuple[str, Term], ...]
    """Metrics and lets by name."""
    finite: tuple[int, ...]
    """Slots whose values must be finite for the condition to mean something."""
    sources: Mapping[int, frozenset[int]]
    """Slot -> the inputs that it comes from: where one is empty there is no data, and the rule is not just warming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a file, ready to run."""

    name: str
    group: str
    scope: Scope
    expr: str
    """As it is written."""
    lets: Mapping[str, str]
    condition: Condition
    members: Condition | None
    """Whom to name beside the one that the rule is about, while it fires."""
    for_: Hold
    warmup: Span
    keep_firing: Span
    rebase_after: int
    """Steps for which a baseline may stand still."""
    min_samples: int
    severity: str
    actions: tuple[str, ...]
    templates: Mapping[str, Template]
    annotations: Mapping[str, str]
    """As they are written."""
    runbook: str
    metrics: frozenset[str]
    window: int
    """Samples that it looks back on, at most."""
    file: str
    line: int
    """Of the alert's name."""

    @property
    def timed(self) -> bool:
        """Whether steps without a time will not do: seconds are in its condition, its `for` or its `warmup`."""
        return self.condition.plan.timed or bool(self.for_.span.seconds or self.warmup.seconds)

    text: str
    """The whole rule, as it stands in the file: a state that was kept belongs to rules of the same text."""


@dataclass(frozen=True, slots=True)
class RuleFile:
    """A rule file, checked."""

    file: str
    group: str
    rules: tuple[Rule, ...]
    signals: Mapping[str, str]
    """Metrics that the file declares, with their meaning."""


def load_rules(
    text: str, file: str, *, signals: Mapping[str, str] | None = None, actions: Collection[str] | None = None
) -> RuleFile:
    """Parse and compile a rule file. Raises RuleError with file, line and column, and nothing else.

    `signals` are metrics beyond Sentinel's own, with their scope (`rank` or `layer`), as a run's hello brings them;
    `actions`, where given, are the only ones that a rule may name.
    """
    fields = Source(text, file).root.fields("a rule file", ("group", "signals", "rules"), required=("group", "rules"))
    declared = _signals(fields["signals"]) if "signals" in fields else {}
    vocabulary = {name: signal.scope for name, signal in SIGNALS.items()} | dict(signals or {})
    vocabulary |= {name: "rank" for name in declared}
    group, rules = _matching(fields["group"], "group", _SLUG, "letters a-z, digits and dashes"), list[Rule]()
    for node in fields["rules"].sequence("rules"):
        rule = _Reader(node, group, file, vocabulary, actions).rule()
        for other in rules:
            if other.name == rule.name:
                name = node.fields("a rule", RULE_KEYS)["alert"]
                raise name.error(f"alert {rule.name!r} is there twice; the first is in line {other.line}")
        rules.append(rule)
    return RuleFile(file, group, tuple(rules), declared)


def rules_of(files: Iterable[RuleFile]) -> tuple[Rule, ...]:
    """The rules of several files. Raises RuleError where two have the same name."""
    rules: dict[str, Rule] = {}
    for rule in (rule for file in files for rule in file.rules):
        if other := rules.get(rule.name):
            raise RuleError(f"alert {rule.name!r} is there twice; the first is in {other.file}, line {other.line}",
                            file=rule.file, line=rule.line)  # fmt: skip
        rules[rule.name] = rule
    return tuple(rules.values())


def plans_of(rules: Iterable[Rule]) -> list[Plan]:
    """All plans that rules run."""
    return [part.plan for rule in rules for part in (rule.condition, rule.members) if part is not None]


def _signals(node: Node) -> dict[str, str]:
    declared = {}
    for key, value in node.items("signals"):
        name = _free_name(key, "signal", ())
        if name in SIGNALS:
            raise key.error(f"{name} is a signal of Sentinel's own already")
        declared[name] = value.string(f"the meaning of {name}")
    return declared


def _matching(node: Node, what: str, pattern: re.Pattern[str], wanted: str) -> str:
    value = node.string(what)
    if not pattern.fullmatch(value):
        raise node.error(f"{what} {value!r}: expected {wanted}")
    return value


def _free_name(node: Node, what: str, taken: Collection[str]) -> str:
    name = node.word()
    if not _NAME.fullmatch(name):
        raise node.error(f"{what} {name!r}: expected letters a-z, digits and underscores")
    if name in FUNCTIONS or name in WORDS or name in taken or name in ("and", "or", "not", "in", "is", "if", "else"):
        owner = "function" if name in FUNCTIONS else "metric" if name in taken else "word of the language"
        raise node.error(f"{what} {name!r}: the name of a {owner}; choose another one")
    return name


class _Reader:
    """Reads one rule."""

    def __init__(
        self, node: Node, group: str, file: str, vocabulary: Vocabulary, actions: Collection[str] | None
    ) -> None:
        self._fields = node.fields("a rule", RULE_KEYS, required=("alert", "expr"))
        self._node = node
        self._group, self._file, self._vocabulary, self._actions = group, file, vocabulary, actions
        self._min_samples = self._integer("min_samples", 1, 100_000, default=0)
        self._scope = _scope(self._fields["scope"], SCOPES) if "scope" in self._fields else "run"
        self._lets: dict[str, Parsed] = {}
        self._builder = self._new_builder(self._scope)

    def rule(self) -> Rule:
        """The rule. Raises RuleError at the first fault."""
        alert = self._fields["alert"]
        name = _matching(alert, "alert", _ALERT, "a name like LossSpike")
        lets = self._read_lets()
        expr = self._fields["expr"].text("expr")
        term = compile_condition(parse(expr), self._builder, self._lets)
        if not term.metrics:
            raise expr.error("there is no metric in the condition")
        shown = [(let, compile_any(parsed, self._builder, self._lets)) for let, parsed in self._lets.items()]
        annotations, templates, runbook = self._annotations()
        members = self._members()
        metrics = term.metrics.union(*(let.metrics for _, let in shown))
        return Rule(
            name=name, group=self._group, scope=self._scope, expr=expr.value.strip(), lets=lets,
            condition=self._condition(self._builder, term, shown), members=members,
            for_=self._hold(), warmup=self._span("warmup"), keep_firing=self._span("keep_firing"),
            rebase_after=self._steps("rebase_after", REBASE_AFTER), min_samples=self._min_samples,
            severity=self._choice("severity", SEVERITIES, "warning"), actions=self._action_names(),
            templates=templates, annotations=annotations, runbook=runbook,
            metrics=metrics | (members.term.metrics if members else frozenset()),
            window=max(t.window for t in (term, *(let for _, let in shown))), file=self._file, line=alert.line,
            text=self._node.written,
        )  # fmt: skip

    def _new_builder(self, scope: Scope) -> Builder:
        return Builder(scope, self._vocabulary, self._min_samples)

    def _condition(self, builder: Builder, term: Term, lets: list[tuple[str, Term]]) -> Condition:
        plan = builder.plan()
        metrics = [(source.metric, builder.input(source.metric)) for source in plan.inputs]
        return Condition(
            plan=plan,
            term=term,
            shown=tuple([*metrics, *((name, let) for name, let in lets if let.type == "number")]),
            finite=tuple(slot for slot in range(plan.size) if term.exposed >> slot & 1),
            sources=_sources(plan),
        )

    def _read_lets(self) -> dict[str, str]:
        if "let" not in self._fields:
            return {}
        written = {}
        for key, value in self._fields["let"].items("let"):
            name = _free_name(key, "let", self._vocabulary)
            text = value.text(f"let {name}")
            parsed = parse(text)
            compile_any(parsed, self._builder, self._lets)
            self._lets[name] = parsed
            written[name] = text.value.strip()
        return written

    def _members(self) -> Condition | None:
        if "members" not in self._fields:
            return None
        found = list(self._fields["members"].items("members"))
        if self._scope != "run" or len(found) != 1:
            raise self._fields["members"].error("members: one scope and its condition, in a rule of scope run")
        key, value = found[0]
        scope = _scope(key, ("rank", "layer"))
        builder = self._new_builder(scope)
        term = compile_condition(parse(value.text("members")), builder, self._lets)
        return self._condition(builder, term, [])

    def _annotations(self) -> tuple[dict[str, str], dict[str, Template], str]:
        written, templates, runbook = dict[str, str](), dict[str, Template](), ""
        if "annotations" in self._fields:
            for name, node in self._fields["annotations"].fields("annotations", ANNOTATIONS).items():
                if name == "runbook":
                    runbook = _matching(node, "runbook", _SLUG, "a section's name like loss-spike")
                    continue
                text = node.text(name)
                written[name] = text.value.strip()
                templates[name] = template(text, lambda part: compile_any(parse(part), self._builder, self._lets))
        return written, templates, runbook

    def _hold(self) -> Hold:
        if "for" not in self._fields:
            return Hold()
        node = self._fields["for"]
        held = span.hold(node.string("for"))
        if held is None:
            raise node.error(f"for: {node.word()!r} is not `20 steps`, `90s` or `3 of 5 steps`")
        return held

    def _span(self, key: str) -> Span:
        if key not in self._fields:
            return Span()
        node = self._fields[key]
        length = span.span(node.string(key))
        if length is None:
            raise node.error(f"{key}: {node.word()!r} is neither `200 steps` nor `90s`")
        return length

    def _steps(self, key: str, default: int) -> int:
        if key not in self._fields:
            return default
        length = self._span(key)
        if length.seconds:
            raise self._fields[key].error(f"{key}: expected steps, `500 steps`")
        return length.steps

    def _integer(self, key: str, least: int, most: int, default: int) -> int:
        return self._fields[key].integer(key, least, most) if key in self._fields else default

    def _choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        if key not in self._fields:
            return default
        return _chosen(self._fields[key], key, choices)

    def _action_names(self) -> tuple[str, ...]:
        names = []
        if "actions" in self._fields:
            for node in self._fields["actions"].sequence("actions"):
                name = _matching(node, "action", _SLUG, "a name like rollback")
                if self._actions is not None and name not in self._actions:
                    raise node.error(f"unknown action {name!r}{did_you_mean(name, self._actions)}")
                names.append(name)
        return tuple(names)


def _sources(plan: Plan) -> dict[int, frozenset[int]]:
    found = {source.slot: frozenset({source.slot}) for source in plan.inputs}
    found |= {source.seen: frozenset({source.slot}) for source in plan.inputs if source.seen >= 0}
    found |= {feed.slot: frozenset(feed.sources) for feed in plan.feeds}
    for stage in plan.stages:
        found[stage.slot] = frozenset().union(*(inputs for slot, inputs in found.items() if stage.needs >> slot & 1))
    return found


def _chosen(node: Node, key: str, choices: tuple[str, ...]) -> str:
    value = node.string(key)
    if value not in choices:
        raise node.error(f"{key}: {value!r} is none of {', '.join(choices)}{did_you_mean(value, choices)}")
    return value


def _scope(node: Node, choices: tuple[Scope, ...]) -> Scope:
    if node.word() in _LATER:
        raise node.error(f"scope {node.word()}: rules about {_LATER[node.word()]} are not there yet; "
                         f"there are {', '.join(choices)}")  # fmt: skip
    word = _chosen(node, "scope", choices)
    return next(scope for scope in choices if scope == word)
