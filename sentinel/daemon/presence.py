"""Says where a daemon serves: a state file beside its socket, and a target for Prometheus' file-based discovery.

    <directory>/daemon.json                   pid, version, socket, address and token of HTTP; mode 0600
    <file_sd>/sentinel-<name>-<pid>.json      [{"targets": ["127.0.0.1:9477"]}]; mode 0644, for Prometheus' own user

`file_sd` is `[daemon] file_sd`, else `<state>/prometheus`. In prometheus.yml:

    file_sd_configs: [{files: ["<file_sd>/sentinel-*.json"]}]

Both go with the daemon. What a killed daemon left there, the next one on the node takes away.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from pathlib import Path

from sentinel import __version__, places
from sentinel.errors import ConfigError

log = logging.getLogger(__name__)

STATE_FILE = "daemon.json"


class Presence:
    """What a daemon leaves on the node while it serves."""

    def __init__(self, directory: Path, file_sd: Path | None) -> None:
        self.token = secrets.token_urlsafe(24)
        self._directory, self._file_sd = directory, file_sd
        self._files: list[Path] = []

    def announce(self, http: str) -> None:
        """Write both files. `http`: host and port; empty where HTTP is off. What cannot be written is logged."""
        state = {
            "pid": os.getpid(),
            "version": __version__,
            "socket": str(self._directory / places.SOCKET),
            "http": f"http://{http}" if http else "",
            "token": self.token,
        }
        self._write(self._directory / STATE_FILE, state, 0o600)
        if not http:
            return
        try:
            folder = self._file_sd or places.state_directory() / "prometheus"
        except ConfigError as error:
            log.warning("Prometheus cannot discover this daemon: %s", error)
            return
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s: cannot be made (%s)", folder, error.strerror)
            return
        _sweep(folder)
        self._write(folder / f"sentinel-{self._directory.name}-{os.getpid()}.json", [{"targets": [http]}], 0o644)

    def withdraw(self) -> None:
        """Take the files away."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def _write(self, path: Path, content: object, mode: int) -> None:
        """Whole or not at all: Prometheus watches the folder and reads what it finds."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, mode)
                json.dump(content, file, indent=2)
            draft.replace(path)
        except OSError as error:
            log.warning("%s: cannot be written (%s)", path, error.strerror)
            return
        self._files.append(path)


def _sweep(folder: Path) -> None:
    """Take away the targets of daemons that were killed: their process is gone."""
    for path in folder.glob("sentinel-*.json"):
        pid = re.search(r"-(\d+)\.json$", path.name)
        if pid is not None and not _alive(int(pid[1])):
            try:
                path.unlink()
            except OSError:  # somebody else's
                pass


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
