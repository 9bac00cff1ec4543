"""The incidents of one run: steps and measurements go through the rules, and what changes is kept, acted on, told.

Observation -> Evaluator -> Transition -> Case -> history, then actions, then people
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from sentinel.actions.rollback_state import Outcome, Saved
from sentinel.actions.stacks import StacksAction
from sentinel.actions.stop import StopAction
from sentinel.daemon.run.clock import Clock
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.incident_log import IncidentLog
from sentinel.daemon.run.opening_report import OpeningReport, make_opening_report
from sentinel.daemon.run.saved_state import SavedState, digest
from sentinel.diagnose import folding
from sentinel.diagnose.case import Case
from sentinel.engine import RUN, Evaluator, Observation, Rule, Transition
from sentinel.notify import Event
from sentinel.notify.notifier import Notifier
from sentinel.rulebook.loader import add_action
from sentinel.runs.steps import RunStep
from sentinel.signals import OPENING_STEPS

PRESERVE_SECONDS = 30.0
"""Between two writes of the rules' state. A daemon that takes over judges the steps since once more."""


class CaseActions(Protocol):
    """Acts on cases."""

    def fire(self, case: Case, names: Sequence[str], wanted: Sequence[str], now: float) -> None:
        """Do what the rule of a case that fired asks for: actions, by name, and kinds of evidence."""

    def save_state(self) -> Saved:
        """What a daemon that takes over has to know of the rollbacks."""


class JobJudgement(Protocol):
    """What a run's incidents have to do with the rules over the ranks of all nodes of its job."""

    def begin_attempt(self) -> None:
        """The run has another attempt."""

    def take_step(self, step: RunStep, now: float) -> None:
        """A step was judged here."""

    def rewind(self, cases: Sequence[Case], outcome: Outcome, done: str) -> None:
        """All ranks went back for these cases."""

    def asking_for(self, action: str) -> dict[str, int]:
        """The job's rules that are pending or firing and ask for this action, and the first step of their condition."""

    def add_evidence(self, what: str, seq: int) -> None:
        """Evidence of step `seq` came."""

    def find_newest(self, signal: str) -> float | None:
        """The newest value of a signal over the ranks of all nodes; None where this node is not sent them."""


