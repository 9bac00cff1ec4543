"""A Zenoh session: the only module that imports Zenoh. Keys and access, but not the content of messages.

sentinel/RUN/alive/N    a token of node N, gone with its connection
sentinel/RUN/pulse/N    from node N
sentinel/RUN/event/N    from node N; the same key answers `?after=K`
sentinel/RUN/digest/N   from node N
sentinel/RUN/beat/N     from node N while it is the coordinator
sentinel/RUN/view/N     answers other nodes' questions on demand (`protocol/questions`)

Nodes that have an address listen on it as routers, and connect to each other; the others are clients of one of them,
and change to another when it goes. So the coordinator, wherever it is, reaches all, and no connection depends on the
role. Where the site has routers, all nodes are clients of those.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import zenoh

from sentinel.cluster.protocol.election import LEASE_SECONDS
from sentinel.cluster.protocol.messages import MESSAGE_BYTES, MOST_NODES
from sentinel.cluster.seal import Seal
from sentinel.config.cluster import Meeting, TlsFiles
from sentinel.errors import ProtocolError
from sentinel.node.network_address import list_listening_addresses

log = logging.getLogger(__name__)

_USER = "sentinel"
_QUERY_SECONDS = 5.0
OPEN_SECONDS = 3.0
"""Seconds that an address has to answer before the next one is tried: a host that is gone refuses no connection."""


class NodeQuery:
    """A query of another node. It is answered once, from any thread."""

    def __init__(self, query: Any, key: str, seal: Seal) -> None:
        self._query, self._key, self._seal = query, key, seal

    def reply(self, *parts: bytes) -> None:
        """Answer with these parts."""
        with contextlib.suppress(zenoh.ZError), self._query:  # the session may be closed by now
            for part in parts:
                self._query.reply(self._key, self._seal.sign(self._key, part))


class SessionListener(Protocol):
    """What a session calls, in Zenoh's threads."""

    def receive(self, kind: str, node: int, payload: bytes) -> None:
        """Take a message: `pulse`, `event`, `digest`, `beat` or `gone`, of the node that the key names."""

    def answer_events(self, after: int, query: NodeQuery) -> None:
        """Answer with this node's events after number `after`."""

    def answer_question(self, question: bytes, query: NodeQuery) -> None:
        """Answer a question about this node."""

    def refuse(self, error: ProtocolError) -> None:
        """Take note of why a message was not handed on."""

    def note_link(self, locator: str) -> None:
        """Take note that a link to this other side began or ended: `tcp/10.0.0.7:41234`."""


class Session:
    """The Zenoh session of one run."""

    def __init__(self, meeting: Meeting, run_id: str, node: int, listener: SessionListener) -> None:
        """Connect, and listen if the node has an address. Raises zenoh.ZError if that is not possible now; blocks while
        it tries."""
        self._root, self._listener, self._seal = f"sentinel/{run_id}", listener, Seal(meeting.secret)
        self._view_key, self._question_key = f"{self._root}/view/{node}", f"{self._root}/question"
        self._session: Any = open_session(meeting, node)
        self._links = self._session.info.declare_link_events_listener(
            lambda event: listener.note_link(event.link.dst), history=True
        )
        self._views = self._session.declare_queryable(self._view_key, self._answer_question)
        self._publishers = {
            kind: self._session.declare_publisher(f"{self._root}/{kind}/{node}")
            for kind in ("pulse", "beat", "event", "digest")
        }
        self._subscribe("beat")
        self._queryable = self._session.declare_queryable(f"{self._root}/event/{node}", self._answer_query)
        self._token = self._session.liveliness().declare_token(f"{self._root}/alive/{node}")
        self._led: list[Any] = []
        """The subscribers that only the coordinator has."""

    def lead(self) -> None:
        """Receive what nodes send to the coordinator."""
        self._led = [self._subscribe(kind) for kind in ("pulse", "event", "digest")]
        alive = self._session.liveliness()
        self._led.append(alive.declare_subscriber(f"{self._root}/alive/*", self._note_liveliness))

    def follow(self) -> None:
        """Stop receiving what nodes send to the coordinator."""
        led, self._led = self._led, []
        for subscriber in led:
            subscriber.undeclare()

    def publish_pulse(self, payload: bytes) -> None:
        """Publish a pulse of this node. Lost if it cannot be sent now."""
        self._publish("pulse", payload)

    def publish_beat(self, payload: bytes) -> None:
        """Publish a beat of this node, the coordinator. Lost if it cannot be sent now."""
        self._publish("beat", payload)

    def publish_event(self, payload: bytes) -> None:
        """Publish events of this node."""
        self._publish("event", payload)

    def publish_digest(self, payload: bytes) -> None:
        """Publish a digest of this node. Lost if it cannot be sent now."""
        self._publish("digest", payload)

    def ask(self, node: int, after: int) -> None:
        """Ask a node for its events after number `after`; they come in as any others do."""

        key = f"{self._root}/event/{node}"

        def take(reply: Any) -> None:
            if reply.ok is not None and (payload := self._open(key, reply.ok.payload)) is not None:
                self._listener.receive("event", node, payload)

        self._session.get(f"{key}?after={after}", take, timeout=_QUERY_SECONDS)

    def ask_view(
        self, node: int | None, payload: bytes, take: Callable[[int, bytes], None], finish: Callable[[], None],
        seconds: float,
    ) -> None:  # fmt: skip
        """Ask one other node, or all others. `take` gets node and bytes of each part of an answer; `finish` is called
        once all have answered, or after `seconds`."""

        def take_reply(reply: Any) -> None:
            if reply.ok is None:
                return
            key = str(reply.ok.key_expr)
            if (part := self._open(key, reply.ok.payload)) is not None:
                take(_number(key), part)

        self._session.get(
            f"{self._root}/view/{'*' if node is None else node}",
            zenoh.handlers.Callback(take_reply, finish),
            payload=self._seal.sign(self._question_key, payload),
            target=zenoh.QueryTarget.ALL,
            consolidation=zenoh.ConsolidationMode.NONE,
            allowed_destination=zenoh.Locality.REMOTE,
            timeout=seconds,
        )

    def close(self) -> None:
        """Close the session: a process that does not do so hangs at its end."""
        self._session.close()

    def _publish(self, kind: str, payload: bytes) -> None:
        publisher = self._publishers[kind]
        publisher.put(self._seal.sign(str(publisher.key_expr), payload))

    def _open(self, key: str, sealed: Any) -> bytes | None:
        """Return the payload that came under a key; None if it is not the job's."""
        try:
            return self._seal.check(key, bytes(sealed) if sealed is not None else b"")
        except ProtocolError as error:
            self._listener.refuse(error)
            return None

    def _subscribe(self, kind: str) -> Any:
        return self._session.declare_subscriber(f"{self._root}/{kind}/*", lambda sample: self._take(kind, sample))

    def _take(self, kind: str, sample: Any) -> None:
        key = str(sample.key_expr)
        if (payload := self._open(key, sample.payload)) is not None:
            self._listener.receive(kind, _number(key), payload)

    def _note_liveliness(self, sample: Any) -> None:
        if sample.kind == zenoh.SampleKind.DELETE:
            self._listener.receive("gone", _number(str(sample.key_expr)), b"")

    def _answer_query(self, query: Any) -> None:
        after = str(query.parameters).removeprefix("after=")
        if after.isdecimal() and len(after) <= 15:
            self._listener.answer_events(int(after), NodeQuery(query, str(query.key_expr), self._seal))

    def _answer_question(self, query: Any) -> None:
        if (question := self._open(self._question_key, query.payload)) is not None:
            self._listener.answer_question(question, NodeQuery(query, self._view_key, self._seal))


