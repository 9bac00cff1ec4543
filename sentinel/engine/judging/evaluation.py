"""The evaluator: observations in, transitions of incidents out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from sentinel.engine.expressions.plan import Slots, UnreadyError
from sentinel.engine.judging.history import ObservationHistory
from sentinel.engine.judging.incident import Incident, Incidents, Member, Transition
from sentinel.engine.judging.judgement import Status
from sentinel.engine.judging.rule_state import DeferredJudging, RuleState, Verdicts, finish_judging
from sentinel.engine.judging.schedule import Due, Schedule
from sentinel.engine.judging.state import RuleStateError, dumps, loads
from sentinel.engine.observation import Entity, Observation, ObservedStep
from sentinel.engine.rules.rule import Condition, Rule, plans_of

PORTION = 400
"""Operations, of 1 to 4 microseconds each, that a step spends on rules over many entities."""
BETWEEN = 6_000
"""Operations that are spent on them between two steps, while nothing waits."""


class RuleStatus(msgspec.Struct, frozen=True):
    """The state of a rule for one entity."""

    rule: str
    entity: Entity
    state: Status
    judged: int
    """Judgements made so far. 0: the rule could not judge yet, which does not mean that all is well."""
    lacking: tuple[str, ...]
    """Where there is no data, or the rule does not apply: the metrics whose absence prevents a judgement."""
    values: dict[str, float]
    """The rule's metrics and lets that have a value."""


def _numbers(condition: Condition, slots: Slots) -> dict[str, float]:
    found = {}
    for name, term in condition.shown:
        try:
            found[name] = float(term.read(slots))
        except UnreadyError:
            continue
    return found


def _unseen(rule: Rule) -> Status:
    """Return the status of a rule for an entity that it never had a sample of."""
    return "not applicable" if rule.needs else "no data"


def _lacking(rule: Rule, slots: Slots | None) -> tuple[str, ...]:
    """Return the metrics whose missing samples prevent a judgement: those that the rule needs, or that its condition
    asked for first."""
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


