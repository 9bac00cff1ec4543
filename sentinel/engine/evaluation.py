"""The evaluator: observations in, transitions of incidents out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import msgspec

from sentinel.engine.history import History
from sentinel.engine.incident import Incident, Incidents, Member, Transition
from sentinel.engine.judgement import Judge, Status
from sentinel.engine.observation import Entity, Observation, Step
from sentinel.engine.plan import ASKED, SEQ, Cohort, Slots, Track, UnreadyError
from sentinel.engine.rule import Condition, Rule, plans_of
from sentinel.engine.state import StateError, dumps, loads

SCHEDULE_LIMIT = 512
"""Sets of metrics that are sampled together, whose rules are remembered. A run has as many as its spacings differ."""


class RuleStatus(msgspec.Struct, frozen=True):
    """Where a rule stands for one entity."""

    rule: str
    entity: Entity
    state: Status
    judged: int
    """Judgements that could be made so far. None: the rule has not found anything well."""
    lacking: tuple[str, ...]
    """Where there is no data, or the rule does not apply: the metrics for want of which there is no judgement."""
    values: dict[str, float]
    """The rule's metrics and lets, as far as they have a value."""


class Watch:
    """The state of one rule: tracks and judges. Data only, like all that it is made of, and so it can be copied."""

    __slots__ = ("active", "blind", "cohort", "judges", "named", "passed", "timed")

    def __init__(self, rule: Rule) -> None:
        self.cohort = Cohort(rule.condition.plan)
        self.named = Cohort(rule.members.plan) if rule.members else None
        self.judges: dict[Entity, Judge] = {}
        self.active: set[Entity] = set()
        """Those that are pending or firing."""
        self.blind: set[Entity] = set()
        """Those that cannot be judged for a NaN or an infinity."""
        self.timed: set[Entity] = set()
        """Those whose last judgement may become another as time passes, without a sample."""
        self.passed = rule.every - 1
        """Steps that it has not looked at, since it last did: see `Rule.every`."""

    def passes(self, every: int) -> bool:
        """Whether a step that has a sample for the rule is none of those that it looks at."""
        self.passed = (self.passed + 1) % every
        return self.passed > 0

    def advance(self, rule: Rule, step: Step, warm: bool) -> Verdicts | None:
        """Take a step; answer what it did, None where it did nothing. Need not be called where `idle`."""
        frozen: Sequence[Entity] = ()
        if self.active:
            frozen = [entity for entity in self.active if self.judges[entity].frozen(step.seq, rule.rebase_after)]
        fired: list[News] = []
        named: list[News] = []
        resolved = False
        for entity, track in self.cohort.advance(rule.condition.plan, step, frozen):
            judge = self.judges.get(entity)
            if judge is None:
                judge = self.judges[entity] = Judge()
            slots = track.slots
            slots[ASKED] = None
            holds, judge.note = _verdict(rule.condition, slots, warm)
            if holds is not None:
                change = judge.judge(holds, step.seq, step.time, rule.for_, rule.keep_firing)
                if change == "fired":
                    fired.append((entity, track))
                elif change == "resolved":
                    resolved = True
            # Most are none of the three, and were not.
            if self.active or judge.suspicious:
                _mark(self.active, entity, judge.suspicious)
            if self.blind or judge.note == "nonfinite":
                _mark(self.blind, entity, judge.note == "nonfinite")
            if self.timed or not warm or slots[ASKED] is not None:
                _mark(self.timed, entity, slots[ASKED] is not None or not warm)
        if self.named is not None and rule.members is not None:
            news = self.named.advance(rule.members.plan, step, (), below_frozen=bool(frozen))
            if self.active:
                named = [(e, track) for e, track in news if _verdict(rule.members, track.slots, True)[0]]
        return Verdicts(fired, named, resolved) if fired or named or resolved else None

    def idle(self, rule: Rule, step: Step) -> bool:
        """Whether this step can change nothing. It is so for most rules at most steps, and spares the daemon."""
        plan = rule.condition.plan
        if not self.cohort.idle(plan, step):
            return False
        if self.named is not None and rule.members is not None and not self.named.idle(rule.members.plan, step):
            return False
        if not plan.always:
            return True
        return not (self.active or self.timed or plan.awaited >> SEQ & 1)

    def disarm(self) -> None:
        """After a rollback nothing is firing."""
        for entity in list(self.active):
            judge = self.judges[entity]
            judge.firing = False
            _mark(self.active, entity, judge.pending)


