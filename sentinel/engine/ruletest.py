"""Rule tests: series in, alerts out, in a file next to the rules, as in promtool.

    rule_files: [stability.yaml]
    tests:
      - name: a spike that stays
        interval: 1s
        input_series:
          - series: loss
            values: noise(2.5, 0.01, 300) noise(4, 0.01, 20)
        expect:
          - step: 301                     # or `at: 5m`
            alerts:
              - alert: LossSpike
                first_step: 301
                annotations: {summary: "..."}
            states: {LossSpike: firing}
        fired: {LossSpike: [301]}

`alerts` are all that fire at that step, `fired` all that fire during the test: `[]` and `{}` mean none.
"""

from __future__ import annotations

import collections
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sentinel.engine import span
from sentinel.engine.judging.evaluation import Evaluator
from sentinel.engine.judging.incident import Incident
from sentinel.engine.judging.judgement import STATES
from sentinel.engine.observation import RUN, SCOPES, Entity, Observation
from sentinel.engine.rules.loading import load_rules
from sentinel.engine.rules.rule import ANNOTATIONS, SEVERITIES, Rule, rules_of
from sentinel.engine.series import expand
from sentinel.engine.source import Mistakes, Source, YamlNode
from sentinel.signals import SIGNALS
from sentinel.text import did_you_mean