class Evaluator:
    """Applies rules to one run, step by step.

    A warning about each of a thousand ranks need not appear within milliseconds, and must not delay what has to: the
    work of such a rule is done in portions, at this step and the next ones, before the rule's own next step at the
    latest. Its result is returned when it is done, for the step that it is about.
    """

    def __init__(
        self, rules: Iterable[Rule], *, run: str, step_offset: int = 0, incidents: int = 0, rewindable: bool = True
    ) -> None:
        """`step_offset` is added to a seq to get the user's step; `incidents`: how many there were before, whose ids
        are taken; `rewindable`: whether `rewind` may be called at once, or only after `be_rewindable`."""
        self._rules = tuple(rules)
        assert len({rule.name for rule in self._rules}) == len(self._rules), "see `rules_of`"
        self._run, self.step_offset = run, step_offset
        self._states = [RuleState(rule) for rule in self._rules]
        self._incidents = Incidents(incidents)
        self._start: tuple[int, float] | None = None
        self._stage: tuple[int, float] | None = None
        """Seq and time of the start for rules that start over with a stage: in the first stage, those of the run's
        start."""
        self._staged = frozenset(rule.name for rule in self._rules if rule.staged)
        self._time = 0.0
        self._seq = -1
        """The seq of the last step."""
        self._history = ObservationHistory(plans_of(self._rules)) if rewindable else None
        """None where no rollback is possible: copies of the state took a tenth of a daemon's time in a fast loop."""
        self._schedule = Schedule(self._rules, self._states)
        self._deferred: dict[str, tuple[Rule, RuleState, ObservedStep, DeferredJudging]] = {}
        """Judgements of wide steps that are not finished, by rule."""
        self._late: list[Transition] = []
        """Transitions that were found between two calls, until the next call returns them."""

    @property
    def incidents(self) -> list[Incident]:
        """Open incidents and the last that ended, by id."""
        return self._incidents.all()

    @property
    def began(self) -> bool:
        """Whether any step was observed."""
        return self._start is not None

    @property
    def suspicious(self) -> bool:
        """Whether any rule is suspicious."""
        return bool(self.suspicions)

    @property
    def suspicions(self) -> list[str]:
        """Rules that finer samples would help: they are pending or firing, or cannot be judged because of a NaN. A rule
        that reads only what is measured by the clock gains nothing from such samples."""
        pairs = zip(self._states, self._rules, strict=True)
        return [rule.name for state, rule in pairs if (state.active or state.nonfinite) and not rule.clocked]

    @property
    def pending(self) -> list[Rule]:
        """Rules whose condition holds, but not yet for long enough: their next samples decide."""
        pairs = zip(self._states, self._rules, strict=True)
        return [
            rule for state, rule in pairs if state.active and any(state.judges[one].pending for one in state.active)
        ]

    def find_asking(self, action: str) -> dict[str, int]:
        """Return the rules that are pending or firing and ask for this action, and the first step of their condition. A
        rule whose incident was downgraded to less (`Rule.downgrade`) is left out."""
        return {
            rule.name: min(state.judges[entity].first_seq for entity in state.active)
            for state, rule in zip(self._states, self._rules, strict=True)
            if state.active and action in self._incidents.open.get(rule.name, rule).actions
        }

    def observe(self, observation: Observation) -> list[Transition]:
        """Take a closed step and return the transitions; steps come in rising order of seq."""
        step = ObservedStep(observation)
        self._seq = step.seq
        self._start = self._start or (step.seq, step.time)
        self._stage = self._stage or (step.seq, step.time)
        transitions = self._judge_due(step, self._schedule.due(step))
        if self._history is not None:
            self._history.record(step)
            if self._history.checkpoint_due:
                transitions += self.finish_deferred()
                self._history.checkpoint(step.seq, dumps(self._states))
        return transitions

    def be_rewindable(self) -> list[Transition]:
        """Make `rewind` possible from now on, exactly to the last step or a later one. A rewind to an earlier step, of
        which nothing was kept, begins with empty windows. Returns the transitions of the work that was left."""
        if self._history is not None:
            return []
        transitions = self.finish_deferred()
        self._begin_history()
        return transitions

    def _begin_history(self) -> None:
        """Make the present state the oldest that `rewind` can go back to."""
        self._history = ObservationHistory(plans_of(self._rules))
        if self._seq >= 0:
            self._history.checkpoint(self._seq, dumps(self._states))

    def observe_between(self, observation: Observation) -> list[Transition]:
        """Take numbers that are measured by the clock, between two steps; `seq` is that of the last step.

        Only rules over such numbers are judged. `rewind` does not undo them: they are not the run's state.
        """
        measured = {metric for values in observation.values.values() for metric in values}
        return self._judge_due(ObservedStep(observation), self._schedule.list_rules_over(measured))

    def _judge_due(self, step: ObservedStep, due: Iterable[Due]) -> list[Transition]:
        self._time = step.time
        transitions, self._late = self._late, []
        first_seq, first_time = self._start or (step.seq, step.time)
        steps, seconds = step.seq - first_seq, step.time - first_time
        stage_seq, stage_time = self._stage or (step.seq, step.time)
        since, passed = step.seq - stage_seq, step.time - stage_time
        for rule, state, rests, may_idle in due:
            if rests and not state.active and not state.timed:
                continue
            if (rule.every > 1 and state.skip_sample(rule.every)) or (may_idle and state.idle(rule, step)):
                continue
            if self._deferred and rule.name in self._deferred:
                transitions += self._finish_rule(rule.name)
            staged = since != steps and rule.name in self._staged
            warm = rule.warmup.is_reached(since, passed) if staged else rule.warmup.is_reached(steps, seconds)
            if step.wide and rule.severity != "critical" and not step.wide.isdisjoint(rule.scopes):
                self._deferred[rule.name] = rule, state, step, state.judge_in_parts(rule, step, warm)
            elif (verdicts := state.advance(rule, step, warm)) is not None:
                transitions += self._apply_verdicts(rule, state, step, verdicts)
        return transitions + self.judge_deferred(PORTION) if self._deferred else transitions

    def judge_deferred(self, left: int = BETWEEN) -> list[Transition]:
        """Do up to `left` operations of the work that is left. To be called about once a second."""
        transitions: list[Transition] = []
        # The newest first: a rule due at every fifth step must be done by then, one due at every 64th has time.
        for name, (rule, state, step, work) in reversed(list(self._deferred.items())):
            try:
                while left > 0:
                    left -= next(work)
            except StopIteration as done:
                del self._deferred[name]
                transitions += self._apply_verdicts(rule, state, step, done.value)
        return transitions

    def finish_deferred(self) -> list[Transition]:
        """Do all the work that is left."""
        return [transition for name in list(self._deferred) for transition in self._finish_rule(name)]

    def _finish_rule(self, name: str) -> list[Transition]:
        rule, state, step, work = self._deferred.pop(name)
        return self._apply_verdicts(rule, state, step, finish_judging(work))

    def _apply_verdicts(
        self, rule: Rule, state: RuleState, step: ObservedStep, verdicts: Verdicts | None
    ) -> list[Transition]:
        if verdicts is None:
            return []
        transitions = self._open_incidents(rule, state, step, verdicts)
        if verdicts.resolved and not any(judge.firing for judge in state.judges.values()):
            first = state.cohort.tracks.get(next(iter(self._incidents.open[rule.name].members)))
            if first is not None:
                self._incidents.describe_end(rule, first.slots, self.step_offset)
            incident = self._incidents.end(rule.name, "resolved", step.seq, step.time)
            transitions.append(Transition(incident, "resolved"))
        return transitions

    def begin_stage(self) -> list[Transition]:
        """Begin a stage: from the next step on the task or the data differ, on purpose. Rules over signals that this
        changes start over, as at the start of a run, and their open incidents end. `rewind` to a step before this one
        begins with empty windows. Also returns the transitions of the work that was left."""
        transitions = self.finish_deferred()
        if self._seq < 0:
            return transitions
        self._stage = None
        for place, rule in enumerate(self._rules):
            if rule.name in self._staged:
                self._states[place] = RuleState(rule)
        self._schedule = Schedule(self._rules, self._states)
        if self._history is not None:
            self._begin_history()
        ended = [
            self._incidents.end(rule, "resolved", self._seq, self._time)
            for rule in list(self._incidents.open)
            if rule in self._staged
        ]
        return transitions + [Transition(incident, "resolved") for incident in ended]

    def rewind(self, to: int, at: int) -> list[Transition]:
        """Go back to the state after step `to`; the next step is after `at`.

        Windows and judgements are again as they were after `to`, as if later samples had never been: exactly, as far
        back as `ObservationHistory` reaches, and from its nearest older checkpoint beyond. Open incidents end as rolled
        back, and nothing fires: a condition that held already at `to` is pending. Rules over signals that a rollback
        does not take back, such as step times and memory, go on unchanged. Before the first step, all warm up again.
        Also returns the transitions of the work that was left of the rules that go on.
        """
        staying = [name for name, (rule, *_) in self._deferred.items() if not rule.undoable]
        transitions = [transition for name in staying for transition in self._finish_rule(name)]
        self._deferred.clear()
        if self._start is not None and to < self._start[0]:  # it starts over
            self._start = self._stage = None
        checkpoint, replay = self._history.rewind(to) if self._history is not None else (None, [])
        restored = loads(checkpoint) if checkpoint else [RuleState(rule) for rule in self._rules]
        triples = zip(self._rules, restored, self._states, strict=True)
        self._states = [then if rule.undoable else now for rule, then, now in triples]
        self._schedule = Schedule(self._rules, self._states)
        for observation in replay:
            step = ObservedStep(observation)
            for rule, state, _, may_idle in self._schedule.due(step):
                if not rule.undoable:
                    continue
                if (rule.every > 1 and state.skip_sample(rule.every)) or (may_idle and state.idle(rule, step)):
                    continue
                state.advance(rule, step, self._warm(rule, step))
        undone = [(rule.name, state) for rule, state in zip(self._rules, self._states, strict=True) if rule.undoable]
        for _, state in undone:
            state.disarm()
        names = {name for name, _ in undone}
        ended = [
            self._incidents.end(rule, "rolled_back", at, self._time)
            for rule in list(self._incidents.open)
            if rule in names
        ]
        return transitions + [Transition(incident, "rolled_back") for incident in ended]

    def save_state(self) -> tuple[bytes, list[tuple[int, bytes]]]:
        """Return the state after the last step, and the older states that `rewind` can go back to, by seq."""
        self._late += self.finish_deferred()
        checkpoints = self._history.checkpoints if self._history is not None else []
        return dumps((self._states, self._incidents, self._start, self._stage, self._time)), checkpoints

    def restore(self, state: bytes, checkpoints: Sequence[tuple[int, bytes]], past: Iterable[Observation]) -> None:
        """Go on from what `save_state` returned, with the same rules; `past` are the steps up to then, as far as they
        are known.

        Raises RuleStateError, with nothing changed, where it is not the state of such rules.
        """
        rule_states, incidents, start, stage, time = loads(state)
        fits = [type(one) for one in rule_states] == [RuleState] * len(self._rules)
        if not fits or not isinstance(incidents, Incidents):
            raise RuleStateError("not a state of these rules")
        self._deferred.clear()
        self._states, self._incidents = rule_states, incidents
        self._start, self._stage, self._time = start, stage, time
        steps = list(past)
        self._seq = steps[-1].seq if steps else -1
        if self._history is not None:
            self._history.restore(checkpoints, steps)
        self._schedule = Schedule(self._rules, self._states)

    def replace_rules(self, rules: Iterable[Rule]) -> list[Transition]:
        """Apply these rules from now on.

        A rule with the same text goes on as it was. A new or changed rule begins with empty windows, and an incident of
        a rule that is gone or changed ends as resolved. `rewind` to a step before this call also begins with empty
        windows.
        """
        self._late += self.finish_deferred()
        known = {rule.text: state for rule, state in zip(self._rules, self._states, strict=True)}
        self._rules = tuple(rules)
        self._staged = frozenset(rule.name for rule in self._rules if rule.staged)
        self._states = [known.get(rule.text) or RuleState(rule) for rule in self._rules]
        if self._history is not None:
            self._begin_history()
        self._schedule = Schedule(self._rules, self._states)
        kept = {rule.name for rule in self._rules if rule.text in known}
        ended = [
            self._incidents.end(rule, "resolved", None, self._time)
            for rule in list(self._incidents.open)
            if rule not in kept
        ]
        late, self._late = self._late, []
        return [*late, *(Transition(incident, "resolved") for incident in ended)]

    def status(self) -> list[RuleStatus]:
        """Return the status of every rule, for each entity that it has seen; once without an entity if it has seen
        none."""
        rows = []
        for rule, state in zip(self._rules, self._states, strict=True):
            state.catch_up(rule)
            for entity, track in state.cohort.tracks.items():
                judge = state.judges.get(entity)
                status = judge.status if judge else _unseen(rule)
                lacking = _lacking(rule, track.slots) if status in ("no data", "not applicable") else ()
                values = _numbers(rule.condition, track.slots)
                rows.append(RuleStatus(rule.name, entity, status, judge.judged if judge else 0, lacking, values))
            if not state.cohort.tracks:
                rows.append(RuleStatus(rule.name, Entity(rule.scope, ""), _unseen(rule), 0, _lacking(rule, None), {}))
        return rows

    def states(self) -> Counter[Status]:
        """Return how many entities are in each state, over all rules; a rule that has seen no entity counts as one."""
        found: Counter[Status] = Counter()
        for rule, state in zip(self._rules, self._states, strict=True):
            state.catch_up(rule)
            judges = [state.judges.get(entity) for entity in state.cohort.tracks] or [None]
            found.update(judge.status if judge else _unseen(rule) for judge in judges)
        return found

    def _warm(self, rule: Rule, step: ObservedStep) -> bool:
        seq, time = (self._stage if rule.name in self._staged else self._start) or (step.seq, step.time)
        return rule.warmup.is_reached(step.seq - seq, step.time - time)

    def _open_incidents(self, rule: Rule, state: RuleState, step: ObservedStep, verdicts: Verdicts) -> list[Transition]:
        """Open an incident for what fired, or join it to the open incident; the entities that the rule names join,
        too."""
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
            first = state.judges[entity].first_seq
            incident.join(entity, Member(first, step.seq, _numbers(rule.condition, track.slots)))
        for entity, track in verdicts.named:
            assert rule.members is not None
            incident.join(entity, Member(step.seq, step.seq, _numbers(rule.members, track.slots)))
        if kind == "joined" and len(incident.members) == known:
            return []
        self._incidents.describe(incident, rule, self.step_offset)
        return [Transition(incident, kind)]