News = tuple[Entity, Track]


@dataclass(slots=True)
class Verdicts:
    """What a step did to a rule."""

    fired: list[News]
    named: list[News]
    """For whom the rule's `members` condition holds."""
    resolved: bool


def _mark(those: set[Entity], entity: Entity, belongs: bool) -> None:
    if belongs:
        those.add(entity)
    elif those:
        those.discard(entity)


def _verdict(condition: Condition, slots: Slots, warm: bool) -> tuple[bool | None, Status]:
    """What the condition says; or None, and what stands in the way."""
    for slot in condition.needs:
        if slots[slot] is None:
            return None, "not applicable"
    for slot in condition.finite:
        value = slots[slot]
        if value is not None and not math.isfinite(value):
            return None, "nonfinite"
    try:
        holds = bool(condition.term.read(slots))
    except UnreadyError as error:
        for slot in condition.sources[error.slot]:
            if slots[slot] is None:
                return None, "no data"
        return None, "warming"
    return (holds, "inactive") if warm else (None, "warming")


def _numbers(condition: Condition, slots: Slots) -> dict[str, float]:
    found = {}
    for name, term in condition.shown:
        try:
            found[name] = float(term.read(slots))
        except UnreadyError:
            continue
    return found


def _unseen(rule: Rule) -> Status:
    """Where a rule stands for whom it never had a sample of."""
    return "not applicable" if rule.needs else "no data"


def _lacking(rule: Rule, slots: Slots | None) -> tuple[str, ...]:
    """Metrics without a sample that stand in the way: what it needs, or what its condition asked for first."""
    needed = zip(rule.needs, rule.condition.needs, strict=True)
    if wanting := tuple(name for name, slot in needed if slots is None or slots[slot] is None):
        return wanting
    inputs = {source.slot: source.metric for source in rule.condition.plan.inputs}
    if slots is not None:
        try:
            rule.condition.term.read(slots)
        except UnreadyError as error:
            found = {inputs[slot] for slot in rule.condition.sources[error.slot] & inputs.keys() if slots[slot] is None}
            return tuple(sorted(found or rule.condition.term.metrics))
    return tuple(sorted(rule.condition.term.metrics))


Due = tuple[Rule, Watch, bool]
"""Whether it rests: nothing that it reads was sampled, and unless something is open or timed nothing can change."""


class Schedule:
    """Which rules a step can be news to, by what was sampled: most rules at most steps have nothing to look at."""

    def __init__(self, rules: Sequence[Rule], watches: Sequence[Watch]) -> None:
        self._all = list(zip(rules, watches, strict=True))
        self._read = [set[str]().union(*(plan.metrics for plan in plans_of([rule]))) for rule in rules]
        self._known: set[Entity] = set()
        self._due: dict[frozenset[tuple[str, ...]], list[Due]] = {}

    def due(self, values: Mapping[Entity, Mapping[str, float]]) -> list[Due]:
        """Rules over a metric that has a sample, and those that ask for the time; where somebody is new all others
        too, but for those that count or choose their samples."""
        names = frozenset(map(tuple, values.values()))
        if not values.keys() <= self._known:
            self._known |= values.keys()
            return self._over(names, whole=True)
        due = self._due.get(names)
        if due is None:
            if len(self._due) >= SCHEDULE_LIMIT:
                self._due.clear()
            due = self._due[names] = self._over(names)
        return due

    def _over(self, names: Iterable[tuple[str, ...]], whole: bool = False) -> list[Due]:
        seen = {metric for sampled in names for metric in sampled}
        due = []
        for (rule, watch), read in zip(self._all, self._read, strict=True):
            fresh = not read.isdisjoint(seen)
            if rule.at in seen if rule.at else fresh or (rule.every == 1 and (whole or rule.always)):
                due.append((rule, watch, not fresh and not whole and rule.may_rest))
        return due

    def over(self, metrics: Set[str]) -> list[Due]:
        """Rules over one of these metrics."""
        return [(rule, watch, False) for rule, watch in self._all if not rule.metrics.isdisjoint(metrics)]


