"""Where the daemons of a job's nodes meet, in one key of the process group's store: rank 0 writes it, the first rank of
each other node reads it. In a thread of its own, so that no loop and no heartbeat waits for it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.hooks.core.identity import group_store
from sentinel.hooks.core.network_address import find_free_port, find_own_address
from sentinel.hooks.core.store_client import StoreClient, StoreLost
from sentinel.hooks.core.worker import Task, Worker

FIND_SECONDS = 300.0
"""How long a process group, and rank 0's word, are waited for."""
LOOK_SECONDS = 1.0
LOST_SECONDS = 20.0
"""Between two connections to a store that gives no answer."""
_MOST_BYTES = 4096
_WORDS = 500


class MeetingFinder:
    """Of one run, in one process."""

    def __init__(self, identify: Callable[[], wire.Identity | None], send: Callable[[wire.Message], None]) -> None:
        """`send` is called in the finder's thread."""
        self._identify, self._send = identify, send
        self._worker = Worker("sentinel-meeting", finishes=True)
        self._task: Task | None = None
        self._closed = threading.Event()

    def find(self, asked: wire.FindMeeting) -> None:
        """Send a `MeetingFound` once it is known where, or that it will not be."""
        if self._task is None or self._task.over:
            self._task = self._worker.submit(functools.partial(self._find, asked))

    def close(self) -> None:
        """The run is over: stop looking."""
        self._closed.set()

    def _find(self, asked: wire.FindMeeting) -> None:
        until = time.monotonic() + FIND_SECONDS
        client: StoreClient | None = None
        reason, pause = "there is no process group", LOOK_SECONDS
        while not self._closed.is_set():
            try:
                if client is None and group_store() is not None:
                    client = StoreClient()
                found = self._look(client, asked) if client is not None else None
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

    def _look(self, client: StoreClient, asked: wire.FindMeeting) -> wire.MeetingFound | None:
        """What is in the store; None: nothing yet."""
        identity = self._identify()
        if identity is None:
            return None
        key = f"sentinel/meeting/{identity.run_id}"
        if identity.rank == 0:
            address = asked.address or _choose_address(client, asked.port)
            word = wire.MeetingFound(nodes=asked.nodes, address=address, secret=asked.secret)
            # A store that outlives the ranks has it already, with where the daemon of an earlier attempt listens.
            written = client.ask(lambda store: store.compare_set(key, "", msgspec.json.encode(word).decode()))
        elif client.ask(lambda store: store.check([key])):
            written = client.ask(lambda store: store.get(key))
        else:
            return None
        return _read(written)


def _choose_address(client: StoreClient, port: int) -> str:
    host = find_own_address(client.host, client.port)
    return f"{f'[{host}]' if ':' in host else host}:{port or find_free_port(host)}"


def _read(written: Any) -> wire.MeetingFound:
    """Raises msgspec.DecodeError: it was written by another program."""
    return msgspec.json.decode(bytes(written)[:_MOST_BYTES], type=wire.MeetingFound)
