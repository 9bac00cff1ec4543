"""A node's connection to the other nodes of its job: retried until it is there; each obstacle is reported once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sentinel.cluster.local_run import LocalRun
from sentinel.config.cluster import Meeting
from sentinel.errors import ProtocolError
from sentinel.node.network_address import explain_unknown_host, explain_unusable_address

if TYPE_CHECKING:
    from sentinel.cluster.session import Session

log = logging.getLogger(__name__)

CONNECT_AGAIN_SECONDS = 2.0
CLOSE_SECONDS = 5.0
SAY_SECONDS = 30.0
"""Seconds after which it is reported that no other node is reached: before that, their daemons may not run yet."""
NOT_INSTALLED = (
    "the nodes of this job cannot meet: pip install 'training-sentinel[cluster]'; each node is watched alone"
)


class ConnectionOwner(Protocol):
    """Opens sessions, and uses them."""

    def open_session(self, meeting: Meeting) -> Session:
        """Return an open session. Called in a thread. Raises ImportError where Zenoh is not installed."""

    def begin_session(self, session: Session) -> None:
        """Begin to use a session that is new. Called in the daemon's loop."""


class Connection:
    """The connection of one run. Lives in the daemon's loop."""

    def __init__(
        self, meeting: Meeting, node: int, owner: ConnectionOwner, local: LocalRun, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Prepare the connection; `tick` opens it."""
        self.meeting, self._node, self._owner, self._local, self._loop = meeting, node, owner, local, loop
        self.session: Session | None = None
        self.refused = 0
        """Count of messages of other nodes that were refused."""
        self.trouble = ""
        """Why there is no session; empty: unknown, or there is one."""
        self._thread: threading.Thread | None = None
        self._closing: threading.Thread | None = None
        """The thread that closes a session no longer wanted; the session holds the port as long as this runs."""
        self._again_at = 0.0
        self._since: float | None = None
        """Time of the first try."""
        self._said = set[str]()
        self._closed = False

    @property
    def port(self) -> int | None:
        """The port on which this node listens now; None: on none."""
        listens = self.session is not None and self._listens
        return int(self.meeting.addresses[self._node].rpartition(":")[2]) if listens else None

    @property
    def _listens(self) -> bool:
        """Whether this node has an address, at which it listens."""
        return self._node < len(self.meeting.addresses)

    def tick(self, now: float) -> None:
        """Try to connect, in a thread: where packets are dropped a try takes minutes, for which the daemon's end must
        not wait."""
        if self._since is None:
            self._since = now
        if self.session is not None:
            return
        if now - self._since > SAY_SECONDS and (self.trouble or not self._listens):
            self._say_once(self.trouble or _describe_unreached(self.meeting))
        if now >= self._again_at and not _is_alive(self._thread) and not _is_alive(self._closing):
            self._again_at = now + CONNECT_AGAIN_SECONDS
            self._thread = threading.Thread(target=self._open, args=(self.meeting,), daemon=True, name="cluster")
            self._thread.start()

    def move(self, meeting: Meeting) -> None:
        """Connect at another meeting place, and drop the present session."""
        self.meeting, session, self.session = meeting, self.session, None
        if session is not None:
            self._drop(session)

    def call_in_loop(self, function: Callable[..., object], *arguments: object) -> bool:
        """Call the function in the daemon's loop, from any thread. Returns False if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def refuse(self, error: ProtocolError) -> None:
        """Count a message that is refused; for the first one, say why."""
        self.refused += 1
        if self.refused == 1:
            self._local.tell(f"a message of another node is refused: {error}")

    async def finish_trying(self) -> None:
        """Wait for the connecting thread: one that is inside Zenoh when the interpreter ends aborts the process."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        self._closed = True

    async def close(self) -> None:
        """Close the session, if there is one."""
        session, self.session = self.session, None
        if session is None:
            return
        ended = asyncio.Event()

        def end() -> None:
            session.close()
            self.call_in_loop(ended.set)

        threading.Thread(target=end, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), CLOSE_SECONDS)

    def _open(self, meeting: Meeting) -> None:
        try:
            session = self._owner.open_session(meeting)
        except ImportError:
            self.call_in_loop(self._fail, NOT_INSTALLED, meeting)
        except Exception as error:
            log.info("the nodes of a job: %s", error)
            self.call_in_loop(self._fail, _describe_trouble(meeting, self._node), meeting)
        else:
            if not self.call_in_loop(self._take, session, meeting):
                session.close()

    def _take(self, session: Session, meeting: Meeting) -> None:
        if self._closed or meeting != self.meeting:
            self._drop(session)
            return
        if self.trouble in self._said:
            self._said.discard(self.trouble)
            self._local.tell("the job's other nodes can reach this one now")
        self.session, self.trouble = session, ""
        self._owner.begin_session(session)

    def _drop(self, session: Session) -> None:
        self._closing = threading.Thread(target=session.close, daemon=True)
        self._closing.start()

    def _fail(self, trouble: str, meeting: Meeting) -> None:
        if meeting != self.meeting:  # by now, another one is tried
            return
        node, addresses = self._node, meeting.addresses
        if trouble != NOT_INSTALLED and meeting.is_found and 0 < node < len(addresses):
            self.meeting = meeting._replace(addresses=addresses[:node])  # like a node without an address
            self._say_once(f"node {node} cannot listen at {addresses[node]}: it does not take over")
            return
        self.trouble = trouble
        if trouble == NOT_INSTALLED or self._listens:
            self._say_once(trouble)
        if trouble == NOT_INSTALLED:
            self._again_at = float("inf")

    def _say_once(self, trouble: str) -> None:
        if trouble not in self._said:
            self._said.add(trouble)
            self._local.tell(trouble)


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _describe_trouble(meeting: Meeting, node: int) -> str:
    """Return why no session could be opened. Asks the system, which may take seconds."""
    addresses = meeting.addresses
    if node < len(addresses):
        why = explain_unusable_address(addresses[node]) or "the daemon's log has the reason"
        return f"cannot listen on {addresses[node]}: {why}; tried again"
    unknown = filter(None, map(explain_unknown_host, addresses or meeting.routers))
    return _describe_unreached(meeting, next(unknown, ""))


def _describe_unreached(meeting: Meeting, why: str = "") -> str:
    """Return that no other node is reached. `why`: the reason; empty: not known."""
    if meeting.routers:
        why = why or "no Zenoh router listens there, a firewall is between, or it does not let this node in"
        return f"cannot reach {' or '.join(meeting.routers)}: {why}; tried again"
    proof = "the secret" if meeting.tls is None else "the secret or the certificates' authority"
    why = why or f"no daemon listens there, a firewall is between, or {proof} is another"
    return f"cannot reach {' or '.join(meeting.addresses)}: {why}; tried again"
