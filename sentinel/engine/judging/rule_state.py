"""The state of one rule: what it keeps of each entity, and how a step changes that."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sentinel.engine.expressions.plan import ASKED, SEQ, Cohort, News, Plan, Scan, Slots, Track, UnreadyError
from sentinel.engine.judging.incident import holds_now
from sentinel.engine.judging.judgement import Judge, Status
from sentinel.engine.observation import Entity, ObservedStep, Sampled, Table
from sentinel.engine.rules.rule import Condition, Rule

PIECE = 32
"""Entities that are processed in one piece."""


@dataclass(slots=True)
class Verdicts:
    """The effect of a step on a rule."""

    fired: list[tuple[Entity, Track]] = field(default_factory=list)
    named: list[tuple[Entity, Track]] = field(default_factory=list)
    """Entities for which the rule's `members` condition holds."""
    resolved: bool = False


class Skimmed(NamedTuple):
    """Steps whose tables were judged as a whole, and what tracks and judges still lack of them."""

    table: Table
    """The table of the last of them. All have the same entities."""
    slots: Slots
    """The slots at the last of them, with what is the same for all entities."""
    steps: int


DeferredJudging = Generator[int, None, Verdicts | None]
"""A step's work for a rule: yields for each piece about how many operations it took, and returns the verdicts, or None
if there are none."""


