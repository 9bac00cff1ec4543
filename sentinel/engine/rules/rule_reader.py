"""Make a Rule of a Definition: read its values, compile its expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from sentinel.engine import span
from sentinel.engine.expressions.builder import Builder, Term
from sentinel.engine.expressions.compiler import compile_any, compile_condition, compile_number
from sentinel.engine.expressions.functions import FUNCTIONS
from sentinel.engine.expressions.generation import scanning
from sentinel.engine.expressions.plan import Plan
from sentinel.engine.expressions.syntax import Parsed, parse
from sentinel.engine.observation import SCOPES, Scope
from sentinel.engine.rules.rule import DOWNGRADE_KEYS, SEVERITIES, Condition, Definition, Downgrade, Rule
from sentinel.engine.rules.template import WORDS, Template, template
from sentinel.engine.source import Mistakes, YamlNode
from sentinel.engine.span import Hold, Span
from sentinel.text import did_you_mean

REBASE_AFTER = 500
"""Steps after which a new level that lasts is the new normal."""

ALERT = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

_UNREAD = Term(type="condition", key="", source="False")
"""Stands for an expression with a mistake, so that the rest of its rule is read, too."""


def read_word(node: YamlNode, what: str, pattern: re.Pattern[str], wanted: str) -> str:
    """Return text that matches `pattern`. Raises RuleError that says what is wanted."""
    value = node.string(what)
    if not pattern.fullmatch(value):
        raise node.error(f"{what} {value!r}: expected {wanted}")
    return value


def read_free_name(node: YamlNode, what: str, taken: Collection[str]) -> str:
    """Return a name that an expression can use and that means nothing else there. Raises RuleError."""
    name = node.word()
    if not NAME.fullmatch(name):
        raise node.error(f"{what} {name!r}: expected letters a-z, digits and underscores")
    if name in FUNCTIONS or name in WORDS or name in taken or name in ("and", "or", "not", "in", "is", "if", "else"):
        owner = "function" if name in FUNCTIONS else "metric" if name in taken else "word of the language"
        raise node.error(f"{what} {name!r}: the name of a {owner}; choose another one")
    return name


class RuleReader:
    """Reads one rule. A value with a mistake is noted, and read as its default."""

    def __init__(
        self,
        definition: Definition,
        file: str,
        actions: Collection[str] | None,
        evidence: Collection[str] | None,
        mistakes: Mistakes,
    ) -> None:
        self._definition, self._fields, self._mistakes = definition, definition.fields, mistakes
        self._file, self._vocabulary, self._actions, self._evidence = file, definition.vocabulary, actions, evidence
        self._min_samples = self._integer("min_samples", 100_000, default=0)
        self._lets: dict[str, Parsed] = {}
        self._unclear = False
        """Whether a mistake elsewhere may be the reason for an unknown name: then only the syntax of expressions is
        checked."""
        self._scope = self._read_scope()
        self._builder = self._new_builder(self._scope)

    def rule(self) -> Rule:
        """Return the rule; not to be used where mistakes were noted."""
        alert = self._definition.name
        with self._mistakes:
            read_word(alert, "alert", ALERT, "a name like LossSpike")
        lets = self._read_lets()
        term, expr = _UNREAD, ""
        if "expr" in self._fields:
            term, expr = self._compile(compile_condition, self._fields["expr"], "expr", self._builder)
        needs = self._needs()
        shown = []
        if not self._unclear:
            shown = [(let, compile_any(parsed, self._builder, self._lets)) for let, parsed in self._lets.items()]
        annotations, templates, runbook = self._annotations()
        members, downgrade, keep_while = self._members(), self._downgrade(), self._keep_while()
        metrics = term.metrics.union(needs, *(let.metrics for _, let in shown))
        if downgrade is not None:
            metrics |= downgrade.term.metrics
        if keep_while is not None:
            metrics |= keep_while.metrics
        if term is not _UNREAD and not term.metrics:
            self._mistakes.found.append(self._fields["expr"].text("expr").error("there is no metric in the condition"))
        self._unclear |= term is _UNREAD
        return Rule(
            name=alert.word(), group=self._definition.group, scope=self._scope, needs=tuple(needs), expr=expr,
            lets=lets, condition=self._condition(self._builder, term, shown, needs), members=members,
            for_=self._hold(), warmup=self._span("warmup"), keep_firing=self._span("keep_firing"),
            keep_while=keep_while, rebase_after=self._steps("rebase_after", REBASE_AFTER),
            every=self._integer("every", 1000, default=1), at=self._read_at(metrics), min_samples=self._min_samples,
            from_start=self._truth("from_start"),
            severity=self._severity(self._fields),
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
            file=self._file, line=alert.line,
            text=self._definition.written, definition=self._definition,
        )  # fmt: skip

    def _read_at(self, metrics: Collection[str]) -> tuple[str, ...]:
        if "at" not in self._fields or self._unclear:
            return ()
        node, found = self._fields["at"], list[str]()
        for one in node.sequence("at") if node.kind == "seq" else [node]:
            with self._mistakes:
                if one.word() not in metrics:
                    raise one.error(f"at: the rule does not read {one.word()!r}{did_you_mean(one.word(), metrics)}")
                found.append(one.word())
        return tuple(found)

    def _read_problem(self) -> str:
        with self._mistakes:
            if "problem" in self._fields:
                return read_word(self._fields["problem"], "problem", SLUG, "a name like training")
        return ""

    def _read_scope(self) -> Scope:
        if "scope" not in self._fields:
            return "run"
        with self._mistakes:
            return _scope(self._fields["scope"], SCOPES)
        self._unclear = True
        return "run"

    def _compile(
        self, read: Callable[[Parsed, Builder, Mapping[str, Parsed]], Term], node: YamlNode, what: str, builder: Builder
    ) -> tuple[Term, str]:
        """Return (the term, its text); (_UNREAD, "") for an expression with a mistake."""
        with self._mistakes:
            text = node.text(what)
            parsed = parse(text)
            if not self._unclear:
                return read(parsed, builder, self._lets), text.value.strip()
        return _UNREAD, ""

    def _needs(self) -> dict[str, Term]:
        found = {}
        for node in self._sequence(self._fields, "needs"):
            with self._mistakes:
                name = node.word()
                if name not in self._vocabulary:
                    raise node.error(f"needs: unknown metric {name!r}{did_you_mean(name, self._vocabulary)}")
                found[name] = self._compile(compile_number, node, "needs", self._builder)[0]
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
            scan=scanning(term.source, plan.inputs) if plan.momentary else None,
        )

    def _read_lets(self) -> dict[str, str]:
        written = {}
        for key, value in self._definition.lets.values():
            with self._mistakes:
                name = read_free_name(key, "let", self._vocabulary)
                text = value.text(f"let {name}")
                parsed = parse(text)
                if not self._unclear:
                    compile_any(parsed, self._builder, self._lets)
                self._lets[name] = parsed
                written[name] = text.value.strip()
                continue
            self._unclear = True
        return written

    def _members(self) -> Condition | None:
        if "members" not in self._fields:
            return None
        with self._mistakes:
            found = list(self._fields["members"].items("members"))
            if self._scope != "run" or len(found) != 1:
                raise self._fields["members"].error("members: one scope and its condition, in a rule of scope run")
            key, value = found[0]
            builder = self._new_builder(_scope(key, SCOPES[1:]))
            term, _ = self._compile(compile_condition, value, "members", builder)
            return self._condition(builder, term, [], {})
        return None

    def _keep_while(self) -> Term | None:
        if "keep_while" not in self._fields:
            return None
        return self._compile(compile_condition, self._fields["keep_while"], "keep_while", self._builder)[0]

    def _downgrade(self) -> Downgrade | None:
        if "downgrade" not in self._fields:
            return None
        with self._mistakes:
            fields = self._fields["downgrade"].fields("downgrade", DOWNGRADE_KEYS, ("when", "severity"), self._mistakes)
            term, when = self._compile(compile_condition, fields["when"], "when", self._builder)
            return Downgrade(
                term=term,
                when=when,
                severity=self._severity(fields),
                actions=self._list_names(fields, "actions", "action", SLUG, "a name like rollback", self._actions),
            )
        return None

    def _annotations(self) -> tuple[dict[str, str], dict[str, Template], str]:
        written, templates, runbook = dict[str, str](), dict[str, Template](), ""
        for name, node in self._definition.annotations.items():
            with self._mistakes:
                if name == "runbook":
                    runbook = read_word(node, "runbook", SLUG, "a section's name like loss-spike")
                    continue
                text = node.text(name)
                written[name] = text.value.strip()
                if not self._unclear:
                    templates[name] = template(text, lambda part: compile_any(parse(part), self._builder, self._lets))
        return written, templates, runbook

    def _hold(self) -> Hold:
        if "for" not in self._fields:
            return Hold()
        node = self._fields["for"]
        with self._mistakes:
            held = span.hold(_read_length(node, "for"))
            if held is None:
                raise node.error(f"for: {node.word()!r} is not `20 steps`, `90s` or `3 of 5 steps`")
            return held
        return Hold()

    def _span(self, key: str) -> Span:
        if key not in self._fields:
            return Span()
        node = self._fields[key]
        with self._mistakes:
            length = span.span(_read_length(node, key))
            if length is None:
                raise node.error(f"{key}: {node.word()!r} is neither `200 steps` nor `90s`")
            return length
        return Span()

    def _steps(self, key: str, default: int) -> int:
        if key not in self._fields:
            return default
        length = self._span(key)
        if length.seconds:
            self._mistakes.found.append(self._fields[key].error(f"{key}: expected steps, `500 steps`"))
        return length.steps

    def _integer(self, key: str, most: int, default: int) -> int:
        with self._mistakes:
            return self._fields[key].integer(key, 1, most) if key in self._fields else default
        return default

    def _truth(self, key: str) -> bool:
        with self._mistakes:
            return key in self._fields and self._fields[key].truth(key)
        return False

    def _severity(self, fields: Mapping[str, YamlNode]) -> str:
        with self._mistakes:
            return _read_choice(fields["severity"], "severity", SEVERITIES) if "severity" in fields else "warning"
        return "warning"

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
        for node in self._sequence(fields, key):
            with self._mistakes:
                name = read_word(node, what, pattern, wanted)
                if known is not None and name not in known:
                    raise node.error(f"unknown {what} {name!r}{did_you_mean(name, known)}")
                names.append(name)
        return tuple(names)

    def _sequence(self, fields: Mapping[str, YamlNode], key: str) -> list[YamlNode]:
        with self._mistakes:
            return fields[key].sequence(key) if key in fields else []
        return []


def _sources(plan: Plan) -> dict[int, frozenset[int]]:
    found = {source.slot: frozenset({source.slot}) for source in plan.inputs}
    found |= {source.seen: frozenset({source.slot}) for source in plan.inputs if source.seen >= 0}
    found |= {feed.slot: frozenset(feed.sources) for feed in plan.feeds}
    for stage in plan.stages:
        found[stage.slot] = frozenset().union(*(inputs for slot, inputs in found.items() if stage.needs >> slot & 1))
    return found


def _read_length(node: YamlNode, key: str) -> str:
    """Return the text of a span; a bare number is most likely meant to be steps."""
    if node.kind == "int":
        raise node.error(f"{key}: {node.word()} of what? Write `{node.word()} steps`, or a time, as `90s`")
    return node.string(key)


def _read_choice(node: YamlNode, key: str, choices: tuple[str, ...]) -> str:
    value = node.string(key)
    if value not in choices:
        near = did_you_mean(value, choices)
        hint = near if "did you mean" in near else ""  # otherwise it would list the choices a second time
        raise node.error(f"{key}: {value!r} is not one of {', '.join(choices)}{hint}")
    return value


def _scope(node: YamlNode, choices: tuple[Scope, ...]) -> Scope:
    word = _read_choice(node, "scope", choices)
    return next(scope for scope in choices if scope == word)
