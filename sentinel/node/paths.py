"""Paths on a node: sockets, the daemon's log, the history.

    SENTINEL_ADDRESS=unix:/path            takes precedence
    /run/sentinel/sentinel.sock            a node's service, root-owned, open to all, runs apart by peer uid
    /tmp/sentinel-$UID/<run id>/           the daemon that `attach` started: sentinel.sock, daemon.log, daemon.json

    $SENTINEL_STATE, $XDG_STATE_HOME/sentinel, ~/.local/state/sentinel, /var/tmp/sentinel-$UID
                                           the first that can be used holds runs/<run id>.sqlite
    $SENTINEL_STATE, /var/lib/sentinel     a service's: <uid>/runs/<run id>.sqlite

A directory of Sentinel has mode 0700 and belongs to the user, checked with lstat: in /tmp another user may have created
it first.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sentinel.errors import ConfigError

SERVICE_SOCKET = Path("/run/sentinel/sentinel.sock")
SOCKET = "sentinel.sock"
LOG = "daemon.log"
STATE = "daemon.json"
SUN_PATH = 107
"""Bytes that a Unix socket's path may have on Linux: sockaddr_un.sun_path, less the final NUL (unix(7))."""

_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.glusterfs",
        "fuse.juicefs", "fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre",
        "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip
"""Names as in /proc/mounts. Other FUSE file systems are local, such as those of rootless containers."""


def runtime_root() -> Path:
    """Return `$SENTINEL_RUNTIME`, or `/tmp/sentinel-$UID`. Not XDG_RUNTIME_DIR: it is unset in containers and under
    Slurm, and logind deletes it when the last session ends, while the run still goes on."""
    return Path(os.environ.get("SENTINEL_RUNTIME") or f"/tmp/sentinel-{os.getuid()}")


def run_directory(run_id: str) -> Path:
    """Return where the daemon of one run keeps its socket and its log. `private_directory` creates and checks it."""
    return runtime_root() / run_id


def address() -> Path | None:
    """Return the existing socket to use: the one named, or a node service's. None: start a daemon.

    Raises ConfigError where SENTINEL_ADDRESS is not a `unix:` path.
    """
    named = os.environ.get("SENTINEL_ADDRESS")
    if named:
        return unix_path(named, f"SENTINEL_ADDRESS={named}")
    try:
        if SERVICE_SOCKET.parent.lstat().st_uid == 0 and stat.S_ISSOCK(SERVICE_SOCKET.lstat().st_mode):
            return SERVICE_SOCKET
    except OSError:
        pass
    return None


def unix_path(named: str, written: str) -> Path:
    """Return the path in `unix:/path` or `/path`. Raises ConfigError, which begins with how it was `written`."""
    scheme, _, path = named.rpartition(":")
    if scheme not in ("", "unix") or not path.startswith("/"):
        raise ConfigError(f"{written}: expected unix:/path/to/the/socket")
    return Path(path)


def private_directory(path: Path) -> Path:
    """Make `path` (and its parent, if that is `runtime_root`) with mode 0700, or check that it is private and the
    user's.

    A directory open to others is closed to them only while it is empty: `--directory /` is a mistake, and is not
    obeyed. Raises ConfigError, with the fix, if it cannot be made, is a link, is in use, or belongs to another user.
    """
    root = runtime_root()
    for directory in [root, path] if root in path.parents else [path]:
        try:
            directory.mkdir(mode=0o700, exist_ok=True, parents=directory is path)
            status = directory.lstat()
        except OSError as error:
            raise ConfigError(
                f"{directory}: cannot make the directory for the daemon's socket ({error.strerror}); "
                "set SENTINEL_RUNTIME to a directory that you may write to"
            ) from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{directory}: is no directory; remove it, or set SENTINEL_RUNTIME to another one")
        if status.st_uid != os.getuid():
            raise ConfigError(
                f"{directory}: belongs to user {status.st_uid}, not to you ({os.getuid()}), and is not used; "
                "set SENTINEL_RUNTIME to a directory of your own"
            )
        if status.st_mode & 0o077:
            restrict(directory, 0o700)
    return path


