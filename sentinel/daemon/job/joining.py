"""Joins the nodes of a run's job: whether they meet, how they find each other, and what they exchange."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

from sentinel import wire
from sentinel.cluster.membership import Membership
from sentinel.cluster.node_parts import NodeSupervisor, StepHandling
from sentinel.cluster.orders import NO_ORDERS
from sentinel.cluster.protocol.job_extent import count_nodes
from sentinel.cluster.protocol.messages import NodeState, WorkReport
from sentinel.cluster.protocol.relay import APART
from sentinel.config.cluster import ClusterSettings, Meeting
from sentinel.daemon.job.judge import CoordinatorJudge, NodeJudge
from sentinel.daemon.job.standstill import JobCauses
from sentinel.daemon.job.supervision import Supervision, find_mark
from sentinel.daemon.job.unasked import find_silent_ranks
from sentinel.daemon.job.views import serve_job
from sentinel.daemon.run.meeting_search import MeetingSearch
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.errors import ConfigError


class RanksAtWork:
    """When a run's ranks last worked: this node's, for the others, and theirs, for which this node's ranks may wait."""

    def __init__(self, watch: WatchedRun) -> None:
        self._watch = watch

    def report(self, now: float) -> WorkReport:
        """Return when this node's ranks worked last, and the longest limit granted to one of them."""
        stalls = self._watch.ingest.stalls
        seconds = max(now - stalls.worked, 0.0) if math.isfinite(stalls.worked) else None
        return WorkReport(seconds=seconds, patience=stalls.patience)

    def note(self, moment: float, patience: float) -> None:
        """Take note of when ranks of other nodes worked last, in monotonic seconds, and of their longest limit."""
        self._watch.ingest.stalls.note_work_elsewhere(moment, patience)


class MemberRun:
    """A run's part in a job that it has joined. See `JobPart`."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def pass_on_rollback(self) -> None:
        """Have the coordinator learn what is new about a rollback, once the caller has returned."""
        self._membership.pass_on_rollback()

    def find_silent_ranks(self) -> dict[int, str]:
        """Return the ranks of nodes that are not heard, as `unasked` of `Evidence`."""
        return find_silent_ranks(self._membership)


def join_job(watch: WatchedRun, hello: wire.Hello, settings: ClusterSettings, supervision: Supervision) -> None:
    """Join a new run to the other nodes of its job, if it has any, or begin to find out where they meet."""
    identity, meeting = hello.identity, None
    if count_nodes(identity) == 1:
        return
    try:
        meeting = settings.find_meeting()
    except ConfigError as error:
        watch.context.tell(f"this node is watched alone: {error}")
    if meeting is None:
        _tell_unarmed(watch, identity, APART)
    elif meeting.addresses or meeting.routers:
        _meet(watch, identity, supervision, meeting)
    else:

        def fail(why: str) -> None:
            watch.notifier.end_joining()
            watch.context.tell_once(why)
            _tell_unarmed(watch, identity, APART)

        def join(found: Meeting) -> None:
            watch.notifier.end_joining()
            if identity.node == 0:
                watch.context.tell(_announce(found))
            if not found.takes_orders:
                _tell_unarmed(watch, identity, NO_ORDERS)
            _meet(watch, identity, supervision, found)

        watch.notifier.begin_joining()
        watch.search = MeetingSearch(meeting, settings.port, join, fail)


def ask_for_meeting(watch: WatchedRun, hello: wire.Hello) -> None:
    """Ask a rank that said hello where the nodes meet, if that is its part in the search."""
    if watch.search is not None and (question := watch.search.ask(hello)) is not None:
        watch.context.link.send(hello.identity.rank, question)


def _announce(found: Meeting) -> str:
    words = f"the nodes of this job meet at {found.addresses[0]}, found by the process group's store"
    if len(found.addresses) > 1:
        words += f"; node 1 takes over, at {found.addresses[1]}"
    return words if found.takes_orders else f"{words}; they share what they see: {NO_ORDERS}"


def _tell_unarmed(watch: WatchedRun, identity: wire.Identity, why: str) -> None:
    """Say on node 0 of a run with a rollback why it is not armed.

    It does not matter which of the node's ranks says hello first: all offer the same rollback.
    """
    if identity.node == 0 and any(rank.hello.rollback is not None for rank in watch.run.attempt.ranks.values()):
        watch.context.tell_once(f"rollback is not armed: {why}")


def _meet(watch: WatchedRun, identity: wire.Identity, supervision: Supervision, meeting: Meeting) -> None:
    if watch.membership is not None:
        watch.membership.move(meeting)
        return
    cases = watch.incidents.log.cases
    supervisor = NodeSupervisor(
        functools.partial(supervision.find_report, watch), functools.partial(supervision.give_order, watch),
        functools.partial(find_mark, watch),
    )  # fmt: skip
    watch.membership = Membership(
        watch.run, watch.notifier, identity, meeting, lambda: list(cases.values()), watch.context.tell, supervisor,
        watch.actions.find_relay,
    )  # fmt: skip
    serve_job(watch, watch.membership)
    watch.membership.work = RanksAtWork(watch)
    watch.membership.cause_finder = JobCauses(watch, watch.membership)
    watch.membership.recorder = watch.context
    watch.context.job = MemberRun(watch.membership)
    watch.membership.handle_steps(
        StepHandling(
            functools.partial(_report_steps, watch, identity.node),
            functools.partial(_judge_job, watch, identity, watch.membership.list_nodes),
        )
    )


def _report_steps(watch: WatchedRun, node: int) -> NodeJudge:
    watch.incidents.job = reporter = NodeJudge(watch.context, watch.incidents, node)
    return reporter


def _judge_job(
    watch: WatchedRun, identity: wire.Identity, list_nodes: Callable[[], Iterable[NodeState]]
) -> CoordinatorJudge:
    before = watch.incidents.job
    earlier = before.list_unconfirmed() if isinstance(before, NodeJudge) else []
    watch.incidents.job = judge = CoordinatorJudge(watch.context, watch.incidents, identity, list_nodes, earlier)
    return judge
