"""Delete old histories: they are bounded in age and in size. A run is one file, so it is deleted by unlink.

A history that is open, or was written in the last hour, stays: a killed daemon that is started again goes on with it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sentinel.node import paths
from sentinel.store.layout import is_damage

YOUNG_SECONDS = 3600.0
SIDES = ("", "-wal", "-shm", "-journal")
"""Suffixes of a database and of the files that SQLite keeps beside it (sqlite.org/tempfiles.html)."""
PATTERNS = ("*.sqlite", "*.sqlite.damaged-*")

_DISK_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_WRITE)
"""Errors of SQLite on a full disk. It writes here only when no other process has the history open."""


class StoredHistory(msgspec.Struct, frozen=True):
    """One history on the disk."""

    path: Path
    bytes: int
    """Bytes, including the files beside it."""
    modified: float
    """Unix seconds."""


class Doomed(msgspec.Struct, frozen=True):
    """A history that is over a limit, and which limit."""

    kept: StoredHistory
    why: str


def list_histories(folder: Path) -> list[StoredHistory]:
    """Return the histories in a folder, including damaged ones that were moved aside, the oldest first."""
    found = [
        _measure_file(path)
        for pattern in PATTERNS
        for path in folder.glob(pattern)
        if not path.name.endswith(SIDES[1:])
    ]
    return sorted((one for one in found if one is not None), key=lambda one: one.modified)


def list_kept() -> list[StoredHistory]:
    """Return all histories of this node that can be listed, in order of their last write."""
    found = [one for folder in paths.history_folders() for one in list_histories(folder)]
    return sorted(found, key=lambda one: one.modified)


def list_doomed(
    histories: Iterable[StoredHistory], *, max_age: float, max_bytes: float, now: float | None = None
) -> list[Doomed]:
    """Return the histories older than `max_age` seconds, and the oldest of the rest that must go so that at most
    `max_bytes` remain."""
    now = time.time() if now is None else now
    found, rest = list[Doomed](), list[StoredHistory]()
    for one in sorted(histories, key=lambda one: one.modified):
        if now - one.modified > max_age:
            found.append(Doomed(one, "age"))
        else:
            rest.append(one)
    total = sum(one.bytes for one in rest)
    for one in rest:
        if total <= max_bytes or now - one.modified < YOUNG_SECONDS:
            break
        found.append(Doomed(one, "size"))
        total -= one.bytes
    return found


def remove(path: Path) -> bool:
    """Delete a history and its write-ahead files; return False if it is open, or cannot be deleted."""
    if in_use(path):
        return False
    try:
        for side in SIDES:
            Path(f"{path}{side}").unlink(missing_ok=True)
    except OSError:
        return False
    return True


def prune(folder: Path, *, max_age: float, max_bytes: float) -> list[Doomed]:
    """Delete what is over the limits in a folder; return what was deleted."""
    over = list_doomed(list_histories(folder), max_age=max_age, max_bytes=max_bytes)
    return [one for one in over if remove(one.kept.path)]


def in_use(path: Path) -> bool:
    """Return whether a daemon or a reader has a history open, or may have: if it cannot be opened, it counts as in use.
    Only a process that alone has it open can fold a write-ahead log into its file."""
    try:
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=0)) as database:
            ((mode,),) = database.execute("PRAGMA journal_mode=DELETE").fetchall()
            return bool(mode != "delete")
    except sqlite3.DatabaseError as error:
        return not is_damage(error) and error.sqlite_errorcode not in _DISK_FULL


def _measure_file(path: Path) -> StoredHistory | None:
    try:
        beside = [found.stat() for side in SIDES if (found := Path(f"{path}{side}")).exists()]
        return StoredHistory(path, sum(status.st_size for status in beside), max(status.st_mtime for status in beside))
    except (OSError, ValueError):
        return None  # deleted meanwhile
