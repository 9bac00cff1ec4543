"""Opens the history of a run that is new to a daemon: a new file, or one written by another daemon."""

from __future__ import annotations

import logging
from typing import NamedTuple

from sentinel import wire
from sentinel.cluster.protocol.job_extent import count_nodes
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.errors import ConfigError, DamageError
from sentinel.runs import Run
from sentinel.store import History, Store, is_blank

log = logging.getLogger(__name__)

PUT_OFF_SECONDS = 60.0
"""Seconds for which a run whose history exists but cannot be read at the moment is asked to come back. If the run began
without it, its attempts and incidents would replace those in the file."""


class Opened(NamedTuple):
    """The history of a run."""

    store: Store | None
    begins: int = 0
    """Number of the attempt that begins, unless one of a former daemon goes on."""
    resumable: bool = False
    """Whether an attempt of a former daemon may go on."""
    why_not: str = ""
    """Why there is no store; empty if there is one."""


class Histories:
    """Opens histories, and remembers which could not be read yet."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._put_off: dict[str, float] = {}
        """Since when runs are put off, in monotonic seconds, by run id."""

    def open(self, run: Run, identity: wire.Identity, now: float) -> Opened | None:
        """Open the history of a run; None: it cannot be read now, and the run must come back. `identity`: that of any
        rank of this node."""
        node = identity.node if count_nodes(identity) > 1 else None
        try:
            path = self._tenants.history(run.run_id)
            store = Store(path, run=run.name, run_id=run.run_id, node=node, hostname=identity.hostname)
        except ConfigError as error:
            log.error("%s", error)
            return Opened(None, why_not=str(error))
        try:
            last = _last_attempt(store)
        except DamageError as error:
            store.replace_damaged(str(error))
            return Opened(store, begins=1)  # the ranks may know incidents of attempt 0
        except (ConfigError, OSError) as error:  # locked, or no descriptor is left
            store.close(0.0)
            if now - self._put_off.setdefault(run.run_id, now) < PUT_OFF_SECONDS:
                log.warning("run %s is put off: %s", run.name, error)
                return None
            log.error("run %s: no history is kept: %s", run.name, error)
            return Opened(None, why_not=f"no history is kept: {error}")
        self._put_off.pop(run.run_id, None)
        return Opened(store, begins=last + 1, resumable=last >= 0)


def _last_attempt(store: Store) -> int:
    """Return the number of the last attempt in the file; -1 if there is none.

    It does not wait for a lock: every run of the node would wait with it, and the run comes back.
    Raises ConfigError if the file cannot be read, OSError if it is unknown whether it exists.
    """
    try:
        if not store.is_open and (store.path.stat().st_size == 0 or is_blank(store.path, patience=0.0)):
            return -1
    except FileNotFoundError:
        return -1
    with History(store.path, patience=0.0) as history:
        attempts = history.attempts()
    return attempts[-1][0] if attempts else -1
