"""From the text of a rule file to rules. `load_rules` is where to begin.

text -> source (YAML with places) -> Definition (a rule's values; an override's put in) -> Rule (compiled)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from sentinel.engine import span
from sentinel.engine.builder import Builder, Term, Vocabulary
from sentinel.engine.compiler import compile_any, compile_condition, compile_number
from sentinel.engine.functions import FUNCTIONS
from sentinel.engine.observation import SCOPES, Scope
from sentinel.engine.plan import Plan
from sentinel.engine.rule import (
    ANNOTATIONS,
    DOWNGRADE_KEYS,
    OVERRIDE_KEYS,
    RULE_KEYS,
    SEVERITIES,
    Condition,
    Definition,
    Downgrade,
    Rule,
    RuleFile,
)
from sentinel.engine.source import Source, YamlNode, did_you_mean
from sentinel.engine.span import Hold, Span
from sentinel.engine.syntax import Parsed, parse
from sentinel.engine.template import WORDS, Template, template
from sentinel.errors import RuleError
from sentinel.signals import SIGNALS

REBASE_AFTER = 500
"""Steps. A new level that lasts as long as this is the new normal."""

ALERT = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def load_rules(
    text: str,
    file: str,
    *,
    base: Iterable[Rule] = (),
    signals: Mapping[str, str] | None = None,
    actions: Collection[str] | None = None,
    evidence: Collection[str] | None = None,
) -> RuleFile:
    """Parse and compile a rule file. Raises RuleError with file, line and column, and nothing else: that of the first
    rule with a mistake, with those of the others.

    `base` are the rules that the file may override or disable; `signals` are metrics beyond Sentinel's own, with their
    scope, as a run's hello brings them; `actions` and `evidence`, where given, are the only ones that a rule may name.
    """
    fields = Source(text, file).root.fields("a rule file", ("group", "signals", "rules"), required=("group", "rules"))
    declared = _signals(fields["signals"]) if "signals" in fields else {}
    vocabulary = {name: signal.scope for name, signal in SIGNALS.items()} | dict(signals or {})
    vocabulary |= {name: "rank" for name in declared}
    group = _matching(fields["group"], "group", SLUG, "letters a-z, digits and dashes")
    known = {rule.name: rule for rule in base}
    seen, rules, disabled = dict[str, int](), list[Rule](), list[str]()
    mistakes = list[RuleError]()
    for node in fields["rules"].sequence("rules"):
        try:
            definition = _definition(node, group, vocabulary, known)
            name = definition.name.word()
            if name in seen:
                raise definition.name.error(f"alert {name!r} is there twice; the first is in line {seen[name]}")
            seen[name] = definition.name.line
            if "disable" in definition.fields:
                disabled.append(name)
            else:
                rules.append(_Reader(definition, file, actions, evidence).rule())
        except RuleError as error:
            mistakes.append(error)
    if mistakes:
        mistakes[0].others = tuple(mistakes[1:])
        raise mistakes[0]
    return RuleFile(file, group, tuple(rules), declared, tuple(disabled))


def _definition(node: YamlNode, group: str, vocabulary: Vocabulary, known: Mapping[str, Rule]) -> Definition:
    """What a rule says; of an override, what the rule says that it is about, with the changes in it."""
    if not any(key.word() == "override" for key, _ in node.items("a rule")):
        fields = node.fields("a rule", RULE_KEYS, required=("alert", "expr"))
        return _split_definition(fields["alert"], fields, group, vocabulary, node.written)
    fields = node.fields("an override", OVERRIDE_KEYS)
    name = fields.pop("override")
    if name.word() not in known:
        raise name.error(f"there is no rule {name.word()!r} to override{did_you_mean(name.word(), known)}")
    if not fields:
        raise node.error("an override that changes nothing; write what is to be another, or `disable: true`")
    if "disable" in fields:
        if len(fields) > 1 or not fields["disable"].truth("disable"):
            raise fields["disable"].error("`disable: true` stands alone: take it out, or the other keys")
        return _split_definition(name, fields, group, vocabulary, node.written)
    old = known[name.word()].definition
    new = _split_definition(name, fields, old.group, {**old.vocabulary, **vocabulary}, f"{old.written}\n{node.written}")
    return Definition(
        name,
        {**old.fields, **new.fields},
        {**old.lets, **new.lets},
        {**old.annotations, **new.annotations},
        new.group,
        new.vocabulary,
        new.written,
    )


def _split_definition(
    name: YamlNode, fields: Mapping[str, YamlNode], group: str, vocabulary: Vocabulary, written: str
) -> Definition:
    lets = {key.word(): (key, value) for key, value in fields["let"].items("let")} if "let" in fields else {}
    annotations = fields["annotations"].fields("annotations", ANNOTATIONS) if "annotations" in fields else {}
    rest = {key: value for key, value in fields.items() if key not in ("alert", "let", "annotations")}
    return Definition(name, rest, lets, annotations, group, vocabulary, written)


def _signals(node: YamlNode) -> dict[str, str]:
    declared = {}
    for key, value in node.items("signals"):
        name = _free_name(key, "signal", ())
        if name in SIGNALS:
            raise key.error(f"{name} is a signal of Sentinel's own already")
        declared[name] = value.string(f"the meaning of {name}")
    return declared


def _matching(node: YamlNode, what: str, pattern: re.Pattern[str], wanted: str) -> str:
    value = node.string(what)
    if not pattern.fullmatch(value):
        raise node.error(f"{what} {value!r}: expected {wanted}")
    return value


def _free_name(node: YamlNode, what: str, taken: Collection[str]) -> str:
    name = node.word()
    if not NAME.fullmatch(name):
        raise node.error(f"{what} {name!r}: expected letters a-z, digits and underscores")
    if name in FUNCTIONS or name in WORDS or name in taken or name in ("and", "or", "not", "in", "is", "if", "else"):
        owner = "function" if name in FUNCTIONS else "metric" if name in taken else "word of the language"
        raise node.error(f"{what} {name!r}: the name of a {owner}; choose another one")
    return name


class _Reader:
    """Reads one rule."""

    def __init__(
        self, definition: Definition, file: str, actions: Collection[str] | None, evidence: Collection[str] | None
    ) -> None:
        self._definition, self._fields = definition, definition.fields
        self._file, self._vocabulary, self._actions, self._evidence = file, definition.vocabulary, actions, evidence
        self._min_samples = self._integer("min_samples", 1, 100_000, default=0)
        self._scope = _scope(self._fields["scope"], SCOPES) if "scope" in self._fields else "run"
        self._lets: dict[str, Parsed] = {}
        self._builder = self._new_builder(self._scope)

    def rule(self) -> Rule:
        """The rule. Raises RuleError at the first fault."""
        alert = self._definition.name
        name = _matching(alert, "alert", ALERT, "a name like LossSpike")
        lets = self._read_lets()
        expr = self._fields["expr"].text("expr")
        term = compile_condition(parse(expr), self._builder, self._lets)
        needs = self._needs()
        if not term.metrics:
            raise expr.error("there is no metric in the condition")
        shown = [(let, compile_any(parsed, self._builder, self._lets)) for let, parsed in self._lets.items()]
        annotations, templates, runbook = self._annotations()
        members, downgrade = self._members(), self._downgrade()
        metrics = term.metrics.union(needs, *(let.metrics for _, let in shown))
        if downgrade is not None:
            metrics |= downgrade.term.metrics
        return Rule(
            name=name, group=self._definition.group, scope=self._scope, needs=tuple(needs), expr=expr.value.strip(),
            lets=lets, condition=self._condition(self._builder, term, shown, needs), members=members,
            for_=self._hold(), warmup=self._span("warmup"), keep_firing=self._span("keep_firing"),
            rebase_after=self._steps("rebase_after", REBASE_AFTER),
            every=self._integer("every", 1, 1000, default=1), at=self._read_at(metrics), min_samples=self._min_samples,
            from_start=self._truth("from_start"), severity=self._choice("severity", SEVERITIES, "warning"),
            problem=self._read_problem(), consequence_of=self._list_names(
                self._fields, "consequence_of", "problem", SLUG, "a name like training", None
            ),
            actions=self._list_names(self._fields, "actions", "action", SLUG, "a name like rollback", self._actions),
            downgrade=downgrade,
            evidence=self._list_names(
                self._fields, "evidence", "evidence", NAME, "a name like moments", self._evidence
            ),
            layers=self._truth("layers"),
            templates=templates, annotations=annotations, runbook=runbook,
            metrics=metrics | (members.term.metrics if members else frozenset()),
            window=max(t.window for t in (term, *(let for _, let in shown))), file=self._file, line=alert.line,
            text=self._definition.written, definition=self._definition,
        )  # fmt: skip

    def _read_at(self, metrics: Collection[str]) -> str:
        if "at" not in self._fields:
            return ""
        node = self._fields["at"]
        if node.word() not in metrics:
            raise node.error(f"at: the rule does not read {node.word()!r}{did_you_mean(node.word(), metrics)}")
        return node.word()

    def _read_problem(self) -> str:
        if "problem" not in self._fields:
            return ""
        return _matching(self._fields["problem"], "problem", SLUG, "a name like training")

    def _needs(self) -> dict[str, Term]:
        nodes = self._fields["needs"].sequence("needs") if "needs" in self._fields else []
        found = {}
        for node in nodes:
            name = node.word()
            if name not in self._vocabulary:
                raise node.error(f"needs: unknown metric {name!r}{did_you_mean(name, self._vocabulary)}")
            found[name] = compile_number(parse(node.text("needs")), self._builder, {})
        return found

    def _new_builder(self, scope: Scope) -> Builder:
        return Builder(scope, self._vocabulary, self._min_samples)

    def _condition(
        self, builder: Builder, term: Term, lets: list[tuple[str, Term]], needs: Mapping[str, Term]
    ) -> Condition:
        plan = builder.plan()
        metrics = [(source.metric, builder.input(source.metric)) for source in plan.inputs]
        return Condition(
            plan=plan,
            term=term,
            shown=tuple([*metrics, *((name, let) for name, let in lets if let.type == "number")]),
            finite=tuple(slot for slot in range(plan.size) if term.exposed >> slot & 1),
            needs=tuple(needed.needs.bit_length() - 1 for needed in needs.values()),
            sources=_sources(plan),
        )

    def _read_lets(self) -> dict[str, str]:
        written = {}
        for key, value in self._definition.lets.values():
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
        scope = _scope(key, SCOPES[1:])
        builder = self._new_builder(scope)
        term = compile_condition(parse(value.text("members")), builder, self._lets)
        return self._condition(builder, term, [], {})

    def _downgrade(self) -> Downgrade | None:
        if "downgrade" not in self._fields:
            return None
        fields = self._fields["downgrade"].fields("downgrade", DOWNGRADE_KEYS, required=("when", "severity"))
        when = fields["when"].text("when")
        return Downgrade(
            term=compile_condition(parse(when), self._builder, self._lets),
            when=when.value.strip(),
            severity=_read_choice(fields["severity"], "severity", SEVERITIES),
            actions=self._list_names(fields, "actions", "action", SLUG, "a name like rollback", self._actions),
        )

    def _annotations(self) -> tuple[dict[str, str], dict[str, Template], str]:
        written, templates, runbook = dict[str, str](), dict[str, Template](), ""
        for name, node in self._definition.annotations.items():
            if name == "runbook":
                runbook = _matching(node, "runbook", SLUG, "a section's name like loss-spike")
                continue
            text = node.text(name)
            written[name] = text.value.strip()
            templates[name] = template(text, lambda part: compile_any(parse(part), self._builder, self._lets))
        return written, templates, runbook

    def _hold(self) -> Hold:
        if "for" not in self._fields:
            return Hold()
        node = self._fields["for"]
        held = span.hold(_read_length(node, "for"))
        if held is None:
            raise node.error(f"for: {node.word()!r} is not `20 steps`, `90s` or `3 of 5 steps`")
        return held

    def _span(self, key: str) -> Span:
        if key not in self._fields:
            return Span()
        node = self._fields[key]
        length = span.span(_read_length(node, key))
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

    def _truth(self, key: str) -> bool:
        return key in self._fields and self._fields[key].truth(key)

    def _choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        if key not in self._fields:
            return default
        return _read_choice(self._fields[key], key, choices)

    def _list_names(
        self,
        fields: Mapping[str, YamlNode],
        key: str,
        what: str,
        pattern: re.Pattern[str],
        wanted: str,
        known: Collection[str] | None,
    ) -> tuple[str, ...]:
        names = []
        for node in fields[key].sequence(key) if key in fields else []:
            name = _matching(node, what, pattern, wanted)
            if known is not None and name not in known:
                raise node.error(f"unknown {what} {name!r}{did_you_mean(name, known)}")
            names.append(name)
        return tuple(names)


def _sources(plan: Plan) -> dict[int, frozenset[int]]:
    found = {source.slot: frozenset({source.slot}) for source in plan.inputs}
    found |= {source.seen: frozenset({source.slot}) for source in plan.inputs if source.seen >= 0}
    found |= {feed.slot: frozenset(feed.sources) for feed in plan.feeds}
    for stage in plan.stages:
        found[stage.slot] = frozenset().union(*(inputs for slot, inputs in found.items() if stage.needs >> slot & 1))
    return found


def _read_length(node: YamlNode, key: str) -> str:
    """The text of a span; a bare number is most likely meant to be steps."""
    if node.kind == "int":
        raise node.error(f"{key}: {node.word()} of what? Write `{node.word()} steps`, or a time, as `90s`")
    return node.string(key)


def _read_choice(node: YamlNode, key: str, choices: tuple[str, ...]) -> str:
    value = node.string(key)
    if value not in choices:
        near = did_you_mean(value, choices)
        hint = near if "did you mean" in near else ""  # else it says once more what there is
        raise node.error(f"{key}: {value!r} is none of {', '.join(choices)}{hint}")
    return value


def _scope(node: YamlNode, choices: tuple[Scope, ...]) -> Scope:
    word = _read_choice(node, "scope", choices)
    return next(scope for scope in choices if scope == word)
