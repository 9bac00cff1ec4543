"""The actions of one run: what its rules ask for when they fire, and rollbacks that an earlier daemon left open."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from sentinel.actions import Action, Context, Factory, Shielded
from sentinel.actions.evidence import EvidenceRequests
from sentinel.actions.restart import JobSupervisor, RestartAction
from sentinel.actions.rollback import RollbackAction
from sentinel.actions.rollback_state import Outcome, SavedRollbacks
from sentinel.actions.stacks import StacksAction
from sentinel.actions.stop import StopAction
from sentinel.cluster.protocol.job_extent import count_nodes
from sentinel.cluster.protocol.relay import RelayedRollback
from sentinel.daemon.run.attention import Attention
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.incidents import RunIncidents
from sentinel.daemon.run.publishing import Publishing
from sentinel.daemon.run.spacing import Spacings
from sentinel.diagnose.case import Case
from sentinel.engine import RUN, Observation
from sentinel.runs import ARRIVAL_SECONDS
from sentinel.runs.snapshot_age import SnapshotAge, age_limit
from sentinel.signals import SIGNALS

_RARE = frozenset(name for name, signal in SIGNALS.items() if signal.tier == 3)
"""Signals that are sampled so rarely that ranks are asked for the next sample if a rule waits for it."""


class RunActions:
    """Carries out actions, and has the ranks sample signals and keep and write snapshots that actions will need."""

    def __init__(
        self,
        context: RunContext,
        incidents: RunIncidents,
        factories: Mapping[str, Factory],
        supervisor: JobSupervisor,
    ) -> None:
        """`factories`: of actions of other packages, by name."""
        self._context, self._incidents = context, incidents
        self._factories, self._supervisor = factories, supervisor
        self.interrupted: list[Case] = []
        """Cases whose rollback the previous daemon had begun, or was about to begin."""

    def begin_attempt(self, stacks: StacksAction) -> None:
        """Make the actions of the present attempt, in addition to `stacks`."""
        attempt, link, incidents = self._context.run.attempt, self._context.link, self._incidents
        identities = [rank.identity for rank in attempt.ranks.values()]
        self.rollback: RollbackAction | RelayedRollback
        if identities and count_nodes(identities[0]) > 1:
            self.rollback = RelayedRollback(attempt, link, incidents, self)
        else:
            self.rollback = RollbackAction(attempt, link, incidents, self)
        self.stop = StopAction(self.rollback, incidents)
        self.restart = RestartAction(attempt, incidents, stacks, self._supervisor)
        self.evidence = EvidenceRequests(attempt, link, incidents)
        self.publishing = Publishing(self._context, relay.disk if (relay := self.find_relay()) is not None else None)
        self._attention, self._spacings = Attention(attempt, link), Spacings(attempt, link)
        context = Context(attempt, link.send, incidents.record_change)
        others: dict[str, Action] = {name: Shielded(name, f, context) for name, f in self._factories.items()}
        own: tuple[Action, ...] = (self.rollback, stacks, self.restart, self.stop)
        self._actions = others | {action.name: action for action in own}
        self.interrupted.clear()

    def fire(self, case: Case, names: Sequence[str], wanted: Sequence[str], now: float) -> None:
        """Do what the rule of a case that fired asks for; `wanted`: kinds of evidence."""
        self.evidence.ask_ranks(case, wanted)
        stops = self.stop.name in names
        for name in names:
            if name in self._actions and name != self.stop.name:
                self._actions[name].act_on(case, now)
                self._context.record_case(case)
        if stops:  # last: a rollback that is possible comes first
            self.stop.act_on(case, now)
            self._context.record_case(case)
        elif self.rollback.name in names and self.rollback.phase == "idle":
            self.restart.act_on(case, now)  # a rollback in place was not possible

    def direct_sampling(self) -> None:
        """Have ranks sample closely, or withhold snapshots, if rules see signs in the steps judged by now."""
        evaluator = self._incidents.evaluator
        withheld_by = tuple(self._incidents.find_asking(self.rollback.name) if self.rollback.terms is not None else ())
        if (relay := self.find_relay()) is not None:
            withheld_by = relay.withhold(withheld_by)
        rare = [rule.name for rule in evaluator.pending if not rule.metrics.isdisjoint(_RARE)]
        self._attention.advance(self._incidents.judged_to, evaluator.suspicions, withheld_by, rare)

    def publish_snapshot(self) -> None:
        """Have the newest good snapshot written to disk, if it is time and the run is not about to go back."""
        due = self.publishing.find_due(self.rollback.terms, self._incidents.judged_to)
        if due is None or self.rollback.phase != "idle":
            return
        if any(case.state == "firing" for case in self._incidents.list_asking(self.rollback.name)):
            return
        chosen = self.publishing.choose(self._list_good(), self.rollback.terms)
        if chosen is not None and chosen >= due:
            self.publishing.order(chosen)

    @property
    def snapshot_age(self) -> SnapshotAge | None:
        """How old the newest good snapshot is; None if no rollback is armed, and before the first step."""
        judged_to = self._incidents.judged_to
        if self.rollback.terms is None or judged_to < 0:
            return None
        newest = max(self._list_good(), default=None)
        since = self._context.run.attempt.stage_seq if newest is None else newest
        return SnapshotAge(newest, max(judged_to - since, 0))

    def observe_snapshot_age(self) -> Observation | None:
        """Return the age of the newest good snapshot, for the rules."""
        terms, age = self.rollback.terms, self.snapshot_age
        if terms is None or age is None:
            return None
        values = {"snapshot_age_steps": float(age.steps), "snapshot_age_limit_steps": float(age_limit(terms))}
        return Observation(seq=self._incidents.judged_to, time=time.time(), values={RUN: values})

    def tick(self, now: float) -> None:
        """Check time-outs, and whether all ranks have the same spacing."""
        for action in self._actions.values():
            action.tick(now)
        self._spacings.tick(now)

    @property
    def restless(self) -> bool:
        """Whether an action is under way that needs a tick several times a second."""
        return self.rollback.phase != "idle" or self.restart.waiting or self.stop.waiting or bool(self.interrupted)

    def take_up_interrupted(self, now: float) -> None:
        """Roll back for the cases whose rollback was interrupted, once the ranks are connected."""
        attempt = self._context.run.attempt
        if not self.interrupted or not (attempt.complete or now - attempt.began > ARRIVAL_SECONDS):
            return
        waiting, self.interrupted = self.interrupted, []
        for case in waiting:
            if case.state == "firing":
                case.done = tuple(one for one in case.done if not one.startswith(("rolling back", "stopping")))
                for action in (self.rollback, self.stop):
                    if self._asks(case, action.name):
                        action.act_on(case, now)
                self._context.record_case(case)

    def add_supervisor(self, now: float) -> None:
        """Restart for open cases that ask for it: they may have waited for the supervisor that has just connected."""
        for case in self._incidents.list_asking(self.restart.name):
            if case.state == "firing":
                self.restart.act_on(case, now)

    def pass_on(self) -> None:
        """Have the coordinator of a job over several nodes learn what is new about a rollback, if there is one."""
        if self._context.job is not None:
            self._context.job.pass_on_rollback()

    def will_stop(self, case: Case) -> bool:
        """Return whether the rule of a case has all ranks leave at one step if it is not rolled back."""
        return self._asks(case, StopAction.name)

    def end_rollback(self, case: Case, outcome: Outcome) -> None:
        """Handle the end of the rollback, or of the stop, for this case."""
        if outcome.ok:
            self.follow_rollback([case], outcome, case.done[-1])
            return
        self._record_outcome(outcome)
        self._context.tell(f"{case.alert}: {case.done[-1]}")
        if self.rollback.phase == "idle" and not self._asks(case, self.stop.name):  # otherwise the case goes on to that
            self.restart.act_on(case, time.monotonic())
        self._incidents.record_change(case)
        self._incidents.preserve()

    def find_relay(self) -> RelayedRollback | None:
        """Return the rollback action that passes on a job coordinator's orders; None for a run on one node."""
        return self.rollback if isinstance(self.rollback, RelayedRollback) else None

    def follow_rollback(self, cases: Sequence[Case], outcome: Outcome, done: str) -> None:
        """Handle a rollback or stop that all ranks of all nodes completed; `cases` of this node asked for it."""
        self._record_outcome(outcome)
        if not outcome.stops:
            self.publishing.rewind(outcome.to)
            self._incidents.rewind(cases, outcome, done)
        for case in cases:
            self._incidents.record_change(case)
        self._incidents.preserve()

    def _record_outcome(self, outcome: Outcome) -> None:
        kind = self.stop.name if outcome.stops else self.rollback.name
        self._context.record_event(outcome.at, kind, **msgspec.to_builtins(outcome))

    def save_state(self) -> SavedRollbacks:
        """Return what a daemon that takes over must know of the rollbacks."""
        return self.rollback.save_state()

    def _asks(self, case: Case, action: str) -> bool:
        return any(one is case for one in self._incidents.list_asking(action))

    def _list_good(self) -> set[int]:
        """Return the good snapshots, older than any pending rule: that may be the first sign of a fault."""
        pending = self._incidents.find_asking(self.rollback.name).values()
        return self.rollback.list_good(min([self._incidents.judged_to, *pending]))
