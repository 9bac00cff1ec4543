"""How the nodes of a job find each other if no address is set: by the process group's store, which ranks can reach.

daemon       -> FindMeeting(port, secret) ->    the first rank of its node
rank 0       writes node 0's address, node 1's and the secret into the store; the first ranks of other nodes read them
daemon       <- MeetingFound(addresses, secret) <-    that rank; nodes 0 and 1 listen there, the others connect
"""

from __future__ import annotations

import importlib.util
import secrets
from typing import Protocol

from sentinel import wire
from sentinel.cluster.connection import NOT_INSTALLED
from sentinel.cluster.protocol.job_extent import count_nodes
from sentinel.config.cluster import Meeting
from sentinel.node.addresses import split_addresses

SECRET_BYTES = 32
SET_ADDRESS = "set SENTINEL_CLUSTER (docs/cluster.md)"


class SearchOwner(Protocol):
    """Takes the result of the search for one run."""

    def take_meeting(self, meeting: Meeting) -> None:
        """Take the meeting that was found; another one, if the job was started again."""

    def fail(self, why: str) -> None:
        """Take note that there is no meeting. `why`: the reason; empty: node 0 gives it."""


class MeetingSearch:
    """The search for one run, on one node."""

    def __init__(self, meeting: Meeting, port: int, owner: SearchOwner) -> None:
        """`meeting`: as far as the settings know it."""
        self._meeting, self._port, self._owner = meeting, port, owner
        self._nodes = 0
        """Nodes of the job, according to the rank that was asked last."""
        if not meeting.secret and meeting.tls is None:
            self._meeting = meeting._replace(secret=secrets.token_hex(SECRET_BYTES), is_public=True)

    def ask(self, hello: wire.Hello) -> wire.FindMeeting | None:
        """Return the question for a rank that says hello; None: this rank is not asked."""
        if hello.ended or hello.identity.local_rank:
            return None
        self._nodes = count_nodes(hello.identity)  # a later attempt may have fewer
        if importlib.util.find_spec("zenoh") is None:
            self._owner.fail(NOT_INSTALLED if hello.identity.rank == 0 else "")
            return None
        meeting, node = self._meeting, hello.identity.node
        return wire.FindMeeting(
            nodes=self._nodes,
            address=meeting.addresses[node] if node < len(meeting.addresses) else "",
            port=self._port,
            secret=meeting.secret if meeting.is_public else "",
            offers=True,
        )

    def take(self, found: wire.MeetingFound) -> None:
        """Take the result of the search, and join or fail."""
        if why := self._find_hindrance(found):
            self._owner.fail(f"the nodes of this job do not find each other: {why}; each is watched alone")
            return
        secret = found.secret if self._meeting.is_public else self._meeting.secret
        meeting = self._meeting._replace(addresses=_list_addresses(found), secret=secret, is_found=True)
        if meeting != self._meeting:
            self._meeting = meeting
            self._owner.take_meeting(meeting)

    def _find_hindrance(self, found: wire.MeetingFound) -> str:
        if found.reason:
            return f"{found.reason}; {SET_ADDRESS}"
        try:
            split_addresses(",".join(_list_addresses(found)), "the process group's store")
        except ValueError as error:
            return str(error)
        if found.nodes != self._nodes:
            return f"rank 0 has {found.nodes} nodes, and this one {self._nodes}: start all with the same"
        if bool(found.secret) == self._meeting.is_public:
            return ""
        one, other = ("this node", "node 0") if found.secret else ("node 0", "this node")
        return f"{one} has a secret or a certificate and {other} has none: set SENTINEL_CLUSTER_SECRET on all nodes"


def _list_addresses(found: wire.MeetingFound) -> tuple[str, ...]:
    return (found.address, found.second) if found.second else (found.address,)