class Evaluator:
    """Applies rules to one run, step by step."""

    def __init__(self, rules: Iterable[Rule], *, run: str, step_offset: int = 0, incidents: int = 0) -> None:
        """`step_offset` is what makes a seq the step that people are shown; `incidents`: how many there were before,
        whose ids are taken."""
        self._rules = tuple(rules)
        assert len({rule.name for rule in self._rules}) == len(self._rules), "see `rules_of`"
        self._run, self.step_offset = run, step_offset
        self._watches = [Watch(rule) for rule in self._rules]
        self._incidents = Incidents(incidents)
        self._start: tuple[int, float] | None = None
        self._time = 0.0
        self._history = History(plans_of(self._rules))
        self._schedule = Schedule(self._rules, self._watches)

    @property
    def incidents(self) -> list[Incident]:
        """Open ones and the last that ended, by id."""
        return self._incidents.all()

    @property
    def suspicious(self) -> bool:
        """Whether something may be starting that finer samples would show: a rule is pending or firing, or cannot be
        judged for a NaN. One that reads the clock's numbers alone gains nothing from them."""
        for watch, rule in zip(self._watches, self._rules, strict=True):
            if (watch.active or watch.blind) and not rule.clocked:
                return True
        return False

    def observe(self, observation: Observation) -> list[Transition]:
        """Take a closed step; steps come in rising order of seq."""
        step = Step(observation)
        self._start = self._start or (step.seq, step.time)
        transitions = self._judged(step, self._schedule.due(observation.values))
        self._history.record(observation)
        if self._history.checkpoint_due:
            self._history.checkpoint(observation.seq, dumps(self._watches))
        return transitions

    def observe_between(self, observation: Observation) -> list[Transition]:
        """Take numbers that are measured by the clock, between two steps; `seq` is that of the last step.

        Only rules over such numbers are judged. `rewound` does not bring them back: they are not the run's state.
        """
        measured = {metric for values in observation.values.values() for metric in values}
        return self._judged(Step(observation), self._schedule.over(measured))

    def _judged(self, step: Step, due: Iterable[Due]) -> list[Transition]:
        self._time = step.time
        transitions: list[Transition] = []
        for rule, watch, rests in due:
            if rests and not watch.active and not watch.timed:
                continue
            verdicts = self._advance(rule, watch, step)
            if verdicts is None:
                continue
            transitions += self._opened(rule, watch, step, verdicts)
            if verdicts.resolved and not any(judge.firing for judge in watch.judges.values()):
                incident = self._incidents.end(rule.name, "resolved", step.seq, step.time)
                transitions.append(Transition(incident, "resolved"))
        return transitions

    def rewound(self, to: int, at: int) -> list[Transition]:
        """The run went back to where it was after step `to`; the next step is after `at`.

        Windows and judgements are again as they were after `to`, as if later samples had never been: exactly, as far
        back as `History` reaches, and from its nearest older checkpoint beyond. Open incidents end as rolled back,
        and nothing fires: what held already at `to` is pending.
        """
        checkpoint, replay = self._history.rewind(to)
        self._watches = loads(checkpoint) if checkpoint else [Watch(rule) for rule in self._rules]
        self._schedule = Schedule(self._rules, self._watches)
        for observation in replay:
            step = Step(observation)
            for rule, watch, _ in self._schedule.due(observation.values):
                self._advance(rule, watch, step)
        for watch in self._watches:
            watch.disarm()
        ended = [self._incidents.end(rule, "rolled back", at, self._time) for rule in list(self._incidents.open)]
        return [Transition(incident, "rolled back") for incident in ended]

    def saved(self) -> tuple[bytes, list[tuple[int, bytes]]]:
        """The state after the last step, and the older ones that `rewound` can go back to, by seq."""
        return dumps((self._watches, self._incidents, self._start, self._time)), self._history.checkpoints

    def restore(self, state: bytes, checkpoints: Sequence[tuple[int, bytes]], past: Iterable[Observation]) -> None:
        """Go on from what `saved` gave, with the same rules; `past` are the steps up to then, as far as they are known.

        Raises StateError, with nothing changed, where it is not the state of such rules.
        """
        watches, incidents, start, time = loads(state)
        if [type(watch) for watch in watches] != [Watch] * len(self._rules) or not isinstance(incidents, Incidents):
            raise StateError("not a state of these rules")
        self._watches, self._incidents, self._start, self._time = watches, incidents, start, time
        self._history.restore(checkpoints, past)
        self._schedule = Schedule(self._rules, self._watches)

    def replaced(self, rules: Iterable[Rule]) -> list[Transition]:
        """Apply these rules from now on.

        A rule of the same text goes on as it was. One that is new or changed begins with empty windows, and an incident
        of one that is gone or changed ends as resolved. `rewound` to before this begins with empty windows, too.
        """
        known = {rule.text: watch for rule, watch in zip(self._rules, self._watches, strict=True)}
        self._rules = tuple(rules)
        self._watches = [known.get(rule.text) or Watch(rule) for rule in self._rules]
        self._history = History(plans_of(self._rules))
        self._schedule = Schedule(self._rules, self._watches)
        kept = {rule.name for rule in self._rules if rule.text in known}
        ended = [
            self._incidents.end(rule, "resolved", None, self._time)
            for rule in list(self._incidents.open)
            if rule not in kept
        ]
        return [Transition(incident, "resolved") for incident in ended]

    def status(self) -> list[RuleStatus]:
        """Every rule, for each entity that it has seen; for nobody in particular where it has seen none."""
        rows = []
        for rule, watch in zip(self._rules, self._watches, strict=True):
            for entity, track in watch.cohort.tracks.items():
                judge = watch.judges.get(entity)
                state = judge.status if judge else _unseen(rule)
                lacking = _lacking(rule, track.slots) if state in ("no data", "not applicable") else ()
                values = _numbers(rule.condition, track.slots)
                rows.append(RuleStatus(rule.name, entity, state, judge.judged if judge else 0, lacking, values))
            if not watch.cohort.tracks:
                rows.append(RuleStatus(rule.name, Entity(rule.scope, ""), _unseen(rule), 0, _lacking(rule, None), {}))
        return rows

    def states(self) -> Counter[Status]:
        """How many entities are in each state, over all rules; a rule that has seen nobody counts as one."""
        found: Counter[Status] = Counter()
        for rule, watch in zip(self._rules, self._watches, strict=True):
            judges = [watch.judges.get(entity) for entity in watch.cohort.tracks] or [None]
            found.update(judge.status if judge else _unseen(rule) for judge in judges)
        return found

    def _advance(self, rule: Rule, watch: Watch, step: Step) -> Verdicts | None:
        if rule.every > 1 and watch.passes(rule.every):
            return None
        if rule.condition.plan.always and watch.idle(rule, step):
            return None
        seq, time = self._start or (step.seq, step.time)
        return watch.advance(rule, step, rule.warmup.reached(step.seq - seq, step.time - time))

    def _opened(self, rule: Rule, watch: Watch, step: Step, verdicts: Verdicts) -> list[Transition]:
        """What fired opens an incident, or joins the one that is open; so does whom the rule names."""
        incident = self._incidents.open.get(rule.name)
        if incident is None:
            if not verdicts.fired:
                return []
            incident = self._incidents.new(rule, self._run, step, verdicts.fired[0][1].slots)
            kind: Literal["fired", "joined"] = "fired"
        else:
            kind = "joined"
        known = len(incident.members)
        for entity, track in verdicts.fired:
            first = watch.judges[entity].first_seq
            incident.join(entity, Member(first, step.seq, _numbers(rule.condition, track.slots)))
        for entity, track in verdicts.named:
            assert rule.members is not None
            incident.join(entity, Member(step.seq, step.seq, _numbers(rule.members, track.slots)))
        if kind == "joined" and len(incident.members) == known:
            return []
        self._incidents.describe(incident, rule, self.step_offset)
        return [Transition(incident, kind)]
