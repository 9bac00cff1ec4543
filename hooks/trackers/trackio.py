"""Trackio: the run of the training thread's context. Incidents are its alerts, which have a step, a level and a text.

`Run.log` would move the script's step; alerts do not touch it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sentinel.hooks.trackers import NAMESPACE, IncidentMark, Summary

NAME = "trackio"

_LEVELS = ("INFO", "INFO", "WARN", "ERROR")
"""Trackio's level, by the level of a mark."""


class TrackioRun:
    """Writes into Trackio's run. See `Tracker`."""

    def __init__(self) -> None:
        self._run: Any = None

    def look(self) -> None:
        """Note the run of the calling thread: each thread has its own context."""
        current = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
        run = current.get() if current is not None else None
        if run is not None:
            self._run = run

    @property
    def open(self) -> bool:
        """Whether the script has had a run open."""
        return self._run is not None

    def write(self, marks: Sequence[IncidentMark], summary: Summary | None) -> int:
        """Send an alert for each mark: Trackio's own thread writes them."""
        levels: Any = sys.modules["trackio"].AlertLevel
        for mark in marks:
            self._run.alert(title=mark.key, text=mark.text, level=levels[_LEVELS[mark.level]], step=mark.step)
        if summary is not None:
            self._run.alert(title=f"{NAMESPACE}summary", text=summary.text, level=levels.INFO, step=summary.step)
        return len(marks)

    def close(self) -> None:
        """Release the run."""
        self._run = None
