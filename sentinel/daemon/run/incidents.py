"""The incidents of one run: rules judge steps and measurements, and changes are stored, acted on and reported.

Observation -> Evaluator -> Transition -> Case -> history, then actions, then people
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from sentinel.actions.rollback_state import Outcome, SavedRollbacks
from sentinel.actions.stacks import StacksAction
from sentinel.actions.stop import StopAction
from sentinel.daemon.run.clock import Clock
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.incident_log import IncidentLog
from sentinel.daemon.run.inherited_cases import InheritedCases
from sentinel.daemon.run.opening_report import OpeningReport, make_opening_report
from sentinel.daemon.run.saved_state import SavedState, digest
from sentinel.diagnose import folding
from sentinel.diagnose.case import Case
from sentinel.engine import Evaluator, Observation, Rule, Transition
from sentinel.notify import Event
from sentinel.notify.notifier import Notifier
from sentinel.rulebook.loader import add_action
from sentinel.rulebook.observation import mark_resumed
from sentinel.runs.steps import RunStep
from sentinel.signals import OPENING_STEPS

PRESERVE_SECONDS = 30.0
"""Seconds between two writes of the rules' state. A daemon that takes over judges the steps since then again."""


class CaseChange(NamedTuple):
    """A case that has begun or ended, and what its rule asks for then."""

    event: Event
    case: Case
    actions: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


class CaseActions(Protocol):
    """Carries out the actions of cases."""

    def fire(self, case: Case, names: Sequence[str], wanted: Sequence[str], now: float) -> None:
        """Do what the rule of a case that fired asks for: actions, by name, and kinds of evidence."""

    def save_state(self) -> SavedRollbacks:
        """Return what a daemon that takes over must know of the rollbacks."""


class JobJudgement(Protocol):
    """A run's part in the rules over the ranks of all nodes of its job."""

    def begin_attempt(self) -> None:
        """Begin the run's new attempt."""

    def take_step(self, step: RunStep, now: float) -> None:
        """Take a step that was judged here."""

    def rewind(self, cases: Sequence[Case], outcome: Outcome, done: str) -> None:
        """Follow a rollback of all ranks for these cases. `done`: the rollback in words."""

    def find_asking(self, action: str) -> dict[str, int]:
        """Return the job's pending or firing rules that ask for this action, with the first step of their condition."""

    def add_evidence(self, what: str, seq: int) -> None:
        """Add evidence of step `seq`."""

    def find_newest(self, signal: str) -> float | None:
        """Return the newest value of a signal over the ranks of all nodes; None if this node does not get them."""