_APART = SCOPES[1:]
_TEST_KEYS = ("name", "interval", "input_series", "expect", "fired")
_ALERT_KEYS = ("alert", "severity", "actions", "evidence", "first_step", "members", "annotations")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A difference between the rules' behaviour and the test's expectation."""

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected at a step."""

    step: int
    line: int
    alerts: tuple[tuple[YamlNode, dict[str, object]], ...] | None
    states: Mapping[str, tuple[YamlNode, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTest:
    """One test, read and ready to run."""

    name: str
    line: int
    rules: tuple[Rule, ...]
    interval: float
    """Seconds between steps."""
    series: Mapping[tuple[Entity, str], list[float | None]]
    expected: tuple[Expected, ...]
    fired: tuple[YamlNode, Mapping[str, list[int]]] | None

    def run(self) -> list[Mismatch]:
        """Play the series; return what differs from the expectation."""
        evaluator = Evaluator(self.rules, run="test")
        fired: dict[str, list[int]] = {}
        failures: list[Mismatch] = []
        at = collections.defaultdict[int, list[Expected]](list)
        for expected in self.expected:
            at[expected.step].append(expected)
        for observation in self._observations():
            for transition in evaluator.observe(observation):
                if transition.kind == "fired":
                    fired.setdefault(transition.incident.rule, []).append(observation.seq)
            for expected in at.get(observation.seq, ()):
                failures += _compare_states(expected, evaluator)
        if self.fired is not None and dict(self.fired[1]) != fired:
            failures.append(
                Mismatch(
                    self.fired[0].line, f"fired: expected {_format_value(self.fired[1])}, got {_format_value(fired)}"
                )
            )
        return failures

    def _observations(self) -> Iterable[Observation]:
        for seq in range(max(map(len, self.series.values()))):
            values: dict[Entity, dict[str, float]] = {}
            for (entity, metric), samples in self.series.items():
                sample = samples[seq] if seq < len(samples) else None
                if sample is not None:
                    values.setdefault(entity, {})[metric] = sample
            yield Observation(seq, seq * self.interval, values)


def _compare_states(expected: Expected, evaluator: Evaluator) -> list[Mismatch]:
    failures = []
    if expected.alerts is not None:
        firing = {incident.rule: incident for incident in evaluator.incidents if incident.state == "firing"}
        names = [str(alert["alert"]) for _, alert in expected.alerts]
        if sorted(names) != sorted(firing):
            failures.append(Mismatch(expected.line, f"step {expected.step}: expected alerts {_format_value(names)}, "
                                                   f"got {_format_value(sorted(firing))}"))  # fmt: skip
        for node, alert in expected.alerts:
            if incident := firing.get(str(alert["alert"])):
                failures += _differences(node, alert, incident, expected.step)
    status = evaluator.status()
    for name, (node, state) in expected.states.items():
        got = sorted({row.state for row in status if row.rule == name})
        if got != [state]:
            failures.append(Mismatch(node.line, f"step {expected.step}: expected {name} {state}, got {', '.join(got)}"))
    return failures


def _differences(node: YamlNode, alert: Mapping[str, object], incident: Incident, step: int) -> Iterable[Mismatch]:
    got: dict[str, object] = {
        "severity": incident.severity,
        "actions": list(incident.actions),
        "evidence": list(incident.evidence),
        "first_step": incident.first_seq,
        "members": sorted(str(entity) for entity in incident.members),
        "runbook": incident.runbook,
    } | incident.annotations
    for key, wanted in alert.items():
        if key != "alert" and got.get(key) != wanted:
            expected, found = _format_value(wanted), _format_value(got.get(key))
            yield Mismatch(node.line, f"step {step}: {incident.rule}: expected {key} {expected}, got {found}")


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return repr(value)


def load_tests(text: str, file: str, read: Callable[[str], str], base: Sequence[Rule] = ()) -> list[RuleTest]:
    """Parse a test file. `read` returns the text of a rule file by the name in the test file; `base` are the rules that
    such a file may override.

    Raises RuleError, with the place, where the test file or a rule file is wrong: with the first mistake of each test.
    """
    fields = Source(text, file).root.fields("a test file", ("rule_files", "tests"), required=("rule_files", "tests"))
    rules, scopes = list[Rule](), {name: signal.scope for name, signal in SIGNALS.items()}
    files = []
    for node in fields["rule_files"].sequence("rule_files"):
        name = node.string("rule_files")
        try:
            files.append(load_rules(read(name), posixpath.join(posixpath.dirname(file), name), base=base))
        except OSError as error:
            raise node.error(f"cannot read {name}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise node.error(f"cannot read {name}: not text, {error.reason} at byte {error.start}") from None
        scopes |= dict.fromkeys(files[-1].signals, "rank")
    rules = list(rules_of(files))
    tests, mistakes = list[RuleTest](), Mistakes()
    for node in fields["tests"].sequence("tests"):
        with mistakes:
            tests.append(_Reader(node, tuple(rules), scopes).test())
    mistakes.raise_first()
    return tests


class _Reader:
    """Reads one test."""

    def __init__(self, node: YamlNode, rules: tuple[Rule, ...], scopes: Mapping[str, str]) -> None:
        self._node, self._rules, self._scopes = node, rules, scopes
        self._names = [rule.name for rule in rules]
        self._fields = node.fields("a test", _TEST_KEYS, required=("name", "input_series"))

    def test(self) -> RuleTest:
        """Return the test. Raises RuleError at the first mistake."""
        if not {"expect", "fired"} & set(self._fields):
            raise self._node.error("a test needs 'expect' or 'fired': it could not fail")
        series = self._series()
        steps = max((len(samples) for samples in series.values()), default=0)
        expected = [self._read_expected(node, steps) for node in self._list("expect")]
        return RuleTest(
            name=self._fields["name"].string("name"),
            line=self._node.line,
            rules=self._rules,
            interval=self._interval(),
            series=series,
            expected=tuple(expected),
            fired=self._read_fired(),
        )

    def _list(self, key: str) -> list[YamlNode]:
        return self._fields[key].sequence(key) if key in self._fields else []

    def _interval(self) -> float:
        if "interval" not in self._fields:
            return 1.0
        node = self._fields["interval"]
        length = span.seconds(node.word())
        if not length:
            raise node.error(f"interval: {node.word()!r} is no duration; write 1s or 100ms")
        return length

    def _series(self) -> dict[tuple[Entity, str], list[float | None]]:
        found: dict[tuple[Entity, str], list[float | None]] = {}
        for node in self._list("input_series"):
            fields = node.fields("a series", ("series", *_APART, "values"), required=("series", "values"))
            key = (self._entity(fields), self._metric(fields))
            if key in found:
                raise node.error(f"{key[1]} of {key[0]} is there twice")
            found[key] = expand(fields["values"].text("values"))
        if not any(found.values()):
            raise self._fields["input_series"].error("there are no samples")
        return found

    def _metric(self, fields: Mapping[str, YamlNode]) -> str:
        name = fields["series"].string("series")
        if name not in self._scopes:
            raise fields["series"].error(f"unknown metric {name!r}{did_you_mean(name, self._scopes)}")
        scope = next((scope for scope in _APART if scope in fields), "rank")  # the run's value combines the ranks'
        if scope != self._scopes[name]:
            wanted = f"one number a {self._scopes[name]}: write `{self._scopes[name]}: NAME`"
            raise fields["series"].error(
                f"{name} is {wanted if self._scopes[name] != 'rank' else f'no number of a {scope}'}"
            )
        return name

    def _entity(self, fields: Mapping[str, YamlNode]) -> Entity:
        scopes = [scope for scope in _APART if scope in fields]
        if len(scopes) > 1:
            raise fields[scopes[0]].error("a series is of a rank, a layer, a GPU, a node, or of the run")
        if "rank" in fields:
            return Entity("rank", str(fields["rank"].integer("rank", 0, 10**6)))
        return Entity(scopes[0], fields[scopes[0]].word()) if scopes else RUN

    def _read_expected(self, node: YamlNode, steps: int) -> Expected:
        fields = node.fields("an expectation", ("step", "at", "alerts", "states"))
        if not {"alerts", "states"} & set(fields):
            raise node.error("an expectation needs 'alerts' or 'states': it could not fail")
        if ("step" in fields) == ("at" in fields):
            raise node.error("an expectation needs 'step', or 'at' (a time)")
        step = fields["step"].integer("step", 0, steps - 1) if "step" in fields else self._step_at(fields["at"], steps)
        alerts = None
        if "alerts" in fields:
            alerts = tuple((alert, self._alert(alert)) for alert in fields["alerts"].sequence("alerts"))
        states = {}
        if "states" in fields:
            for key, value in fields["states"].items("states"):
                if value.word() not in STATES:
                    raise value.error(f"{value.word()!r} is no state{did_you_mean(value.word(), STATES)}")
                states[self._read_rule_name(key)] = (key, value.word())
        return Expected(step, node.line, alerts, states)

    def _step_at(self, node: YamlNode, steps: int) -> int:
        """Return the last step that has ended by the time that `node` gives."""
        length = span.seconds(node.string("at"))
        step = int(length / self._interval() + 1e-9) if length is not None else steps
        if step >= steps:
            raise node.error(f"at: {node.word()!r} is no time within the {steps} steps; write 90s or 5m")
        return step

    def _alert(self, node: YamlNode) -> dict[str, object]:
        fields = node.fields("an alert", _ALERT_KEYS, required=("alert",))
        found: dict[str, object] = {"alert": self._read_rule_name(fields["alert"])}
        if "severity" in fields:
            found["severity"] = fields["severity"].string("severity")
            if found["severity"] not in SEVERITIES:
                raise fields["severity"].error(f"severity is one of {', '.join(SEVERITIES)}")
        if "first_step" in fields:
            found["first_step"] = fields["first_step"].integer("first_step", 0, 10**9)
        for key in ("actions", "evidence", "members"):
            if key in fields:
                words = [item.word() for item in fields[key].sequence(key)]
                found[key] = sorted(words) if key == "members" else words
        if "annotations" in fields:
            for name, text in fields["annotations"].fields("annotations", ANNOTATIONS).items():
                found[name] = text.string(name)
        return found

    def _read_fired(self) -> tuple[YamlNode, dict[str, list[int]]] | None:
        if "fired" not in self._fields:
            return None
        node = self._fields["fired"]
        steps = {
            self._read_rule_name(key): [step.integer("step", 0, 10**9) for step in value.sequence("steps")]
            for key, value in node.items("fired")
        }
        return node, {name: at for name, at in steps.items() if at}

    def _read_rule_name(self, node: YamlNode) -> str:
        if node.word() not in self._names:
            raise node.error(f"no rule is called {node.word()!r}{did_you_mean(node.word(), self._names)}")
        return node.word()
