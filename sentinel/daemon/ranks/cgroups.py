"""The cgroup of a process: its files, and whether it is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT, PROCESSES = Path("/sys/fs/cgroup"), Path("/proc")
_FREEZERS = (("", "cgroup.events"), ("freezer", "freezer.state"))
"""Controller and file that show a frozen cgroup, of cgroup v2 and v1."""
_FROZEN = frozenset({"frozen 1", "FROZEN", "FREEZING"})


def file_of(process: int, files: Sequence[tuple[str, str]]) -> Path | None:
    """Return the first of these files (controller, name) that the process' cgroup has; None if it has none.

    In a container that does not show the cgroup, it is the container's file.
    """
    try:
        lines = (PROCESSES / str(process) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for controller, name in files:
        if (path := paths.get(controller)) is not None:
            for folder in (ROOT / controller / path.lstrip("/"), ROOT / controller):
                if (folder / name).is_file():
                    return folder / name
    return None


def is_frozen(process: int) -> bool:
    """Whether the process is paused with its container or its job (`docker pause`, `scontrol suspend`)."""
    file = file_of(process, _FREEZERS)
    try:
        return file is not None and not _FROZEN.isdisjoint(file.read_text().splitlines())
    except OSError:
        return False
