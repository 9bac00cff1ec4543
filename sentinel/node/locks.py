"""Find which processes use a run's directory, by locks, which the kernel releases when a process is killed.

    daemon.lock    the daemon that serves there, which shares a lock on the directory, too
    run.lock       shared by the ranks that it serves
    start.lock     the rank that is starting it
    rollback-*     what the ranks of a run agreed on (hooks/rollback/agreement.py): links that point nowhere
    early-*        the record of a rank that ended before the daemon served (sentinel/daemon/ingest/early_records.py)

A directory of Sentinel in which no process holds any of these locks is a leftover. The next daemon removes it, wherever
it lies under the runtime root; only files that Sentinel put there are ever removed, and the directory only if it is
empty then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from sentinel.node import paths

DAEMON, RUN, START = "daemon.lock", "run.lock", "start.lock"
OURS = frozenset({paths.SOCKET, paths.LOG, paths.STATE, DAEMON, RUN, START})
AGREEMENT, EARLY = "rollback-", "early-"
"""Together with `OURS`, all that a directory may contain that is swept: beginnings of names."""


def hold(directory: Path, name: str, *, shared: bool = False) -> int | None:
    """Take a lock, without waiting; return the descriptor that holds it until it is closed. None: another process has
    it.

    Raises OSError where it cannot be created.
    """
    path = directory / name
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if is_at(lock, path):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # removed between the open and the lock: it locks nothing


def live(directory: Path) -> tuple[int, int] | None:
    """Take the daemon's lock, and one on the directory; return both descriptors. None: another daemon runs there.

    systemd-tmpfiles does not touch the content of a locked directory, and would otherwise remove the locks of a run of
    ten days (systemd.io/TEMPORARY_DIRECTORIES). Raises OSError where the locks cannot be created.
    """
    lock = hold(directory, DAEMON)
    if lock is None:
        return None
    shelter = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks has no systemd-tmpfiles either
        fcntl.flock(shelter, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock, shelter


def clear(directory: Path) -> bool:
    """Remove Sentinel's files in an unused directory, and the directory. Returns False if it is in use, or may be."""
    if not _is_leftover(directory):
        return False
    locks: list[int] = []
    try:
        locks.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        fcntl.flock(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in (START, RUN, DAEMON):
            lock = hold(directory, name)
            if lock is None:
                return False
            locks.append(lock)
        remove(directory)
        return True
    except OSError:
        return False
    finally:
        for lock in locks:
            os.close(lock)


def remove(directory: Path, *, whole: bool = True) -> None:
    """Remove Sentinel's files in a directory, in use or not; and the directory, if that was all. Not `whole`: only the
    files by which a daemon is found. What cannot be removed stays: a run must not lose its history because of it."""
    with contextlib.suppress(OSError):
        for name in filter(_is_ours, os.listdir(directory)) if whole else (paths.SOCKET, DAEMON):
            (directory / name).unlink(missing_ok=True)
        if whole:
            directory.rmdir()


def sweep(root: Path) -> list[Path]:
    """Clear the leftovers under `root`. Returns them."""
    try:
        found = [entry for entry in root.iterdir() if not entry.is_symlink() and entry.is_dir()]
    except OSError:
        return []
    return [directory for directory in found if clear(directory)]


def _is_leftover(directory: Path) -> bool:
    """Return whether it may be a leftover: the user's, private, and with nothing in it but what Sentinel creates."""
    try:
        status, names = directory.lstat(), set(os.listdir(directory))
    except OSError:
        return False
    private = status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
    return private and bool(names) and all(map(_is_ours, names))


def _is_ours(name: str) -> bool:
    # A draft of a state file is left where its writer was killed.
    return name in OURS or name.startswith((f".{paths.STATE}.", AGREEMENT, EARLY, f".{EARLY}"))


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at this path now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
