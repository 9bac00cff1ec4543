"""Runs that a bench starts: in places of their own, so that nothing of the user's is read or changed."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

ANY_PORT = "[daemon]\nhttp = 0\n"
"""Settings of a daemon that takes no port from another."""


def make_places(folder: Path, settings: str = "") -> dict[str, str]:
    """Variables of the environment by which sockets, histories and settings lie in `folder`."""
    (folder / "sentinel.toml").write_text(settings)
    return {
        "SENTINEL_RUNTIME": f"{folder}/run",
        "SENTINEL_STATE": f"{folder}/state",
        "SENTINEL_CONFIG": f"{folder}/sentinel.toml",
        "OMP_NUM_THREADS": "1",
    }


def list_incidents(environment: dict[str, str]) -> list[dict[str, Any]]:
    """What went wrong in the runs of these places."""
    command = [sys.executable, "-m", "sentinel", "incidents", "--json"]
    incidents: list[dict[str, Any]] = json.loads(
        subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    )
    return incidents


def find_daemon(runtime: Path) -> int | None:
    """The process that serves there."""
    for path in runtime.glob("*/sentinel.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return None


def kill_daemon(runtime: Path) -> bool:
    """SIGKILL to the process that serves there; whether there was one."""
    daemon = find_daemon(runtime)
    try:
        if daemon is not None:
            os.kill(daemon, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return daemon is not None