class RuleState:
    """The state of one rule: tracks and judges. Data only, with all its parts, so that it can be copied."""

    __slots__ = ("_skimmed", "active", "cohort", "judges", "named", "nonfinite", "passed", "timed")

    def __init__(self, rule: Rule) -> None:
        self.cohort = Cohort(rule.condition.plan)
        self.named = Cohort(rule.members.plan) if rule.members else None
        self.judges: dict[Entity, Judge] = {}
        self.active: set[Entity] = set()
        """Entities that are pending or firing."""
        self.nonfinite: set[Entity] = set()
        """Entities that cannot be judged because of a NaN or an infinity."""
        self.timed: set[Entity] = set()
        """Entities whose last judgement may change as time passes, without a sample."""
        self.passed = rule.every - 1
        """Steps that it has passed over since the last one that it judged: see `Rule.every`."""
        self._skimmed: Skimmed | None = None

    def skip_sample(self, every: int) -> bool:
        """Count a sample; return whether the rule skips it."""
        self.passed = (self.passed + 1) % every
        return self.passed > 0

    def advance(self, rule: Rule, step: ObservedStep, warm: bool) -> Verdicts | None:
        """Take a step; return what it did, None where it did nothing. Need not be called where `idle`."""
        condition, cohort = rule.condition, self.cohort
        if condition.scan or self.active or cohort.below or len(group := step.list_sampled(rule.scope)) != 1:
            return self._advance_all(rule, step, warm)
        # One entity, nothing pending or firing, no feeds: the common case of most rules at most steps. The general way
        # took as long as the windows.
        entity, values = group[0]
        track, plan = cohort.tracks.get(entity), condition.plan
        if track is None:
            track = cohort.tracks[entity] = Track(plan)
        track.fresh = plan.advance(track.slots, track.states, step.seq, step.time, values, plan.standing, False)
        verdicts = self._judge(rule, step, warm, entity, track, None) if track.fresh else None
        return verdicts if self.named is None else self._name_members(rule, step, verdicts, ())

    def _advance_all(self, rule: Rule, step: ObservedStep, warm: bool) -> Verdicts | None:
        plan, cohort = rule.condition.plan, self.cohort
        frozen = self._list_frozen(rule, step) if self.active else ()
        cohort.feed(plan, step, bool(frozen))
        if self._skim(rule, step, warm):
            return None
        verdicts = None
        for entity, track in cohort.take(plan, step.list_sampled(plan.scope), step, frozen):
            verdicts = self._judge(rule, step, warm, entity, track, verdicts)
        return verdicts if self.named is None else self._name_members(rule, step, verdicts, frozen)

    def judge_in_parts(self, rule: Rule, step: ObservedStep, warm: bool) -> DeferredJudging:
        """Take a step in pieces. The next step must not begin before this one is finished."""
        plan, cohort = rule.condition.plan, self.cohort
        frozen = self._list_frozen(rule, step) if self.active else ()
        if cohort.below:
            below: list[News] = []
            for subplan, feeding in zip(plan.subplans, cohort.below, strict=True):
                feeding.feed(subplan, step, bool(frozen))
                news: News = []
                for group in _pieces(step.list_sampled(subplan.scope)):
                    news += feeding.take(subplan, group, step, (), bool(frozen))
                    yield len(group) * subplan.weight
                below.append(news)
            cohort.gather(plan, below)
        if self._skim(rule, step, warm):
            return None
        verdicts = None
        for group in _pieces(step.list_sampled(plan.scope)):
            for entity, track in cohort.take(plan, group, step, frozen):
                verdicts = self._judge(rule, step, warm, entity, track, verdicts)
            yield len(group) * plan.weight
        return self._name_members(rule, step, verdicts, frozen)

    def _skim(self, rule: Rule, step: ObservedStep, warm: bool) -> bool:
        """Judge the step's table as a whole, after the rule's feeds have their values. True: the condition holds for
        none of its entities, and did not before; only what `catch_up` does is left to do."""
        condition, table = rule.condition, step.table
        if condition.scan and table and table.scope == rule.scope and not (self.active or self.nonfinite or self.timed):
            slots = Track(condition.plan).slots
            self.cohort.put(condition.plan, slots)
            if _holds_for_none(condition, condition.scan, slots, table, warm):
                if self._skimmed is not None and self._skimmed.table.entities != table.entities:
                    self.catch_up(rule)
                self._skimmed = Skimmed(table, slots, 1 + (self._skimmed.steps if self._skimmed else 0))
                return True
        self.catch_up(rule)
        return False

    def catch_up(self, rule: Rule) -> None:
        """Write into tracks and judges what they lack of skimmed steps. To be called before they are read."""
        if self._skimmed is None:
            return
        (table, slots, steps), self._skimmed = self._skimmed, None
        plan = rule.condition.plan
        for entity, row in zip(table.entities, _list_rows(plan, table), strict=True):
            track = self.cohort.tracks.setdefault(entity, Track(plan))
            track.slots = list(slots)
            for source, value in zip(plan.inputs, row, strict=True):
                track.slots[source.slot] = value
            judge = self.judges.setdefault(entity, Judge())
            judge.judged += steps
            judge.note = "inactive"

    def _list_frozen(self, rule: Rule, step: ObservedStep) -> Sequence[Entity]:
        return [entity for entity in self.active if self.judges[entity].is_frozen(step.seq, rule.rebase_after)]

    def _name_members(
        self, rule: Rule, step: ObservedStep, verdicts: Verdicts | None, frozen: Sequence[Entity]
    ) -> Verdicts | None:
        """Find further entities to name, after all are judged."""
        if self.named is None or rule.members is None or (not self.active and rule.members.plan.forgetful):
            return verdicts
        named = self.named.advance(rule.members.plan, step, below_frozen=bool(frozen))
        if self.active:
            found = [(entity, track) for entity, track in named if _verdict(rule.members, track.slots, True)[0]]
            if found:
                verdicts = verdicts or Verdicts()
                verdicts.named = found
        return verdicts

    def _judge(
        self, rule: Rule, step: ObservedStep, warm: bool, entity: Entity, track: Track, verdicts: Verdicts | None
    ) -> Verdicts | None:
        """Judge one entity; return the verdicts, with what is new."""
        judge = self.judges.get(entity)
        if judge is None:
            judge = self.judges[entity] = Judge()
        slots = track.slots
        slots[ASKED] = None
        holds, note = _verdict(rule.condition, slots, warm)
        if holds is False and judge.firing and rule.keep_while is not None:
            holds = holds_now(rule.keep_while, slots)
        judge.note = note
        # Most entities are in none of the three sets, and were in none before.
        if holds is False and entity not in self.active:
            judge.judged += 1  # all that `judge` would do
        elif holds is not None:
            change = judge.judge(holds, step.seq, step.time, rule.for_, rule.keep_firing)
            if change:
                verdicts = verdicts or Verdicts()
                if change == "fired":
                    verdicts.fired.append((entity, track))
                verdicts.resolved |= change == "resolved"
            if self.active or judge.suspicious:
                _mark(self.active, entity, judge.suspicious)
        if self.nonfinite or note == "nonfinite":
            _mark(self.nonfinite, entity, note == "nonfinite")
        if self.timed or not warm or slots[ASKED] is not None:
            _mark(self.timed, entity, slots[ASKED] is not None or not warm)
        return verdicts

    def idle(self, rule: Rule, step: ObservedStep) -> bool:
        """Return whether this step can change nothing. True for most rules at most steps, which saves the daemon
        work."""
        plan = rule.condition.plan
        if not self.cohort.idle(plan, step):
            return False
        if self.named is not None and rule.members is not None and not self.named.idle(rule.members.plan, step):
            return False
        if not plan.always:
            return True
        return not (self.active or self.timed or plan.awaited >> SEQ & 1)

    def disarm(self) -> None:
        """Mark all as not firing, after a rollback."""
        for entity in list(self.active):
            judge = self.judges[entity]
            judge.firing = False
            _mark(self.active, entity, judge.pending)


