"""Marks incidents in the experiment trackers in which the script has a run open.

There is one file for each tracker. A tracker that the script does not use is never imported. This module defines what a
tracker must do, and what is written into it: marks of incidents, and one summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sentinel.text import drop_controls, rank_severity

NAMESPACE = "sentinel/"
"""Prefix of each name that is ours."""
LETTERS = 500
"""Most characters of a text: MLflow's tags have had limits of 5,000 bytes and more."""
OVER = 0
"""The level of an alert that has ended."""


class IncidentMark(NamedTuple):
    """The begin or the end of an incident."""

    alert: str
    level: int
    """How severe it is, from 1 (info) to 3 (critical); `OVER` if it ended."""
    step: int
    """The user's number of the step at which it fired or ended."""
    text: str

    @property
    def key(self) -> str:
        """Name of the alert's series."""
        return NAMESPACE + self.alert


class Summary(NamedTuple):
    """The result of a run."""

    text: str
    step: int
    """The user's number of the last step."""
    incidents: Mapping[str, int]
    """Severity -> number of incidents, as far as the daemon has said."""

    @property
    def counts(self) -> dict[str, int]:
        """The numbers by name."""
        return {f"{NAMESPACE}incidents/{severity}": count for severity, count in self.incidents.items()}


class Tracker(Protocol):
    """One kind of tracker. `look` is called on the training thread, everything else on the tracker's own."""

    def look(self) -> None:
        """Note which run the script has open. Called about once a second: must be cheap, and without any input or
        output."""

    @property
    def open(self) -> bool:
        """Whether there is a run to write into."""

    def write(self, marks: Sequence[IncidentMark], summary: Summary | None) -> int:
        """Write the marks, the oldest first, and the summary, which is the last. Returns how many marks were taken.

        The other marks are passed again. An exception loses all of these marks.
        """

    def close(self) -> None:
        """Undo what `look` may have put in place."""


def make_mark(alert: Mapping[str, Any]) -> IncidentMark | None:
    """Make the mark of an alert, as `on_alert` gets it. None: it is neither the begin nor the end of an incident."""
    name, summary = str(alert["alert"]), str(alert["summary"])
    if alert["event"] == "fired":
        text = f"{alert['severity']} {name} at step {alert['step']}: {summary}"
        return IncidentMark(name, rank_severity(alert["severity"]), alert["step"], _shorten(text))
    if alert["event"] == "updated":
        return None
    step = alert["step"] if alert["resolved_step"] is None else alert["resolved_step"]
    how = "rolled back" if alert["event"] == "rolled_back" else "over"
    return IncidentMark(name, OVER, step, _shorten(f"{name} (since step {alert['first_step']}) {how} at step {step}"))


def _shorten(text: str) -> str:
    return drop_controls(text)[:LETTERS]
