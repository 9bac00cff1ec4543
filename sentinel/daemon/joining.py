"""Whether the nodes of a run's job meet, and what of the run takes part in it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

from sentinel import wire
from sentinel.cluster.membership import Membership, NodeSupervisor, StepHandling, count_nodes
from sentinel.cluster.messages import NodeState, WorkReport
from sentinel.cluster.relay import APART
from sentinel.config.cluster import ClusterSettings
from sentinel.daemon.job_judge import CoordinatorJudge, NodeJudge
from sentinel.daemon.job_standstill import JobCauses
from sentinel.daemon.job_views import serve_job
from sentinel.daemon.supervision import Supervision
from sentinel.daemon.watched_run import WatchedRun
from sentinel.errors import ConfigError


class RanksAtWork:
    """Of one run's present attempt: what its ranks do, and what those of other nodes do, for whom these may wait."""

    def __init__(self, watch: WatchedRun) -> None:
        self._watch = watch

    def report(self, now: float) -> WorkReport:
        """What this node's ranks do."""
        stalls = self._watch.ingest.stalls
        seconds = max(now - stalls.worked, 0.0) if math.isfinite(stalls.worked) else None
        return WorkReport(seconds=seconds, patience=stalls.patience)

    def note(self, moment: float, patience: float) -> None:
        """What the ranks of other nodes do."""
        self._watch.ingest.stalls.note_work_elsewhere(moment, patience)


def join_job(watch: WatchedRun, hello: wire.Hello, settings: ClusterSettings, supervision: Supervision) -> None:
    """Join a run that is new here to the other nodes of its job, if it has any and it is known where they meet."""
    identity, meeting = hello.identity, None
    if count_nodes(identity) == 1:
        return
    try:
        meeting = settings.find_meeting()
    except ConfigError as error:
        watch.context.tell(f"this node is watched alone: {error}")
    if meeting is not None:
        cases = watch.incidents.log.cases
        supervisor = NodeSupervisor(
            functools.partial(supervision.find_report, watch), functools.partial(supervision.give_order, watch)
        )
        watch.membership = Membership(
            watch.run, watch.notifier, identity, meeting, lambda: list(cases.values()), watch.context.tell, supervisor,
            watch.actions.find_relay,
        )  # fmt: skip
        serve_job(watch, watch.membership)
        watch.membership.work = RanksAtWork(watch)
        watch.membership.cause_finder = JobCauses(watch, watch.membership)
        watch.actions.pass_on = watch.membership.pass_on_rollback
        watch.membership.handle_steps(
            StepHandling(
                functools.partial(_report_steps, watch, identity.node),
                functools.partial(_judge_job, watch, identity, watch.membership.list_nodes),
            )
        )
    elif hello.rollback is not None and identity.rank == 0:
        watch.context.tell(f"rollback is not armed: {APART}")


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
