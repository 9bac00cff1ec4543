"""Incidents of a run: an incident is one rule over one run; ranks, layers, GPUs and nodes are its members."""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

import msgspec

from sentinel.engine.expressions.builder import Term
from sentinel.engine.expressions.plan import Slots, UnreadyError
from sentinel.engine.observation import RUN, Entity, ObservedStep
from sentinel.engine.rules.rule import OVER, Rule
from sentinel.text import join_names

ENDED_LIMIT = 200
"""Ended incidents that are kept in memory, at most; the history has them all."""

MEMBER_LIMIT = 1_000
"""Members that an incident names, at most."""


class Member(msgspec.Struct):
    """One entity in an incident."""

    first_seq: int
    """The first step at which the condition held for it."""
    seq: int
    """The step at which it joined."""
    values: dict[str, float]
    """The rule's numbers for it at that step: its metrics and its lets."""


class Incident(msgspec.Struct):
    """A rule that fired, from the first sign to the end."""

    id: int
    """Id unique within the run, rising."""
    run: str
    rule: str
    severity: str
    state: Literal["firing", "resolved", "rolled_back"]
    first_seq: int
    """The first step at which the condition held, for any member."""
    seq: int
    """The step at which it fired."""
    time: float
    """Unix seconds at that step."""
    members: dict[Entity, Member]
    summary: str
    annotations: dict[str, str]
    """All annotations of the rule, rendered; `summary` is one of them."""
    actions: tuple[str, ...]
    runbook: str
    resolved_seq: int | None = None
    resolved_time: float | None = None
    evidence: tuple[str, ...] = ()
    """Evidence that ranks are asked for (`Rule.evidence`). It and `layers` have defaults for states that were kept
    without them."""
    layers: bool = False
    """Whether the diagnosis tells which layers' gradients grew."""
    problem: str = ""
    """The problem that it is a sign of (`Rule.problem`). It and `consequence_of` have defaults for states without
    them."""
    consequence_of: tuple[str, ...] = ()

    def join(self, entity: Entity, member: Member) -> None:
        """Add a member; an entity that is a member already is left as it is."""
        if entity not in self.members and len(self.members) < MEMBER_LIMIT:
            self.members[entity] = member
            self.first_seq = min(self.first_seq, member.first_seq)


class Transition(NamedTuple):
    """A change of an incident."""

    incident: Incident
    kind: Literal["fired", "joined", "resolved", "rolled_back"]


class Incidents:
    """The incidents of a run: at most one open for each rule, and the last that ended."""

    def __init__(self, count: int = 0) -> None:
        self.open: dict[str, Incident] = {}
        """Rule -> its open incident."""
        self._ended: deque[Incident] = deque(maxlen=ENDED_LIMIT)
        self._slots: dict[str, Slots] = {}
        """Rule of an open incident -> the numbers for its annotations."""
        self._count = count

    def all(self) -> list[Incident]:
        """Return all incidents by id."""
        return sorted([*self._ended, *self.open.values()], key=lambda incident: incident.id)

    def new(self, rule: Rule, run: str, step: ObservedStep, slots: Slots) -> Incident:
        """Open an incident. It has no members and no text yet."""
        self._count += 1
        graded = rule.downgrade if rule.downgrade is not None and holds_now(rule.downgrade.term, slots) else rule
        incident = Incident(
            id=self._count, run=run, rule=rule.name, severity=graded.severity, state="firing",
            first_seq=step.seq, seq=step.seq, time=step.time, members={}, summary="", annotations={},
            actions=graded.actions, runbook=rule.runbook, evidence=rule.evidence, layers=rule.layers,
            problem=rule.problem, consequence_of=rule.consequence_of,
        )  # fmt: skip
        self.open[rule.name], self._slots[rule.name] = incident, list(slots)
        return incident

    def describe(self, incident: Incident, rule: Rule, step_offset: int) -> None:
        """Render the annotations for the members that it has by now."""
        slots, words = self._slots[rule.name], _list_words(incident, step_offset)
        incident.annotations = {
            name: text.render(slots, words) for name, text in rule.templates.items() if name != OVER
        }
        incident.summary = incident.annotations.get("summary", " ".join(rule.expr.split()))

    def describe_end(self, rule: Rule, slots: Slots, step_offset: int) -> None:
        """Render the annotation for the end of an incident that its rule ends, with the numbers of that moment."""
        incident = self.open[rule.name]
        if (text := rule.templates.get(OVER)) is not None:
            incident.annotations[OVER] = text.render(slots, _list_words(incident, step_offset))

    def end(self, rule: str, state: Literal["resolved", "rolled_back"], seq: int | None, time: float) -> Incident:
        """Close the open incident of a rule; `seq` is None where no step ended it."""
        incident = self.open.pop(rule)
        del self._slots[rule]
        incident.state, incident.resolved_seq, incident.resolved_time = state, seq, time
        self._ended.append(incident)
        return incident


def _list_words(incident: Incident, step_offset: int) -> dict[str, str]:
    return {
        "step": str(incident.seq + step_offset),
        "first_step": str(incident.first_seq + step_offset),
        "entity": str(next(iter(incident.members))),
        "members": join_names([str(entity) for entity in incident.members if entity != RUN], 3) or "not known yet",
        "run": incident.run,
    }


def holds_now(condition: Term, slots: Slots) -> bool:
    """Return whether a condition holds; False where it has no value yet."""
    try:
        return bool(condition.read(slots))
    except UnreadyError:
        return False