class RunIncidents:
    """Judges a run, and carries through each transition. Other parts of the run hand in what they observed."""

    actions: CaseActions
    """Set when the run is composed, as actions refer to the incidents, too."""

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
        """The job's part, if the run's job is over several nodes that meet."""
        self.elsewhere = frozenset[str]()
        """Rules that the job's coordinator judges. They are judged here, too, without effect: the node can take over at
        any time."""
        self._preserve_at = 0.0
        self._judged_time = 0.0

    def begin_attempt(self) -> None:
        """Judge the present attempt from its first step on."""
        self.evaluator = self.new_evaluator()
        self.clock = Clock(self._context.run.attempt)
        self.judged_to = self.rewound_at = self.first_judged = -1
        self.opening: OpeningReport | None = None
        """Result of the opening examination, once it is over."""
        self.stages_begun = 0
        """Number of announced stages that have begun for the rules."""
        self._inherited = InheritedCases()
        if self.job is not None:
            self.job.begin_attempt()

    def new_evaluator(self, incidents: int = 0) -> Evaluator:
        """Return a new evaluator for the present attempt; `incidents`: how many the attempt has had."""
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
        """Apply the rules to a step. False: a rollback undid it, and it is not judged."""
        if step.seq <= self.rewound_at:
            return False
        if begun := self.begin_stages(step.seq):
            self.apply(begun, now)
        observed = self._as_rules_see(step)
        transitions = self.evaluator.observe(observed)
        if self.judged_to < 0:
            self.first_judged = step.seq
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
        """Report the result of the opening examination, once, when it or the run is over."""
        if self.opening is None and self.first_judged >= 0:
            self.finish_deferred(now)
            alerts = [case.alert for case in self.log.present()]
            judged = [rule for rule in self.rules if rule.name not in self.elsewhere]
            report = make_opening_report(
                judged,
                self.evaluator.status(),
                alerts,
                first=self.first_judged,
                last=self.judged_to,
                offset=self._context.run.attempt.step_offset,
            )
            self.opening = report
            self._save_state()  # the next daemon must know what was reported
            if report.checks or report.unseen:
                self._context.record_event(self.judged_to, "opening", text=report.text)
                self._context.tell(report.text)

    def find_transitions(self, step: RunStep) -> list[Transition]:
        """Apply the rules to a step that an earlier daemon stored, and return what they find."""
        return [*self.begin_stages(step.seq), *self.evaluator.observe(self._as_rules_see(step))]

    def _as_rules_see(self, step: RunStep) -> Observation:
        """Return a step as the rules see it; the first one, if it is not the run's first, is marked as resumed."""
        seen = self.clock.of_step(step)
        return seen if self.evaluator.began or step.seq == 0 else mark_resumed(seen)

    def observe_between(self, observation: Observation | None, now: float) -> None:
        """Apply the rules to a measurement between two steps, if there is one."""
        if observation is not None:
            measured = self.clock.make_observation(observation)
            self.apply(self.evaluator.observe_between(measured), now)
            for case in self._inherited.remove_ended(measured, self.rules, self.evaluator):
                case.resolved_step = measured.seq + self._context.run.attempt.step_offset
                self.end_case(case)
                self.log.release_consequences(case)

    def inherit(self, cases: Iterable[Case]) -> None:
        """Leave these cases of an earlier daemon open, until their rules say whether they go on."""
        now = time.time() - self._context.run.attempt.clock_shift
        self._inherited = InheritedCases(cases, self.judged_to, now)

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

    def finish_deferred(self, now: float) -> None:
        """Decide pending transitions: no more steps come, or the rules' state is about to be stored."""
        self.apply(self.evaluator.finish_deferred(), now)

    def replace_rules(self, rules: Sequence[Rule], now: float) -> None:
        """Apply these rules from now on. An unchanged rule keeps its state."""
        former = {rule.name for rule in self.rules}
        self.rules = add_action(rules, self.stop_on, StopAction.name)
        ended = self.evaluator.replace_rules(self.rules)
        why = "over: its rule was changed or taken away"
        self._note_end(ended, why)
        for case in self._inherited.remove(former - {rule.name for rule in self.rules}):
            self.end_case(case, why)
        self.apply(ended, now)
        self.preserve()  # the state of the former rules fits none of the new ones

    def rewind(self, cases: Sequence[Case], outcome: Outcome, done: str) -> None:
        """Continue judging from the step that all ranks were rolled back to for these cases, and end incidents that the
        rollback undid. `done`: the rollback in words."""
        self.rewound_at = outcome.at
        self._context.run.attempt.rewind(outcome.to, outcome.at)
        self.apply_rewind(self.evaluator.rewind(outcome.to, outcome.at), self.log, cases, done)
        if self.job is not None:
            self.job.rewind(cases, outcome, done)

    def apply_rewind(self, ended: Sequence[Transition], log: IncidentLog, cases: Sequence[Case], done: str) -> None:
        """Carry through the transitions that a rollback for these cases caused. `log`: as in `apply`."""
        for incident, kind in ended:
            other = log.find_case(incident) if kind == "rolled_back" else None
            if other is not None and all(other is not c for c in cases):
                other.done = (done,)
        self.apply(ended, time.monotonic(), log)

    def find_asking(self, action: str) -> dict[str, int]:
        """Return the pending or firing rules that ask for this action, of this node and of the job, with the first step
        of their condition."""
        found = self.evaluator.find_asking(action)
        for rule, seq in (self.job.find_asking(action) if self.job is not None else {}).items():
            found[rule] = min(seq, found.get(rule, seq))
        return found

    def leave_rules(self, names: frozenset[str], why: str, now: float) -> None:
        """Leave these rules to the job's coordinator from now on, and judge all others here. `why` is written into the
        cases that end here because of it."""
        before, self.elsewhere = self.elsewhere, names
        for incident in self.evaluator.incidents if names != before else ():
            case = self.log.find_case(incident)
            if incident.state == "firing" and incident.rule in before - names:
                self.apply([Transition(incident, "fired")], now)
            elif incident.rule in names - before and case is not None and case.state == "firing":
                self.end_case(case, why)
        for case in self._inherited.remove(names - before):
            self.end_case(case, why)

    def end_former(self, done: str) -> None:
        """End open cases of the job that a rollback undid, and that no evaluator here follows: this node opened them
        when it was the coordinator. `done`: the rollback in words."""
        undone = {rule.name for rule in self.rules if rule.undoable}
        for case in self.log.present():
            if case.of_job and case.state == "firing" and case.alert in undone:
                self.end_case(case, done, "rolled_back")

    def end_case(self, case: Case, why: str = "", state: Literal["resolved", "rolled_back"] = "resolved") -> None:
        """End a case that is not an incident of the evaluator here."""
        case.state, case.resolved_time = state, time.time()
        if why:
            case.done = (*(words for words in case.done if words != why), why)
        self._context.record_case(case)
        self.notifier.tell(state, case)

    def apply(self, transitions: Sequence[Transition], now: float, log: IncidentLog | None = None) -> None:
        """Carry through what the rules found: first store it, then act, then report. `log`: the log of the cases, if
        rules over the ranks of all nodes found it; otherwise this node's."""
        if log is None or log is self.log:
            log = self.log
            transitions = [found for found in transitions if found.incident.rule not in self.elsewhere]
            transitions = [found for found in transitions if not self._inherited.continue_in(found)]
        changes: list[CaseChange] = []
        for transition in transitions:
            incident = transition.incident
            if transition.kind == "fired":
                changes.append(CaseChange("fired", log.open_case(incident), incident.actions, incident.evidence))
            elif (known := log.find_case(incident)) is not None:
                log.update_case(known, incident)
                if transition.kind in ("resolved", "rolled_back"):
                    changes.append(CaseChange(transition.kind, known))
                else:
                    self.notifier.change_case(known)
                self._context.record_case(known)
        for change in changes:
            if change.case.state != "firing":
                self.log.release_consequences(change.case)
        if changes:
            self.preserve()
        for change in changes:
            self.actions.fire(change.case, change.actions, change.evidence, now)
            self.notifier.tell(change.event, change.case, self.log.cases.values())

    def list_asking(self, action: str) -> Iterator[Case]:
        """Return the cases of the present attempt that ask for this action."""
        asking = {rule.name: rule.find_severities(action) for rule in self.rules}
        return (case for case in self.log.present() if case.severity in asking.get(case.alert, ()))

    def record_change(self, case: Case) -> None:
        """Store and report that more was written into `case.done`."""
        self.log.record_change(case)

    def add_stacks(self) -> None:
        """Add a rank's stacks or collectives that have arrived to the cases that asked for them."""
        self.log.add_stacks(self.evaluator.incidents, StacksAction.name)

    def add_evidence(self, what: str, seq: int) -> None:
        """Add evidence of step `seq` that has arrived to the cases that want it."""
        self.log.add_evidence(self.evaluator.incidents, what, seq)
        if self.job is not None:
            self.job.add_evidence(what, seq)

    def explain_unknown(self) -> None:
        """Diagnose cases without a cause again, as more is known of the machine."""
        self.log.explain_unknown(self.evaluator.incidents)

    def tick(self, now: float) -> None:
        """Report what changed, and store the rules' state if it is time."""
        self.notifier.tick(self.log.cases.values(), self._is_over)
        if now >= self._preserve_at:
            self._preserve_at = now + PRESERVE_SECONDS
            self._save_state()

    def _is_over(self, members: Sequence[Case]) -> bool:
        """Whether a problem is over: it has not come back for long enough, or no rank is left in which it could."""
        attempt = self._context.run.attempt
        former = all(case.attempt < attempt.number for case in members)
        step, time = self.judged_to + attempt.step_offset, self._judged_time + attempt.clock_shift
        return former or not attempt.live or folding.is_over(members, step, time)

    def preserve(self) -> None:
        """Write the state into the history now: nothing may be sent that the next daemon would not know."""
        if self._context.store:
            self._save_state()
            self._context.store.flush()

    def _save_state(self) -> None:
        store = self._context.store
        if store is None or self.judged_to < 0:
            return
        self.finish_deferred(time.monotonic())  # so that each incident that has fired in the state has a case
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
