"""The cases of a job's rules over the ranks of all nodes, on the coordinator's node."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import msgspec

from sentinel.cluster.membership import Membership
from sentinel.cluster.protocol.job_rules import JobRules
from sentinel.cluster.protocol.messages import NodeState
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.incident_log import IncidentLog
from sentinel.diagnose.case import Case, CaseMember
from sentinel.engine import Incident
from sentinel.notify.notifier import Notifier
from sentinel.runs import Attempt, Rank
from sentinel.wire import Hello, Identity

JOB_PREFIX = "job-"
"""Prefix of the ids of the job's cases, which are counted separately from those of the node."""


class JobIncidentLog(IncidentLog):
    """The cases of rules over the ranks of all nodes, stored among those of the coordinator's node."""

    def __init__(
        self,
        context: RunContext,
        notifier: Notifier,
        log: IncidentLog,
        job: JobRules,
        membership: Membership,
        identity: Identity,
    ) -> None:
        """Share the cases of `log`, the node's log. `identity`: that of any rank of this node."""
        super().__init__(context, notifier)
        self.cases, self.fired = log.cases, log.fired
        self._job, self._membership, self._rank_identity = job, membership, identity

    def _identity(self, incident: Incident) -> str:
        return JOB_PREFIX + super()._identity(incident)

    def _find_attempt(self) -> Attempt:
        """Return a copy of this node's attempt with the steps and ranks of all nodes."""
        view = copy.copy(self._run.attempt)
        view.recent, view.clock_shift, view.before_alert = self._job.recent, 0.0, {}
        others = (pair for state in self._membership.list_nodes() for pair in self._make_ranks(state))
        view.ranks = dict(others) | view.ranks
        return view

    def _make_ranks(self, state: NodeState) -> Iterable[tuple[int, Rank]]:
        for rank in map(int, filter(str.isdecimal, state.ranks)):
            identity = msgspec.structs.replace(self._rank_identity, rank=rank, node=state.node, hostname=state.hostname)
            yield rank, Rank(Hello(version="", identity=identity), 0.0)

    def _name_nodes(self, case: Case) -> None:
        """Add the node of each member rank; for a rule on the run, of the ranks that the diagnosis names."""
        case.of_job = True
        blamed = [CaseMember("rank", str(rank), case.first_step, {}) for rank in case.diagnosis.ranks]
        ranks = [member for member in case.members if member.scope == "rank" and member.values] or blamed
        case.members = (
            *(member for member in case.members if member.scope != "rank"),
            *(msgspec.structs.replace(one, node=self._find_node(one.name)) for one in ranks),
        )

    def _find_node(self, rank: str) -> str:
        node = self._job.steps.nodes.get(int(rank))
        return "" if node is None else str(node)