class RunIncidents:
    """Judges a run, and sees each of its transitions through. Other parts of the run hand in what they observed."""

    actions: CaseActions
    """Set where the run is composed, as actions know the incidents, too."""

    def __init__(
        self, context: RunContext, notifier: Notifier, rules: Sequence[Rule], stop_on: Sequence[str] = ()
    ) -> None:
        """`stop_on`: alerts that stop this run, whatever their rules say."""
        self._context, self.notifier = context, notifier
        self.stop_on, self.rules = tuple(stop_on), add_action(rules, stop_on, StopAction.name)
        self.log = IncidentLog(context, notifier)
        self.evaluations = 0
        """Times that a rule was applied to a step."""
        self.job: JobJudgement | None = None
        """Where the run's job is over several nodes that meet."""
        self.elsewhere = frozenset[str]()
        """Rules that the job's coordinator judges. They are judged here, too, with nothing coming of it: the node can
        take over at any time."""
        self._preserve_at = 0.0
        self._judged_time = 0.0

    def begin_attempt(self) -> None:
        """Judge the present attempt from its first step on."""
        self.evaluator = self.new_evaluator()
        self.clock = Clock(self._context.run.attempt)
        self.judged_to = self.rewound_at = self._first_judged = -1
        self.opening: OpeningReport | None = None
        """Of the opening examination, once it is over."""
        self.stages_begun = 0
        """How many of the announced stages have begun, as the rules' state knows."""
        if self.job is not None:
            self.job.begin_attempt()

    def new_evaluator(self, incidents: int = 0) -> Evaluator:
        """Of the present attempt; `incidents`: how many there were in it."""
        attempt = self._context.run.attempt
        # Ranks that do not offer rollback may leave, and a rank that does may be lost and come back.
        offered = any(rank.hello.rollback is not None for rank in attempt.ranks.values())
        return Evaluator(
            self.rules,
            run=self._context.run.name,
            step_offset=attempt.step_offset,
            incidents=incidents,
            rewindable=offered,
        )

    def judge(self, step: RunStep, now: float) -> bool:
        """Apply the rules to a step. False: a rollback took it back, and it is not judged."""
        if step.seq <= self.rewound_at:
            return False
        if begun := self.begin_stages(step.seq):
            self.apply(begun, now)
        observed = self._as_rules_see(step)
        transitions = self.evaluator.observe(observed)
        if self.judged_to < 0:
            self._first_judged = step.seq
        opens = self.judged_to < OPENING_STEPS - 1
        self.judged_to, self._judged_time = step.seq, observed.time
        self.evaluations += len(self.rules)
        if transitions:
            self.apply(transitions, now)
        if opens and step.seq >= OPENING_STEPS - 1:
            self.end_opening(now)
        if self.job is not None:
            self.job.take_step(step, now)
        return True

    def end_opening(self, now: float) -> None:
        """The opening examination is over, or the run: report its result, once."""
        if self.opening is None and self._first_judged >= 0:
            self.finish_pending(now)
            alerts = [case.alert for case in self.log.present()]
            judged = [rule for rule in self.rules if rule.name not in self.elsewhere]
            report = make_opening_report(
                judged, self.evaluator.status(), alerts, first=self._first_judged, last=self.judged_to
            )
            self.opening = report
            self._save_state()  # the next daemon must know what was said
            if report.checks or report.unseen:
                self._context.record_event(self.judged_to, "opening", text=report.text)
                self._context.tell(report.text)

    def find_transitions(self, step: RunStep) -> list[Transition]:
        """Apply the rules to a step that an earlier daemon kept, and leave what they find to the caller."""
        return [*self.begin_stages(step.seq), *self.evaluator.observe(self._as_rules_see(step))]

    def _as_rules_see(self, step: RunStep) -> Observation:
        """The first step that they see, where it is not the run's first, is that of a run which goes on: they must not
        take what they see for its start."""
        seen = self.clock.of_step(step)
        if self.evaluator.began or step.seq == 0:
            return seen
        return msgspec.structs.replace(seen, values={**seen.values, RUN: {**seen.values[RUN], "resumed": 1.0}})

    def observe_between(self, observation: Observation | None, now: float) -> None:
        """Apply the rules to what was measured between two steps, if anything."""
        if observation is not None:
            self.apply(self.evaluator.observe_between(self.clock.make_observation(observation)), now)

    def begin_stages(self, seq: int) -> list[Transition]:
        """Begin the stages that were announced for this step or an earlier one."""
        transitions: list[Transition] = []
        stages = self._context.run.attempt.stages
        while self.stages_begun < len(stages) and stages[self.stages_begun].seq <= seq:
            name = stages[self.stages_begun].name
            self.stages_begun += 1
            ended = self.evaluator.begin_stage()
            self._note_end([one for one in ended if one.kind == "resolved"], f"over: stage {name!r} began")
            transitions += ended
        return transitions

    def finish_pending(self, now: float) -> None:
        """Decide what is pending: no more steps come, or the rules' state is about to be kept."""
        self.apply(self.evaluator.finish_pending(), now)

    def replace_rules(self, rules: Sequence[Rule], now: float) -> None:
        """Apply these rules from now on. What an unchanged rule has seen, it keeps."""
        self.rules = add_action(rules, self.stop_on, StopAction.name)
        ended = self.evaluator.replace_rules(self.rules)
        self._note_end(ended, "over: its rule was changed or taken away")
        self.apply(ended, now)
        self.preserve()  # the state of the former rules fits none of the new ones

    def rewind(self, cases: Sequence[Case], outcome: Outcome, done: str) -> None:
        """All ranks went back for these cases: judge on from there, and end what the rollback ended. `done`: the same
        in words."""
        self.rewound_at = outcome.at
        self._context.run.attempt.rewind(outcome.to, outcome.at)
        self.apply_rewind(self.evaluator.rewound(outcome.to, outcome.at), self.log, cases, done)
        if self.job is not None:
            self.job.rewind(cases, outcome, done)

    def apply_rewind(self, ended: Sequence[Transition], log: IncidentLog, cases: Sequence[Case], done: str) -> None:
        """See through what a rollback for these cases ended. `log`: as in `apply`."""
        for transition in ended:
            if (other := log.find_case(transition.incident)) is not None and all(other is not c for c in cases):
                other.done = (done,)
        self.apply(ended, 0.0, log)

    def find_asking(self, action: str) -> dict[str, int]:
        """Rules that are pending or firing and ask for this action, here and over the ranks of all nodes, and the first
        step of their condition."""
        found = self.evaluator.asking_for(action)
        for rule, seq in (self.job.asking_for(action) if self.job is not None else {}).items():
            found[rule] = min(seq, found.get(rule, seq))
        return found

    def leave_rules(self, names: frozenset[str], why: str, now: float) -> None:
        """From now on the job's coordinator judges these rules, and all others are judged here. `why` is written into
        the cases here that end by that."""
        before, self.elsewhere = self.elsewhere, names
        for incident in self.evaluator.incidents if names != before else ():
            case = self.log.find_case(incident)
            if incident.state == "firing" and incident.rule in before - names:
                self.apply([Transition(incident, "fired")], now)
            elif incident.rule in names - before and case is not None and case.state == "firing":
                self.end_case(case, why)

    def end_former(self, done: str) -> None:
        """A rollback ended what is open of the job, too, which no evaluator here follows: an earlier coordinator here
        opened it. Not what no rollback takes back. `done`: the rollback in words."""
        undone = {rule.name for rule in self.rules if rule.undoable}
        for case in self.log.present():
            if case.of_job and case.state == "firing" and case.alert in undone:
                self.end_case(case, done, "rolled_back")

    def end_case(self, case: Case, why: str, state: Literal["resolved", "rolled_back"] = "resolved") -> None:
        """A case is over that no rule ends."""
        case.state, case.resolved_time = state, time.time()
        case.done = (*(words for words in case.done if words != why), why)
        self._context.record_case(case)
        self.notifier.tell(state, case)

    def apply(self, transitions: Sequence[Transition], now: float, log: IncidentLog | None = None) -> None:
        """See through what the rules found: first kept, then acted on, then told. `log`: where the cases are of what
        was judged over the ranks of all nodes; else they are this node's."""
        if log is None or log is self.log:
            log = self.log
            transitions = [found for found in transitions if found.incident.rule not in self.elsewhere]
        told: list[tuple[Event, Case, tuple[str, ...], tuple[str, ...]]] = []
        for transition in transitions:
            incident = transition.incident
            if transition.kind == "fired":
                told.append(("fired", log.open_case(incident), incident.actions, incident.evidence))
            elif (known := log.find_case(incident)) is not None:
                log.update_case(known, incident)
                if transition.kind in ("resolved", "rolled_back"):
                    told.append(("resolved" if transition.kind == "resolved" else "rolled_back", known, (), ()))
                else:
                    self.notifier.change_case(known)
                self._context.record_case(known)
        for _, case, _, _ in told:
            if case.state != "firing":
                self.log.release_consequences(case)
        if told:
            self.preserve()
        for event, case, names, wanted in told:
            self.actions.fire(case, names, wanted, now)
            self.notifier.tell(event, case, self.log.cases.values())

    def list_asking(self, action: str) -> Iterator[Case]:
        """The cases of the present attempt that ask for this action."""
        asking = {rule.name: rule.find_severities(action) for rule in self.rules}
        return (case for case in self.log.present() if case.severity in asking.get(case.alert, ()))

    def record_action(self, case: Case) -> None:
        """More was written into `case.done`."""
        self.log.record_action(case)

    def add_stacks(self) -> None:
        """A rank's stacks or collectives came: put them into the cases that asked for them."""
        self.log.add_stacks(self.evaluator.incidents, StacksAction.name)

    def add_evidence(self, what: str, seq: int) -> None:
        """Evidence of step `seq` came: put it into the cases that want it."""
        self.log.add_evidence(self.evaluator.incidents, what, seq)
        if self.job is not None:
            self.job.add_evidence(what, seq)

    def explain_unknown(self) -> None:
        """More is known of the machine: diagnose again what had no cause without it."""
        self.log.explain_unknown(self.evaluator.incidents)

    def tick(self, now: float) -> None:
        """Tell people what changed, and keep the state where it is time."""
        self.notifier.tick(self.log.cases.values(), self._is_over)
        if now >= self._preserve_at:
            self._preserve_at = now + PRESERVE_SECONDS
            self._save_state()

    def _is_over(self, members: Sequence[Case]) -> bool:
        """Whether a problem does not come back: it has not for long enough, or no rank is left to bring it back."""
        attempt = self._context.run.attempt
        former = all(case.attempt < attempt.number for case in members)
        step, time = self.judged_to + attempt.step_offset, self._judged_time + attempt.clock_shift
        return former or not attempt.live or folding.is_over(members, step, time)

    def preserve(self) -> None:
        """Put it into the history now: nothing may be sent that the next daemon would not know."""
        if self._context.store:
            self._save_state()
            self._context.store.flush()

    def _save_state(self) -> None:
        store = self._context.store
        if store is None or self.judged_to < 0:
            return
        self.finish_pending(time.monotonic())  # what the state has as fired is a case
        rules, checkpoints = self.evaluator.save_state()
        state = SavedState(
            digest(self.rules),
            rules,
            self.actions.save_state(),
            self.rewound_at,
            self.clock.save_state(),
            self.stages_begun,
            self.opening,
        )
        body = msgspec.msgpack.encode(state)
        store.records.keep_state(self._context.run.attempt.number, self.judged_to, body, checkpoints)

    def _note_end(self, ended: Sequence[Transition], why: str) -> None:
        for transition in ended:
            if (case := self.log.find_case(transition.incident)) is not None:
                case.done += (why,)
