"""A run's part in the rules over the ranks of all nodes of its job.

A node sends digests of its steps and leaves those rules to the coordinator, as long as it hears it. The coordinator
judges them, and what they find becomes cases of its own node's run: stored, acted on and reported as any others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sentinel.actions.rollback_state import Outcome
from sentinel.cluster.membership import Membership
from sentinel.cluster.protocol.digest import DigestSender, NodeStep
from sentinel.cluster.protocol.job_extent import list_job_nodes
from sentinel.cluster.protocol.job_rules import JobRules, find_signals, select_job_rules
from sentinel.cluster.protocol.messages import Digest
from sentinel.daemon.job.job_incident_log import JobIncidentLog
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.incidents import RunIncidents
from sentinel.diagnose.case import Case
from sentinel.engine import Rule, Transition
from sentinel.runs.steps import RunStep
from sentinel.wire import Identity

LEFT_TO_COORDINATOR = "over here: judged by the job's coordinator, over the ranks of all nodes"
LEFT_SECONDS = 150.0
"""Seconds after which a case ends that an earlier coordinator opened: by then the next one has found it again, as the
same incident of the job, or it is over. Windows are full again, and the rarest signal came twice: ranks compare
checksums once in 60 s where that is cheap (`RARE_SECONDS` of the hooks' governor)."""


class NodeJudge:
    """The part of a node that is not the coordinator."""

    def __init__(self, context: RunContext, incidents: RunIncidents, node: int) -> None:
        self._context, self._incidents, self._node = context, incidents, node
        self._rules: Sequence[Rule] = ()
        self._joined = True
        self._end_former_at: float | None = None
        """When the cases end that this node opened while it was the coordinator, in monotonic seconds."""
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Begin to send the steps of the present attempt."""
        self._sender = DigestSender(self._node, self._context.run.attempt.number, ())
        self._rules = ()
        self._follow_rules(0.0)

    def take_step(self, step: RunStep, now: float) -> None:
        """Queue a step that was judged here for the coordinator."""
        self._sender.add(step)

    def rewind(self, cases: Sequence[Case], outcome: Outcome, done: str) -> None:
        """End the cases of a former coordinator: all ranks were rolled back. The coordinator learns it from its own."""
        self._incidents.end_former(done)

    def find_asking(self, action: str) -> dict[str, int]:
        """Return no rules: the coordinator knows which ask for the action."""
        return {}

    def add_evidence(self, what: str, seq: int) -> None:
        """Do nothing: the cases are the coordinator's."""

    def find_newest(self, signal: str) -> None:
        """Return None: only the coordinator has the ranks of all nodes."""

    def list_unconfirmed(self) -> list[NodeStep]:
        """Return the steps that no coordinator has."""
        return self._sender.list_unconfirmed()

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator does not have all steps yet."""
        return self._sender.unconfirmed

    def make_digest(self, now: float) -> Digest | None:
        """Return what to send now; called once a second."""
        return self._sender.make_digest(now)

    def confirm(self, upto: int, now: float) -> None:
        """Take the coordinator's word that it has the steps of this node up to `upto`; -1: none."""
        self._sender.confirm(upto, now)
        if self._end_former_at is None:
            self._end_former_at = now + LEFT_SECONDS
        elif now > self._end_former_at:
            for case in self._incidents.log.present():
                if case.of_job and case.state == "firing":
                    self._incidents.end_case(case, LEFT_TO_COORDINATOR)

    def tick(self, now: float, *, joined: bool) -> None:
        """Follow changes of the rules; called once a second. `joined`: the coordinator is, or was just now, heard."""
        if joined != self._joined or self._rules is not self._incidents.rules:
            self._joined = joined
            self._follow_rules(now)

    def _follow_rules(self, now: float) -> None:
        self._rules = self._incidents.rules
        rules = select_job_rules(self._rules)
        self._sender.signals = find_signals(rules)
        names = frozenset(rule.name for rule in rules) if self._joined else frozenset[str]()
        self._incidents.leave_rules(names, LEFT_TO_COORDINATOR, now)


class CoordinatorJudge:
    """The part of the coordinator."""

    def __init__(
        self,
        context: RunContext,
        incidents: RunIncidents,
        identity: Identity,
        membership: Membership,
        earlier: Iterable[NodeStep] = (),
    ) -> None:
        """`identity`: that of any rank here. `earlier`: steps of this node that no coordinator has judged."""
        self._context, self._incidents = context, incidents
        self._identity, self._membership = identity, membership
        self._rules: Sequence[Rule] = ()
        self.begin_attempt()
        self._job.steps.take_own(earlier, time.monotonic())

    def begin_attempt(self) -> None:
        """Begin to judge the present attempt."""
        context, incidents = self._context, self._incidents
        self._rules, rules = incidents.rules, select_job_rules(incidents.rules)
        present = [case for case in incidents.log.present() if case.of_job]
        numbers = [int(case.id.rpartition(".")[2]) for case in present]
        identity = next((rank.identity for rank in context.run.attempt.ranks.values()), self._identity)
        self._job = JobRules(
            rules, context.run.name, identity.node, list_job_nodes(identity), incidents=max(numbers, default=0)
        )
        self._log = JobIncidentLog(
            context, incidents.notifier, incidents.log, self._job, self._membership, self._identity
        )
        self._former = {case.alert: case for case in present if case.state == "firing"}
        """Open cases of an earlier coordinator, by alert."""
        self._end_former_at: float | None = None
        self._incidents.leave_rules(frozenset(rule.name for rule in rules), LEFT_TO_COORDINATOR, 0.0)

    def take_step(self, step: RunStep, now: float) -> None:
        """Add a step that was judged on this node."""
        if any(rank.hello.rollback is not None for rank in self._context.run.attempt.ranks.values()):
            self._apply(self._job.be_rewindable(), now)
        self._job.steps.add_own(step, now)
        self.advance(now)

    def take_digest(self, digest: Digest, now: float) -> None:
        """Add the steps of another node. Raises ProtocolError if they do not fit."""
        if digest.attempt == self._context.run.attempt.number:
            self._job.take(digest, now)
            self.advance(now)

    def list_reached(self) -> dict[int, int]:
        """Return for each node the last step that it need not send again."""
        return self._job.steps.reached

    def rewind(self, cases: Sequence[Case], outcome: Outcome, done: str) -> None:
        """Undo steps and incidents: all ranks were rolled back for these cases."""
        self._incidents.apply_rewind(self._job.rewind(outcome.to, outcome.at), self._log, cases, done)
        self._incidents.end_former(done)

    def find_asking(self, action: str) -> dict[str, int]:
        """Return the job's pending or firing rules that ask for this action, with the first step of their condition."""
        return self._job.find_asking(action)

    def add_evidence(self, what: str, seq: int) -> None:
        """Add evidence that arrived from this node's ranks."""
        self._log.add_evidence(self._job.incidents, what, seq)

    def find_newest(self, signal: str) -> float | None:
        """Return the newest value of a signal over the ranks of all nodes, if there was one."""
        return self._job.find_newest(signal)

    def advance(self, now: float) -> None:
        """Judge the steps that have closed."""
        attempt = self._context.run.attempt
        self._apply(self._job.advance(attempt.stages, attempt.step_offset, now), now)

    def tick(self, now: float) -> None:
        """Follow changes of rules and nodes, and judge what is there; called once a second."""
        if self._rules is not self._incidents.rules:
            self._rules, rules = self._incidents.rules, select_job_rules(self._incidents.rules)
            ended = self._job.replace_rules(rules)
            self._incidents.leave_rules(frozenset(rule.name for rule in rules), LEFT_TO_COORDINATOR, now)
            self._apply(ended, now)
        for state in self._membership.list_nodes():
            if state.state == "left":
                self._job.steps.leave(state.node)
        self.advance(now)
        self._apply(self._job.judge_deferred(), now)
        if self._end_former_at is None:
            self._end_former_at = now + LEFT_SECONDS
        elif now > self._end_former_at:
            self._end_former()

    def finish(self, now: float) -> None:
        """Judge the steps that are left: the run is over."""
        self._apply(self._job.finish(now), now)

    def _apply(self, transitions: Sequence[Transition], now: float) -> None:
        if not transitions:
            return
        self._incidents.apply(transitions, now, self._log)
        for transition in transitions:
            former = self._former.pop(transition.incident.rule, None)
            if former is not None and former.state == "firing":
                self._incidents.end_case(former, "over: the coordinator was restarted, and opened it again")

    def _end_former(self) -> None:
        former, self._former = self._former, {}
        for case in former.values():
            if case.state == "firing":
                self._incidents.end_case(case, "over: not found again by the next coordinator")
