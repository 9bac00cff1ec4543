"""Joins the nodes of a run's job: whether they meet, how they find each other, and the announcement of where."""

from __future__ import annotations

from sentinel import wire
from sentinel.cluster.orders import NO_ORDERS
from sentinel.cluster.protocol.job_extent import count_nodes
from sentinel.cluster.protocol.relay import APART
from sentinel.config.cluster import ClusterSettings, Meeting
from sentinel.daemon.job.member_run import MemberRun
from sentinel.daemon.job.supervision import Supervision
from sentinel.daemon.run.meeting_search import MeetingSearch
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.errors import ConfigError
from sentinel.text import name_nodes


class Joining:
    """How one run joins its job; what its `MeetingSearch` finds, it takes."""

    def __init__(self, watch: WatchedRun, identity: wire.Identity, supervision: Supervision) -> None:
        """`identity`: that of the rank that said hello first."""
        self._watch, self._identity, self._supervision = watch, identity, supervision

    def take_meeting(self, meeting: Meeting) -> None:
        """Join the nodes at the meeting that was found."""
        self._watch.notifier.end_joining()
        if self._identity.node == 0:
            self._watch.context.tell(_announce(meeting))
        if not meeting.takes_orders:
            self.tell_unarmed(NO_ORDERS)
        self.meet(meeting)

    def fail(self, why: str) -> None:
        """Watch this node alone, as no meeting was found. `why`: the reason; empty: node 0 gives it."""
        self._watch.notifier.end_joining()
        if why:
            self._watch.context.tell_once(why)
        self.tell_unarmed(APART)

    def meet(self, meeting: Meeting) -> None:
        """Join the nodes at this meeting; elsewhere than before, if the job was started again."""
        watch = self._watch
        if watch.membership is not None:
            watch.membership.move(meeting)
            return
        watch.context.job = member = MemberRun(watch, self._identity, self._supervision, meeting)
        watch.membership = member.membership

    def tell_unarmed(self, why: str) -> None:
        """Say on node 0 of a run with a rollback why it is not armed.

        It does not matter which of the node's ranks says hello first: all offer the same rollback.
        """
        ranks = self._watch.run.attempt.ranks.values()
        if self._identity.node == 0 and any(rank.hello.rollback is not None for rank in ranks):
            self._watch.context.tell_once(f"rollback is not armed: {why}")


def join_job(watch: WatchedRun, hello: wire.Hello, settings: ClusterSettings, supervision: Supervision) -> None:
    """Join a new run to the other nodes of its job, if it has any, or begin to find out where they meet."""
    if count_nodes(hello.identity) == 1:
        return
    joining, meeting = Joining(watch, hello.identity, supervision), None
    try:
        meeting = settings.find_meeting()
    except ConfigError as error:
        watch.context.tell(f"this node is watched alone: {error}")
    if meeting is None:
        joining.tell_unarmed(APART)
    elif meeting.addresses or meeting.routers:
        joining.meet(meeting)
    else:
        watch.notifier.begin_joining()
        watch.search = MeetingSearch(meeting, settings.port, joining)


def ask_for_meeting(watch: WatchedRun, hello: wire.Hello) -> None:
    """Ask a rank that said hello where the nodes meet, if that is its part in the search."""
    if watch.search is not None and (question := watch.search.ask(hello)) is not None:
        watch.context.link.send(hello.identity.rank, question)


def warn_of_shared_daemon(watch: WatchedRun) -> None:
    """Say that ranks of several nodes use this daemon: it can be the daemon of only one of them, and waits for those of
    the others."""
    nodes = sorted({rank.identity.node for rank in watch.run.attempt.live})
    if len(nodes) > 1 and (watch.membership is not None or watch.search is not None):
        watch.context.tell_once(
            f"{name_nodes(nodes)} use one daemon, so the nodes of this job do not meet: no rollback, stop or restart "
            "of all nodes; set SENTINEL_RUNTIME and SENTINEL_STATE to directories of its own on each node"
        )


def _announce(found: Meeting) -> str:
    words = f"the nodes of this job meet at {found.addresses[0]}, found by the process group's store"
    if len(found.addresses) > 1:
        words += f"; node 1 takes over, at {found.addresses[1]}"
    return words if found.takes_orders else f"{words}; they share what they see: {NO_ORDERS}"
