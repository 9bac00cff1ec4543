"""The host's numbers, by psutil: what a training process shares with its neighbours."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil

from sentinel.collect import Reading

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 writes its largest number, v2 the word `max`, where there is no limit."""


class Host:
    """This node. psutil's CPU share is that since the call before: the first reading has none."""

    def __init__(self, cgroup: Path = _CGROUP) -> None:
        self.name = socket.gethostname()
        self._cgroup = cgroup
        psutil.cpu_percent()
        self._primed = False

    def read(self) -> Reading:
        """All of it, in about a millisecond."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        values = {
            "host_memory_available_bytes": float(memory.available),
            "host_memory_total_bytes": float(memory.total),
            "host_swap_used_bytes": float(swap.used),
            "host_load_ratio": psutil.getloadavg()[0] / (psutil.cpu_count() or 1),
        }
        share = psutil.cpu_percent() / 100
        if self._primed:
            values["host_cpu_ratio"] = share
        self._primed = True
        return Reading(self.name, time.time(), values | self._container())

    def _container(self) -> dict[str, float]:
        """Memory of the container, where one is set a limit: its OOM killer knows no other."""
        for used, limit in (
            ("memory.current", "memory.max"),
            ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes"),
        ):
            bound = _number(self._cgroup / limit)
            if bound is not None and bound < _UNLIMITED:
                held = _number(self._cgroup / used)
                found = {"container_memory_limit_bytes": bound}
                return found if held is None else found | {"container_memory_used_bytes": held}
        return {}


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
