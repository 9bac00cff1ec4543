"""Says where a daemon serves: a state file beside its socket, and a target for Prometheus' file-based discovery.

    <directory>/daemon.json                   pid, version, socket, address and token of HTTP; mode 0600
    <file_sd>/sentinel-<name>-<hex>.json      [{"targets": ["127.0.0.1:9477"]}]; mode 0644, for Prometheus' own user

`file_sd` is `[daemon] file_sd`, else `<state>/prometheus`. In prometheus.yml:

    file_sd_configs: [{files: ["<file_sd>/sentinel-*.json"]}]

The daemon removes both when it exits, and holds a lock on each while it lives. The kernel releases the locks of a
killed daemon: a target without a lock is a leftover, which the next daemon removes. A pid would not show that: it is
reused, and in the next container it belongs to another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
from pathlib import Path

from sentinel._version import __version__
from sentinel.errors import ConfigError
from sentinel.node import locks, paths

log = logging.getLogger(__name__)


class Presence:
    """The files by which a daemon is found while it serves."""

    def __init__(self, directory: Path, file_sd: Path | None) -> None:
        self.token = secrets.token_urlsafe(24)
        self._directory, self._file_sd = directory, file_sd
        self._left: list[tuple[Path, int]] = []
        """Each file, and the descriptor that holds its lock."""
        self._over = False

    def announce(self, http: str) -> None:
        """Write both files. `http`: host and port; empty where HTTP is off. What cannot be written is logged."""
        if self._over:
            return  # the run was shorter than the start of HTTP
        state = {
            "pid": os.getpid(),
            "version": __version__,
            "socket": str(self._directory / paths.SOCKET),
            "http": f"http://{http}" if http else "",
            "token": self.token,
        }
        self._write(self._directory / paths.STATE, state, 0o600)
        if not http:
            return
        try:
            folder = self._file_sd or paths.state_directory() / "prometheus"
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except (ConfigError, OSError) as error:
            log.warning("Prometheus cannot discover this daemon: %s", error)
            return
        _sweep(folder)
        name = f"sentinel-{self._directory.name}-{secrets.token_hex(4)}.json"
        self._write(folder / name, [{"targets": [http]}], 0o644)

    def withdraw(self) -> None:
        """Remove those files that are still ours: the next daemon of the run may have written its own."""
        self._over = True
        while self._left:
            path, descriptor = self._left.pop()
            with contextlib.suppress(OSError):
                if locks.is_at(descriptor, path):
                    path.unlink()
            os.close(descriptor)

    def _write(self, path: Path, content: object, mode: int) -> None:
        """Write a file whole or not at all: Prometheus watches the folder and reads what it finds."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            self._left.append((path, descriptor))
            with contextlib.suppress(OSError):  # a file system without locks: leftovers are not removed there
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, mode)
            os.write(descriptor, json.dumps(content, indent=2).encode())
            draft.replace(path)
        except OSError as error:
            log.warning("%s: cannot be written (%s)", path, error.strerror)
            draft.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove the targets of daemons that were killed."""
    for path in folder.glob("sentinel-*.json"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if locks.is_at(descriptor, path):
                path.unlink()
        except OSError:
            pass  # its daemon lives, or it belongs to another user
        finally:
            os.close(descriptor)
