"""How much of the host's memory this process may still take, and how much it holds."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from sentinel.node.cgroup_memory import list_memory_limits


def memory_left(root: Path = Path("/")) -> tuple[float, str]:
    """Return the bytes that this process may still take, and what sets the limit. Infinite where the system does not
    say.

    It is the least of MemAvailable, of what the process's cgroup and each one above it leave, and of what `ulimit -v`
    and `ulimit -d` leave.
    """
    groups = ((float(group.bytes_left), f"the limit of {group.directory}") for group in list_memory_limits(root))
    resources = ((float(max(0, bound - used)), where) for bound, used, where in _resource_limits(root))
    return min([_available(root), *groups, *resources])


def memory_limit(root: Path = Path("/")) -> float:
    """Return the bytes at which the kernel kills: the least limit of the process's cgroups, or the machine's memory."""
    return min([_meminfo(root, "MemTotal:"), *(float(group.limit) for group in list_memory_limits(root))])


def _available(root: Path) -> tuple[float, str]:
    left = _meminfo(root, "MemAvailable:")
    return left, "MemAvailable" if left < float("inf") else "not known"


def _meminfo(root: Path, name: str) -> float:
    """Return the bytes of an entry of /proc/meminfo; infinite where the system does not say."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return float("inf")


def _resource_limits(root: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (limit, bytes that count against it, name of the limit) of each limit on address space or data."""
    for kind, place, where in ((resource.RLIMIT_AS, 0, "ulimit -v"), (resource.RLIMIT_DATA, 5, "ulimit -d")):
        bound = resource.getrlimit(kind)[0]
        if bound != resource.RLIM_INFINITY:
            try:
                yield bound, int((root / "proc/self/statm").read_text().split()[place]) * _PAGE, where
            except OSError:
                return


_PAGE = resource.getpagesize()


def resident_bytes() -> int:
    """Return this process's resident set size in bytes, from /proc/self/statm; elsewhere its peak, from getrusage."""
    return resident_and_file_bytes()[0]


def resident_and_file_bytes() -> tuple[int, int]:
    """Return the resident set size and the part of it that is file pages or shared (0 where not known), in bytes."""
    if sys.platform == "linux":
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            _, resident, shared, *_ = os.read(statm, 128).split()
            return int(resident) * _PAGE, int(shared) * _PAGE
        finally:
            os.close(statm)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0  # bytes on macOS


def list_read_only_memory() -> list[tuple[int, int]]:
    """Return first address and end of each part of this process's memory that cannot be written to, in rising order.
    Empty where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_bytes().splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=2) for line in lines]
    bounds = [span.split(b"-") for span, rights, _ in fields if b"w" not in rights]
    return [(int(start, 16), int(end, 16)) for start, end in bounds]


def shared_memory_bytes() -> int:
    """Return the bytes of shared memory in use (/dev/shm: batches of a loader's workers). 0 where it is not known."""
    try:
        with open("/proc/self/status", "rb") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith(b"RssShmem:")), 0)
    except OSError:
        return 0
