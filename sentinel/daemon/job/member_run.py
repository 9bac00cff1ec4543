"""A run that is a member of a job over several nodes: what its membership asks of it, and what it asks of that."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from sentinel import wire
from sentinel.cluster.membership import Membership
from sentinel.cluster.protocol.job_incident import JobIncident, JobIncidents
from sentinel.cluster.protocol.messages import WorkReport
from sentinel.cluster.protocol.questions import NodeAnswer, Question
from sentinel.cluster.protocol.relay import RelayedRollback
from sentinel.config.cluster import Meeting
from sentinel.daemon.job.judge import CoordinatorJudge, NodeJudge
from sentinel.daemon.job.standstill import JobCauses
from sentinel.daemon.job.supervision import Supervision, find_mark
from sentinel.daemon.job.unasked import find_silent_ranks
from sentinel.daemon.job.views import answer_question
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.case import Case

log = logging.getLogger(__name__)


class MemberRun:
    """A run with its membership: the `LocalRun` of the membership, and the `JobPart` of the run."""

    def __init__(self, watch: WatchedRun, identity: wire.Identity, supervision: Supervision, meeting: Meeting) -> None:
        """Begin to look for the other nodes. `identity`: that of any rank of this node."""
        self._watch, self._first_identity, self._supervision = watch, identity, supervision
        self.membership = Membership(watch.run, watch.notifier, meeting, self)
        self._causes = JobCauses(watch, self.membership)

    # What the membership asks: see `LocalRun`.

    @property
    def identity(self) -> wire.Identity:
        """Identity of any rank of this node, in the present attempt."""
        ranks = self._watch.run.attempt.ranks.values()
        return next((rank.identity for rank in ranks), self._first_identity)

    def tell(self, text: str) -> None:
        """Log one line, and print it on the training terminal."""
        log.warning("run %s: %s", self._watch.run.name, text)
        self._watch.context.tell(text)

    def list_cases(self) -> Sequence[Case]:
        """Return the cases of this node."""
        return list(self._watch.incidents.log.cases.values())

    def record_job_incident(self, case: Case, own: Sequence[str]) -> None:
        """Write an incident of the job into the history as it is now. `own`: ids of this node's cases in it."""
        self._watch.context.record_job_incident(case, own)

    def find_cause(self, incidents: JobIncidents, incident: JobIncident) -> None:
        """Begin to ask the ranks of all nodes for an incident's cause."""
        self._causes.begin(incidents, incident)

    async def answer_question(self, question: Question) -> NodeAnswer:
        """Answer another node's question."""
        return await answer_question(self._watch, self.membership, question)

    def report_steps(self) -> NodeJudge:
        """Begin to send the steps to the coordinator."""
        watch = self._watch
        watch.incidents.job = reporter = NodeJudge(watch.context, watch.incidents, self._first_identity.node)
        return reporter

    def judge_steps(self) -> CoordinatorJudge:
        """Begin to judge the steps here, since this node is the coordinator."""
        incidents, before = self._watch.incidents, self._watch.incidents.job
        earlier = before.list_unconfirmed() if isinstance(before, NodeJudge) else []
        incidents.job = judge = CoordinatorJudge(
            self._watch.context, incidents, self._first_identity, self.membership, earlier
        )
        return judge

    def find_relay(self) -> RelayedRollback | None:
        """Return the relay of orders to the present attempt's ranks."""
        return self._watch.actions.find_relay()

    def report_work(self, now: float) -> WorkReport:
        """Return when this node's ranks worked last, and the longest limit granted to one of them."""
        stalls = self._watch.ingest.stalls
        seconds = max(now - stalls.worked, 0.0) if math.isfinite(stalls.worked) else None
        return WorkReport(seconds=seconds, patience=stalls.patience)

    def note_work_elsewhere(self, moment: float, patience: float) -> None:
        """Take note of when ranks of other nodes worked last, in monotonic seconds, and of their longest limit."""
        self._watch.ingest.stalls.note_work_elsewhere(moment, patience)

    def find_supervisor_report(self) -> wire.JobReport | None:
        """Return how the job stands on this node; None if there is no supervisor, or several."""
        return self._supervision.find_report(self._watch)

    def find_supervisor_mark(self) -> str:
        """Return the mark of the run's supervisor."""
        return find_mark(self._watch.run)

    def order_supervisor(self, order: wire.Order) -> None:
        """Send an order to the run's supervisor, if it is connected."""
        self._supervision.give_order(self._watch, order)

    # What the run asks: see `JobPart`.

    def pass_on_rollback(self) -> None:
        """Have the coordinator learn what is new about a rollback, once the caller has returned."""
        self.membership.pass_on_rollback()

    def find_silent_ranks(self) -> dict[int, str]:
        """Return the ranks of nodes that are not heard, as `unasked` of `Evidence`."""
        return find_silent_ranks(self.membership)
