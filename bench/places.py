"""Gives runs that a bench starts folders of their own, so that none of the user's data is read or changed."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

END_SECONDS = 60.0
"""Longest time to wait for the end of a daemon."""
ANY_PORT = "[daemon]\nhttp = 0\n"
"""Settings by which a daemon serves HTTP on any free port."""


def make_places(folder: Path, settings: str = "") -> dict[str, str]:
    """Return the environment variables that put sockets, histories and settings into `folder`."""
    (folder / "sentinel.toml").write_text(settings)
    return {
        "SENTINEL_RUNTIME": f"{folder}/run",
        "SENTINEL_STATE": f"{folder}/state",
        "SENTINEL_CONFIG": f"{folder}/sentinel.toml",
        "OMP_NUM_THREADS": "1",
    }


def list_incidents(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Return the incidents of the runs in these places, as `sentinel incidents --json` prints them.

    Waits until the daemon has judged the last steps and ended, as it does after its last run.
    """
    deadline = time.monotonic() + END_SECONDS
    while find_daemon(Path(environment["SENTINEL_RUNTIME"])) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    command = [sys.executable, "-m", "sentinel", "incidents", "--json"]
    incidents: list[dict[str, Any]] = json.loads(
        subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    )
    return incidents


def find_daemon(runtime: Path) -> int | None:
    """Return the pid of the daemon that serves in this runtime folder; None: there is none."""
    for path in runtime.glob("*/sentinel.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return None


def kill_daemon(runtime: Path) -> bool:
    """Send SIGKILL to the daemon that serves in this runtime folder; return whether there was one."""
    daemon = find_daemon(runtime)
    try:
        if daemon is not None:
            os.kill(daemon, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return daemon is not None
