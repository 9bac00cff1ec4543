"""Read the host's numbers by psutil: what a training process shares with its neighbours."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from sentinel.collect import Reading
from sentinel.node.cgroup_memory import list_memory_limits


class Host:
    """The host of this node. The CPU share counts from the previous reading: the first one has none."""

    def __init__(self) -> None:
        self.name = socket.gethostname()
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
        return Reading(self.name, time.time(), values | self._cpu())

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


def read_memory_limit(processes: Iterable[int], root: Path = Path("/")) -> dict[str, float]:
    """Return the limit that is nearest among those of these processes' cgroups, of their container or batch job: the
    kernel kills at it, however much memory the host has. Empty without a limit. A daemon's own limit says nothing: it
    may be a service beside the jobs. `root`: where /proc and /sys are."""
    limits = {limit for process in processes for limit in list_memory_limits(root, process)}
    nearest = min(limits, key=lambda limit: limit.bytes_left, default=None)
    if nearest is None:
        return {}
    used, limit = float(nearest.used), float(nearest.limit)
    return {"container_memory_used_bytes": used, "container_memory_limit_bytes": limit}
