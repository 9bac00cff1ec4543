"""Memory limits of a process's cgroups (a container, a batch job, a service): the kernel kills at any of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60
"""Least limit that counts as none: where there is none, cgroup v1 writes its largest number, and v2 the word `max`."""


class MemoryLimit(NamedTuple):
    """The limit of one cgroup, in bytes."""

    limit: int
    used: int
    """Without idle file cache: the kernel counts it, and drops it before it kills (docs.kernel.org: cgroup-v2,
    memory.stat; cgroup-v1/memory). This is the kubelet's working set."""
    directory: Path

    @property
    def bytes_left(self) -> int:
        """Bytes until the kernel kills."""
        return max(0, self.limit - self.used)


def list_memory_limits(root: Path = Path("/"), process: int | None = None) -> Iterator[MemoryLimit]:
    """Yield the limit of the cgroup of a process, this one by default, and of each one above it, as far as they have
    one. `root`: where /proc and /sys are."""
    try:
        lines = (root / "proc" / (str(process) if process is not None else "self") / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _follow(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _follow(root / "sys/fs/cgroup/memory", path, *names)


def _follow(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[MemoryLimit]:
    """Yield the limits from `path` up to the mount. A container may see only its own cgroup, mounted as if it were the
    root: then `path`, which is the host's, does not exist, and a directory above it does."""
    here = mount / path.lstrip("/")
    for directory in [here, *here.parents]:
        try:
            bound = (directory / limit).read_text().strip()
            if bound != "max" and int(bound) < _UNLIMITED:
                used = int((directory / usage).read_text()) - _read_counter(directory / "memory.stat", reclaimable)
                yield MemoryLimit(int(bound), max(0, used), directory)
        except (OSError, ValueError):
            pass
        if directory == mount:
            return


def _read_counter(path: Path, name: str) -> int:
    """Return a counter of a cgroup's memory.stat; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