def restrict(directory: Path, mode: int) -> None:
    """Give an empty directory this mode. Raises ConfigError where it has another mode and is in use."""
    occupied = any(directory.iterdir())
    if occupied and stat.S_IMODE(directory.lstat().st_mode) != mode:  # otherwise another process was quicker
        raise ConfigError(
            f"{directory}: is open to other users and not empty; its mode is left alone, and it is not used; "
            f"name another directory, or chmod {mode:o} it yourself"
        )
    directory.chmod(mode)


def socket_path(directory: Path) -> Path:
    """Return the socket in a run's directory. Raises ConfigError where the path is too long for a Unix socket."""
    path = directory / SOCKET
    if len(os.fsencode(path)) > SUN_PATH:
        raise ConfigError(
            f"{path}: {len(os.fsencode(path))} bytes, a Unix socket's path has at most {SUN_PATH}; "
            "set SENTINEL_RUNTIME to a shorter one"
        )
    return path


def live_sockets() -> Iterator[Path]:
    """Yield every socket that a daemon of the user or the node may be serving, the newest first."""
    if named := address():
        yield named
    try:
        found = list(runtime_root().glob(f"*/{SOCKET}"))
    except OSError:
        return
    yield from sorted(found, key=_read_mtime, reverse=True)


def state_directory() -> Path:
    """Return where history is kept: the first place that can be written and is local to the node.

    SQLite's write-ahead log needs shared memory, which network file systems do not give (sqlite.org/wal.html). Raises
    ConfigError where no such place is left.
    """
    tried = []
    for place in state_places():
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            tried.append(f"{place} ({error.strerror})")
            continue
        if not os.access(place, os.W_OK):
            tried.append(f"{place} (not writable)")
        elif (kind := file_system(place)) in _NETWORK_FILE_SYSTEMS:
            tried.append(f"{place} ({kind} is a network file system)")
        else:
            return place
    raise ConfigError("no place for the history: " + ", ".join(tried) + "; set SENTINEL_STATE to a local directory")


def service_state() -> Path:
    """Return where a node's service keeps the histories of all users, by uid: `$SENTINEL_STATE`, or /var/lib/sentinel.

    Raises ConfigError where it cannot be used.
    """
    place = service_place()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"no place for the histories: {place} ({error.strerror}); set SENTINEL_STATE") from None
    if (kind := file_system(place)) in _NETWORK_FILE_SYSTEMS:
        raise ConfigError(f"no place for the histories: {place}: {kind} is a network file system; set SENTINEL_STATE")
    return place


def service_place() -> Path:
    """Return where a node's service keeps what it knows, by uid; it may not exist yet."""
    return Path(os.environ.get("SENTINEL_STATE") or "/var/lib/sentinel")


def histories() -> list[Path]:
    """Return the existing history files, in every place that may hold one, the newest first."""
    found = {path for place in state_places() for path in place.glob("runs/*.sqlite")}
    return sorted(found, key=_read_mtime, reverse=True)


def history_folders() -> list[Path]:
    """Return the folders of histories: the user's own, and for root those of a node's service too."""
    own = {path.parent for path in histories()}
    return sorted({*own, *service_place().glob("*/runs"), *(place / "runs" for place in state_places())})


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, by /proc/self/mounts; empty where that is not known."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_bytes().splitlines()]
    except OSError:
        return ""
    resolved = path.resolve()
    best, kind = -1, ""
    for point, name in mounts:
        # Spaces and the like are octal (fstab(5)); the rest is bytes, in whatever encoding.
        where = Path(os.fsdecode(point.decode("unicode_escape").encode("latin-1")))
        if (where == resolved or where in resolved.parents) and len(where.parts) >= best:
            best, kind = len(where.parts), name.decode()
    return kind


def state_places() -> list[Path]:
    """Return where histories may be; the first place that can be used is taken."""
    named = os.environ.get("SENTINEL_STATE")
    if named:
        return [Path(named)]
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    found = [Path(home) / "sentinel", Path(f"/var/tmp/sentinel-{os.getuid()}")]
    return [place for place in found if place.is_absolute()]  # a container's user may have no home: `~` stays as it is


def _read_mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
