"""A second connection to the process group's store: torch's own is the user's, and busy while a rank waits in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sentinel.errors import ConfigError
from sentinel.hooks.core.identity import group_store
from sentinel.hooks.core.threads import start_thread

CONNECT_SECONDS = 5.0
STORE_SECONDS = 20.0
"""Seconds that the store may take to answer: where packets are dropped, torch itself would wait for minutes."""
_WORDS = 200


class StoreLost(Exception):
    """The store gave no answer in time, or is gone. The request may have been carried out."""


class StoreClient:
    """Client of the default process group's store, which ranks on all nodes can reach."""

    def __init__(self) -> None:
        """Raises ConfigError where the store is not a TCPStore, StoreLost where it cannot be reached."""
        import torch.distributed

        dist: Any = torch.distributed
        store = group_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore):
            raise ConfigError(f"the process group's store is a {type(store).__name__}, and must be a TCPStore")
        self.host, self.port = store.host, store.port
        limit = timedelta(seconds=CONNECT_SECONDS)
        try:
            self._store = call_in_time(
                lambda: dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)
            )
        except StoreLost as error:
            raise StoreLost(f"{error}, at {self.host}:{self.port}") from None

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Return what `question` returns, called with the connection, within `STORE_SECONDS`. Raises StoreLost."""
        return call_in_time(lambda: question(self._store))


def call_in_time(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, within `STORE_SECONDS`. Raises StoreLost; then the call may still be under way."""
    answers: list[Any] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, name="sentinel-store", daemon=True)
    try:
        start_thread(thread)
        thread.join(STORE_SECONDS)
    except (RuntimeError, MemoryError) as fault:
        faults.append(fault)
    if answers:
        return answers[0]
    why = str(faults[0]).partition("\n")[0] if faults else f"no answer in {STORE_SECONDS:g} s"
    raise StoreLost(f"the process group's store is lost ({why[:_WORDS]})")
