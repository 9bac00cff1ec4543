"""Whether the nodes of a run's job meet."""

from __future__ import annotations

from sentinel import wire
from sentinel.cluster.membership import Membership, is_over_nodes
from sentinel.config.cluster import ClusterSettings
from sentinel.daemon.watched_run import WatchedRun
from sentinel.errors import ConfigError


def join_job(watch: WatchedRun, identity: wire.Identity, settings: ClusterSettings) -> None:
    """Join a run that is new here to the other nodes of its job, if it has any and it is known where they meet."""
    if not is_over_nodes(identity):
        return
    try:
        meeting = settings.find_meeting()
    except ConfigError as error:
        watch.context.tell(f"this node is watched alone: {error}")
        return
    if meeting is not None:
        cases = watch.incidents.log.cases
        watch.membership = Membership(
            watch.run, watch.notifier, identity, meeting, lambda: list(cases.values()), watch.context.tell
        )
