"""Finds where the daemons of a job's nodes meet, by one key in the process group's store.

Rank 0 writes the key, the first rank of each other node reads it. This has its own thread, so that neither the loop nor
the heartbeat waits for it.

Node 1's daemon takes over where node 0's dies. Its first rank offers an address under a second key, and rank 0 adds it
to that of node 0: so all nodes read the same, even if the offer comes too late or never.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import msgspec

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.hooks.core.identity import group_store
from sentinel.hooks.core.store_client import StoreClient, StoreLost
from sentinel.hooks.core.threads import Task, Worker
from sentinel.node.addresses import split_addresses
from sentinel.node.network_address import find_free_port, find_own_address

FIND_SECONDS = 300.0
"""How long to wait for a process group, and then for what rank 0 writes."""
OFFER_SECONDS = 30.0
"""How long rank 0 waits for node 1's offer: its daemon may take that long to start on a busy node."""
LEAST_NODES = 3
"""Fewest nodes of a job in which one can take over from another: of two, neither goes on without the other."""
LOOK_SECONDS = 1.0
LOST_SECONDS = 20.0
"""Time between two connections to a store that gives no answer."""
_MOST_BYTES = 4096
_WORDS = 500


class MeetingFinder:
    """Finds the meeting point of one run, in one process."""

    def __init__(self, identify: Callable[[], wire.Identity | None], send: Callable[[wire.Message], None]) -> None:
        """`send` is called in the finder's thread."""
        self._identify, self._send = identify, send
        self._worker = Worker("sentinel-meeting", finishes=True)
        self._task: Task | None = None
        self._closed = threading.Event()

    def find(self, asked: wire.FindMeeting) -> None:
        """Send a `MeetingFound` once the meeting point is known, or once it is known that there will be none."""
        if self._task is None or self._task.over:
            self._task = self._worker.submit(functools.partial(self._find, asked))

    def close(self) -> None:
        """Stop looking: the run is over."""
        self._closed.set()

    def _find(self, asked: wire.FindMeeting) -> None:
        until = time.monotonic() + FIND_SECONDS
        offers_until = 0.0
        client: StoreClient | None = None
        reason, pause = "there is no process group", LOOK_SECONDS
        while not self._closed.is_set():
            try:
                if client is None and group_store() is not None:
                    client = StoreClient()
                    self._offer(client, asked)
                    offers_until = min(time.monotonic() + OFFER_SECONDS, until)
                found = self._look(client, asked, offers_until) if client is not None else None
                reason = "rank 0 has not said where" if client is not None else reason
            except StoreLost as error:
                client, found, reason, pause = None, None, str(error), LOST_SECONDS
            except (ConfigError, OSError, msgspec.DecodeError) as error:
                found = wire.MeetingFound(reason=str(error)[:_WORDS])
            if found is None and time.monotonic() > until:
                found = wire.MeetingFound(reason=f"{reason}, in {FIND_SECONDS:g} s")
            if found is not None:
                self._send(found)
                return
            self._closed.wait(pause)

    def _offer(self, client: StoreClient, asked: wire.FindMeeting) -> None:
        """On node 1, write where its daemon can listen.

        The last offer counts: that of an earlier attempt may be of a daemon that is gone.
        """
        identity = self._identify()
        if identity is None or identity.node != 1 or not _has_second(asked):
            return
        try:
            offer = wire.MeetingFound(nodes=asked.nodes, address=_choose_address(client, asked))
        except OSError:  # it can still connect to node 0
            return
        key = _name_offer(identity)
        client.ask(lambda store: store.set(key, msgspec.json.encode(offer).decode()))

    def _look(self, client: StoreClient, asked: wire.FindMeeting, offers_until: float) -> wire.MeetingFound | None:
        """Return what is in the store; None if nothing is there yet."""
        identity = self._identify()
        if identity is None:
            return None
        key = _name_word(identity)
        # A store that outlives the ranks has the key already, with the addresses of the daemons of an earlier attempt.
        if (word := _read(client, key)) is not None or identity.rank != 0:
            return word
        offered = _read_offer(client, _name_offer(identity)) if _has_second(asked) else ""
        if offered is None and time.monotonic() < offers_until:
            return None
        address = _choose_address(client, asked)
        second = offered if offered and offered != address else ""
        word = wire.MeetingFound(nodes=asked.nodes, address=address, second=second, secret=asked.secret)
        client.ask(lambda store: store.compare_set(key, "", msgspec.json.encode(word).decode()))
        return _read(client, key)


def _has_second(asked: wire.FindMeeting) -> bool:
    """Whether node 1 may take over: its daemon, of this version, would listen."""
    return asked.offers and asked.nodes >= LEAST_NODES


def _name_word(identity: wire.Identity) -> str:
    return f"sentinel/meeting/{identity.run_id}"


def _name_offer(identity: wire.Identity) -> str:
    return f"{_name_word(identity)}/offer"


def _choose_address(client: StoreClient, asked: wire.FindMeeting) -> str:
    """Return where this node's daemon listens already, else where it can."""
    if asked.address:
        return asked.address
    host = find_own_address(client.host, client.port)
    return f"{f'[{host}]' if ':' in host else host}:{asked.port or find_free_port(host)}"


def _read_offer(client: StoreClient, key: str) -> str | None:
    """Return node 1's address; None if it offered none, or if another program wrote some other text."""
    try:
        offer = _read(client, key)
        is_address = offer is not None and split_addresses(offer.address, key) == (offer.address,)
    except ValueError:  # includes msgspec.DecodeError
        return None
    return offer.address if offer is not None and is_address else None


def _read(client: StoreClient, key: str) -> wire.MeetingFound | None:
    """Return the value of a key; None if it is not set. Raises msgspec.DecodeError if another program wrote it."""
    if not client.ask(lambda store: store.check([key])):
        return None
    return msgspec.json.decode(client.ask(lambda store: store.get(key))[:_MOST_BYTES], type=wire.MeetingFound)
