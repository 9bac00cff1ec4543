"""Apply rules to a recorded run: the steps of a recording in, the alerts that would have fired out."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

import msgspec

from sentinel.engine.expressions.syntax import parse
from sentinel.engine.judging.evaluation import Evaluator
from sentinel.engine.judging.incident import Incident, Transition
from sentinel.engine.judging.judgement import Status
from sentinel.engine.observation import Observation, Rewound, Staged
from sentinel.engine.rules.rule import Rule
from sentinel.engine.source import Text


class Alert(msgspec.Struct, frozen=True):
    """An incident that would have been opened."""

    alert: str
    severity: str
    step: int
    """The step at which it would have fired, as the log counts."""
    first_step: int
    """The first step at which its condition held."""
    state: str
    """Its state at the end of the recording, or how it ended: `firing`, `resolved` or `rolled_back`."""
    over_step: int | None
    summary: str
    values: dict[str, float]
    """The rule's metrics and lets when it fired."""
    members: tuple[str, ...]
    """The ranks or layers that it is about; empty where it is about the run."""
    annotations: dict[str, str]


class Looked(msgspec.Struct, frozen=True):
    """What a rule could see of the run. A rule that could not judge does not show that the run was healthy."""

    rule: str
    severity: str
    judged: int
    """Judgements that it made, each of one entity at one step. 0 where it could not have fired, as metrics are
    missing."""
    state: Status
    """Its state at the end; the reason, where `judged` is 0."""
    missing: tuple[str, ...]
    """Where there was no data, or the rule does not apply: the metrics that are missing."""


class Backtest(msgspec.Struct, frozen=True):
    """A recorded run as the rules saw it."""

    alerts: tuple[Alert, ...]
    rules: tuple[Looked, ...]
    steps: int


def backtest(
    rules: Sequence[Rule], observations: Iterable[Observation | Rewound | Staged], *, run: str, step_offset: int = 0
) -> Backtest:
    """Apply rules to recorded steps, as a daemon would have."""
    evaluator = Evaluator(rules, run=run, step_offset=step_offset)
    numbering, transitions = _Numbering(step_offset), list[Transition]()
    steps, seen = 0, set[str]()
    for item in observations:
        if isinstance(item, Rewound):
            transitions += evaluator.rewind(item.to, item.at)
            evaluator.step_offset = item.step_offset
            numbering.change(item.at + 1, item.step_offset)
        elif isinstance(item, Staged):
            transitions += evaluator.begin_stage()
        else:
            steps += 1
            seen.update(*item.values.values(), item.table.columns if item.table is not None else ())
            transitions += evaluator.observe(item)
    transitions += evaluator.finish_deferred()
    return Backtest(
        alerts=tuple(_alert(one.incident, numbering) for one in transitions if one.kind == "fired"),
        rules=tuple(_list_judging(evaluator, rules, seen)),
        steps=steps,
    )


class _Numbering:
    """The logged step of each seq. An incident may begin before the log was resumed further back, and end after it."""

    def __init__(self, offset: int) -> None:
        self._starts, self._offsets = list[int](), [offset]

    def change(self, seq: int, offset: int) -> None:
        """Add this offset to seqs from `seq` on."""
        self._starts.append(seq)
        self._offsets.append(offset)

    def find_step(self, seq: int) -> int:
        return seq + self._offsets[bisect_right(self._starts, seq)]


def _alert(incident: Incident, numbering: _Numbering) -> Alert:
    first = next(iter(incident.members.values()))
    return Alert(
        alert=incident.rule,
        severity=incident.severity,
        step=numbering.find_step(incident.seq),
        first_step=numbering.find_step(incident.first_seq),
        state=incident.state,
        over_step=None if incident.resolved_seq is None else numbering.find_step(incident.resolved_seq),
        summary=incident.summary,
        values=first.values,
        members=tuple(str(entity) for entity in incident.members if entity.scope != "run"),
        annotations=incident.annotations,
    )


def _list_judging(evaluator: Evaluator, rules: Sequence[Rule], seen: Collection[str]) -> Iterable[Looked]:
    rows = evaluator.status()
    for rule in rules:
        mine = [row for row in rows if row.rule == rule.name]
        judged = sum(row.judged for row in mine)
        if judged and _settle(parse(Text.plain(rule.expr)).tree, rule, seen) is False:
            yield Looked(rule.name, rule.severity, 0, "no data", tuple(sorted(rule.metrics - {*seen})))
        else:
            lacking = mine[0].lacking
            never = tuple(metric for metric in lacking if metric not in seen)
            yield Looked(rule.name, rule.severity, judged, mine[0].state, lacking if judged else never or lacking)


def _settle(node: ast.expr, rule: Rule, seen: Collection[str]) -> bool | None:
    """Return the value that a condition has because metrics that it asks for (`absent`) never had a sample, whatever
    the values of the others; None where it depends on them."""
    match node:
        case ast.Call(func=ast.Name(id="absent"), args=[ast.Name(id=metric), *_]):
            return None if metric in seen else True
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            value = _settle(inner, rule, seen)
            return None if value is None else not value
        case ast.BoolOp(op=op, values=parts):
            values, either = [_settle(part, rule, seen) for part in parts], isinstance(op, ast.Or)
            if either in values:
                return either
            return None if None in values else not either
        case ast.Name(id=name) if name in rule.lets:
            return _settle(parse(Text.plain(rule.lets[name])).tree, rule, seen)
    return None