def _list_rows(plan: Plan, table: Table) -> Iterable[tuple[float, ...]]:
    """Return the values that the plan reads, for each entity."""
    return zip(*(table.columns[source.metric] for source in plan.inputs), strict=True)


def finish_judging(work: DeferredJudging) -> Verdicts | None:
    """Do all of the work."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            verdicts: Verdicts | None = done.value
            return verdicts


def _pieces(group: Sequence[Sampled]) -> Iterable[Sequence[Sampled]]:
    return (group,) if len(group) <= PIECE else _cut(group)


def _cut(group: Sequence[Sampled]) -> Iterator[Sequence[Sampled]]:
    for start in range(0, len(group), PIECE):
        yield group[start : start + PIECE]


def _mark(those: set[Entity], entity: Entity, belongs: bool) -> None:
    if belongs:
        those.add(entity)
    elif those:
        those.discard(entity)


def _verdict(condition: Condition, slots: Slots, warm: bool) -> tuple[bool | None, Status]:
    """Return whether the condition holds; or None, and what prevents a judgement."""
    for slot in condition.needs:
        if slots[slot] is None:
            return None, "not applicable"
    for slot in condition.finite:
        value = slots[slot]
        if value is not None and not -math.inf < value < math.inf:
            return None, "nonfinite"
    try:
        holds = bool(condition.term.read(slots))
    except UnreadyError as error:
        for slot in condition.sources[error.slot]:
            if slots[slot] is None:
                return None, "no data"
        return None, "warming"
    return (holds, "inactive") if warm else (None, "warming")


def _holds_for_none(condition: Condition, scan: Scan, slots: Slots, table: Table, warm: bool) -> bool:
    """Return whether a condition is judged false for every entity of a table; `slots` have the values of the feeds."""
    plan = condition.plan
    if not plan.reads <= table.columns.keys():
        return False
    for source in plan.inputs:
        column = table.columns[source.metric]
        slots[source.slot] = column[0]
        if not math.isfinite(sum(column)):
            return False
    if _verdict(condition, slots, warm) != (False, "inactive"):
        return False
    try:
        return not scan(slots, _list_rows(plan, table))
    except UnreadyError:
        return False
