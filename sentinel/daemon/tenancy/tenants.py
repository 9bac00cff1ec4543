"""Which user owns a run. A node's service serves all users of the node, each of whom has access to their own runs only.

The kernel says which user is at the other end of a connection. Any other daemon serves its own user, and root.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from sentinel import wire
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.errors import ConfigError, ProtocolError
from sentinel.node import paths
from sentinel.store import History

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""A valid run id, as in `wire.Identity`. It becomes the name of a file."""


class Tenants:
    """The users of one daemon and their live runs."""

    def __init__(self, *, service: bool) -> None:
        self._service = service
        self._owners: dict[str, int] = {}
        """User ids by run id."""

    def admit_rank(self, hello: wire.Hello, uid: int) -> wire.Hello:
        """Return the hello of a rank of this user, with the id that its run has here.

        Ids may be easy to guess, as a scheduler's are: a user who takes another user's id must neither reach that run
        nor block it. The later of the two is called `ID.UID`, which cannot be chosen as a run id. Raises ProtocolError
        if the id is not valid.
        """
        run_id = hello.identity.run_id
        if not _RUN_ID.fullmatch(run_id):
            raise ProtocolError(f"run id {run_id[:80]!r}: expected 1 to 40 letters, digits, - or _")
        if not self._service:
            return hello
        apart = f"{run_id}.{uid}"
        known = self._owners.get(apart) == uid or self._is_kept(apart, uid)
        if not known and self._owners.setdefault(run_id, uid) == uid:
            return hello
        self._owners[apart] = uid
        return msgspec.structs.replace(hello, identity=msgspec.structs.replace(hello.identity, run_id=apart))

    def owner(self, run_id: str) -> int | None:
        """Return the user id of a run's owner; None if the daemon serves one user, or does not know the run."""
        return self._owners.get(run_id)

    def uid(self, run_id: str) -> int:
        """Return the user id of a run's owner; our own if the daemon serves one user."""
        return self._owners.get(run_id, os.getuid())

    def leave(self, run_id: str) -> None:
        """Release the id of a run that is over."""
        self._owners.pop(run_id, None)

    def visible(self, watches: Iterable[WatchedRun], uid: int) -> list[WatchedRun]:
        """Return the runs that this user may see."""
        if not self._service or uid == 0:
            return list(watches)
        return [watch for watch in watches if self._owners.get(watch.run.run_id) == uid]

    def history(self, run_id: str) -> Path:
        """Return the path of a run's history. Raises ConfigError if there is no place for it."""
        if not self._service:
            return paths.state_directory() / "runs" / f"{run_id}.sqlite"
        return self._file(run_id, self._owners[run_id])

    def _is_kept(self, run_id: str, uid: int) -> bool:
        """Whether an earlier daemon stored this run of the user."""
        try:
            return self._file(run_id, uid).exists()
        except ConfigError:
            return False

    def _file(self, run_id: str, uid: int) -> Path:
        return paths.service_state() / str(uid) / "runs" / f"{run_id}.sqlite"

    def folders(self) -> list[Path]:
        """Return the folders of the histories, one per user; none if there is no place for them."""
        try:
            if self._service:
                return sorted(paths.service_state().glob("*/runs"))
            return [paths.state_directory() / "runs"]
        except ConfigError:
            return []

    def list_ended_incidents(self, uid: int, live: Collection[str]) -> list[dict[str, Any]]:
        """Return the incidents of a user's runs that are over, from histories that only a service can read.

        Reads files. Root gets those of all users. `live`: ids of runs that are not over.
        """
        if not self._service:
            return []
        found: list[dict[str, Any]] = []
        for path in sorted(paths.service_state().glob(f"{'*' if uid == 0 else uid}/runs/*.sqlite")):
            if path.stem not in live:
                try:
                    with History(path) as history:
                        found += history.final_incidents()
                except ConfigError:
                    continue  # a damaged history is left out; the others are listed
        return found


def service_directory(directory: Path) -> Path:
    """Make the directory of a service's socket, or check that it is root's; let only root write in it.

    Raises ConfigError with the fix.
    """
    if os.getuid() != 0:
        raise ConfigError("--service serves all users of this node, who trust root alone: start it as root")
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"{directory}: cannot make the directory for the service ({error.strerror})") from None
    if directory.is_symlink() or not directory.is_dir() or status.st_uid != 0:
        raise ConfigError(f"{directory}: is no directory of root's; remove it, or use another --directory")
    if stat.S_IMODE(status.st_mode) != 0o755:
        paths.restrict(directory, 0o755)
    return directory