def open_session(meeting: Meeting, node: int) -> Any:
    """Open a Zenoh session with a node's settings. Raises zenoh.ZError if that is not possible now."""
    protocol = "tcp" if meeting.tls is None else "tls"
    endpoints = [f"{protocol}/{address}" for address in meeting.addresses]
    listens = node < len(endpoints)
    settings: dict[str, object] = {
        "mode": "router" if listens else "client",
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "transport/shared_memory/enabled": False,  # /dev/shm of a container is small, and the data loader needs it
        "transport/unicast/max_sessions": MOST_NODES,
        "transport/unicast/open_timeout": round(1000 * OPEN_SECONDS),
        "transport/link/rx/max_message_size": 2 * MESSAGE_BYTES,
        "transport/link/tx/lease": round(1000 * LEASE_SECONDS),  # a link that goes down closes no connection
        # Of two nodes that listen, the later one connects.
        "connect/endpoints": endpoints[:node] or [f"{protocol}/{router}" for router in meeting.routers],
        "connect/retry": {"period_init_ms": 1000, "period_max_ms": 1000, "period_increase_factor": 1},
    }
    if listens:
        listening = list_listening_addresses(meeting.addresses[node])
        settings["listen/endpoints"] = [f"{protocol}/{address}" for address in listening]
    if meeting.tls is not None:
        settings["transport/link/tls"] = _describe_tls(meeting.tls)
    if not meeting.secret or meeting.routers:  # a router without users refuses one that names a user
        return _connect(settings)
    # The connecting side proves that it has the secret without sending it: by its digest, as the secret may have any
    # length and characters.
    password = hashlib.blake2b(meeting.secret.encode(), digest_size=32, person=b"sentinel").hexdigest()
    settings |= {"transport/auth/usrpwd/user": _USER, "transport/auth/usrpwd/password": password}
    if not listens:
        return _connect(settings)
    # Zenoh reads users from a file. A pipe needs no disk, which may be full, and leaves nothing behind after kill -9.
    users, end = os.pipe()
    try:
        with open(end, "w", encoding="ascii") as pipe:
            pipe.write(f"{_USER}:{password}\n")
        return _connect(settings | {"transport/auth/usrpwd/dictionary_file": f"/dev/fd/{users}"})
    finally:
        os.close(users)


def _describe_tls(files: TlsFiles) -> dict[str, object]:
    certificate, key = str(files.certificate), str(files.key)
    return {
        "root_ca_certificate": str(files.ca),
        "listen_certificate": certificate,
        "listen_private_key": key,
        "connect_certificate": certificate,
        "connect_private_key": key,
        "enable_mtls": True,
        # Addresses of pods and found ones are known too late for a certificate. One of the authority suffices.
        "verify_name_on_connect": False,
    }


def _connect(settings: dict[str, object]) -> Any:
    config = zenoh.Config()
    for name, value in settings.items():
        config.insert_json5(name, json.dumps(value))
    if "zenoh_transport" in os.environ.get("RUST_LOG", ""):  # logs rejected peers; all of Zenoh's log has the password
        zenoh.try_init_log_from_env()  # type: ignore[no-untyped-call]
    return zenoh.open(config)


def _number(key: str) -> int:
    """Return the node that a key names; -1, which no node has, if it names none."""
    last = key.rpartition("/")[2]
    return int(last) if last.isdecimal() and len(last) < 9 and int(last) < MOST_NODES else -1
