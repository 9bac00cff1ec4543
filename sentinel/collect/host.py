"""Read the host's numbers by psutil: what a training process shares with its neighbours."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil

from sentinel.collect import Reading

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Least limit that counts as none: where there is none, cgroup v1 writes its largest number, and v2 the word `max`."""


class Host:
    """The host of this node. The CPU share counts from the previous reading: the first one has none."""

    def __init__(self, cgroup: Path = _CGROUP) -> None:
        self.name = socket.gethostname()
        self._cgroup = cgroup
        self._busy: tuple[float, float] | None = None

    def read(self) -> Reading:
        """Read all numbers, in about a millisecond."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        values = {
            "host_memory_available_bytes": float(memory.available),
            "host_memory_total_bytes": float(memory.total),
            "host_swap_used_bytes": float(swap.used),
            "host_load_ratio": psutil.getloadavg()[0] / (psutil.cpu_count() or 1),
        }
        return Reading(self.name, time.time(), values | self._cpu() | self._container())

    def _cpu(self) -> dict[str, float]:
        # psutil.cpu_percent counts from the last call of the same thread, and this is called on any.
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # The time of guests is included in that of their hosts.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        since, self._busy = self._busy, (total - idle, total)
        if since is None or total <= since[1]:
            return {}
        return {"host_cpu_ratio": min(max((total - idle - since[0]) / (total - since[1]), 0.0), 1.0)}

    def _container(self) -> dict[str, float]:
        """Return the memory of the container, if it has a limit: its OOM killer considers no other. The used memory is
        the working set, as in the kubelet: the kernel also counts idle file cache as used, and gives it back before it
        kills anything."""
        for used, limit, stat, cache in (
            ("memory.current", "memory.max", "memory.stat", "inactive_file"),
            (
                "memory/memory.usage_in_bytes",
                "memory/memory.limit_in_bytes",
                "memory/memory.stat",
                "total_inactive_file",
            ),
        ):
            bound = _number(self._cgroup / limit)
            if bound is not None and bound < _UNLIMITED:
                held = _number(self._cgroup / used)
                found = {"container_memory_limit_bytes": bound}
                if held is not None:
                    found["container_memory_used_bytes"] = max(held - _read_counter(self._cgroup / stat, cache), 0.0)
                return found
        return {}


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _read_counter(path: Path, name: str) -> float:
    """Return a counter of a cgroup's memory.stat; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)
