"""What a run's membership asks of its node: cases, ranks and their supervisor, and what becomes of the node's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sentinel import wire
from sentinel.cluster.protocol.job_incident import JobIncident, JobIncidents
from sentinel.cluster.protocol.messages import Digest, WorkReport
from sentinel.cluster.protocol.questions import NodeAnswer, Question
from sentinel.cluster.protocol.relay import RelayedRollback
from sentinel.diagnose.case import Case


class StepReporter(Protocol):
    """Sends this node's steps to the coordinator, which judges them, as long as it is heard."""

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator does not have all steps yet."""

    def make_digest(self, now: float) -> Digest | None:
        """Return the digest to send now; None: nothing is new."""

    def confirm(self, upto: int, now: float) -> None:
        """Take note that the coordinator has all steps up to this one; -1: none."""

    def tick(self, now: float, *, joined: bool) -> None:
        """Do what is due; called once a second. `joined`: whether the coordinator is heard, or was a moment ago."""


class JobJudge(Protocol):
    """Judges the steps of all nodes of a job."""

    def take_digest(self, digest: Digest, now: float) -> None:
        """Take the steps of another node. Raises ProtocolError."""

    def list_reached(self) -> Mapping[int, int]:
        """Return, by node, the last step that the node need not send again."""

    def tick(self, now: float) -> None:
        """Do the periodic work. Called once a second."""

    def finish(self, now: float) -> None:
        """Judge the steps that have arrived, as the run is over."""


class LocalRun(Protocol):
    """The run on this node. The daemon's is `MemberRun` (`sentinel/daemon/job/member_run.py`)."""

    @property
    def identity(self) -> wire.Identity:
        """Identity of any rank of this node, in the present attempt."""

    def tell(self, text: str) -> None:
        """Log one line, and print it on the training terminal."""

    def list_cases(self) -> Sequence[Case]:
        """Return the cases of this node."""

    def record_job_incident(self, case: Case, own: Sequence[str]) -> None:
        """Record an incident of the job as it is now. `own`: ids of the cases of this node that it consists of."""

    def find_cause(self, incidents: JobIncidents, incident: JobIncident) -> None:
        """Begin to ask the ranks of all nodes for an incident's cause. Until it is explained, a few seconds, people
        are not notified of it."""

    async def answer_question(self, question: Question) -> NodeAnswer:
        """Answer another node's question."""

    # Steps. Each of these two begins one way to handle this node's steps, and ends the other.

    def report_steps(self) -> StepReporter:
        """Begin to send the steps to the coordinator."""

    def judge_steps(self) -> JobJudge:
        """Begin to judge the steps here, since this node is the coordinator."""

    # Ranks. Those that wait for a rank of another node that is at work do not hang.

    def find_relay(self) -> RelayedRollback | None:
        """Return the relay of orders to the present attempt's ranks; None: there is none."""

    def report_work(self, now: float) -> WorkReport:
        """Return when ranks of this node worked last."""

    def note_work_elsewhere(self, moment: float, patience: float) -> None:
        """Take note when a rank of another node was last seen at work, in monotonic seconds, and the longest patience
        that one is granted, in seconds."""

    # The supervisor: the `sentinel run` that started the job's ranks on this node.

    def find_supervisor_report(self) -> wire.JobReport | None:
        """Return the state of the job on this node; None: no supervisor reports."""

    def find_supervisor_mark(self) -> str:
        """Return the mark of the supervisor: each start of `sentinel run` has its own."""

    def order_supervisor(self, order: wire.Order) -> None:
        """Send an order to the supervisor, if it is connected."""
