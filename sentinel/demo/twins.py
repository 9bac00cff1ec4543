"""The outcome of two watched runs of one script, one with a fault that no rollback fixes, and one without.

The demos show that Sentinel reports the one, in time and with its cause, and does not report the other.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sentinel.demo.record import LossCurve, RecordedAlert
from sentinel.demo.story import STEP_LABEL

Fault = Literal["scaler", "leak", "hang"]

FAULTY, HEALTHY = "with the fault", "healthy twin"


class TwinKind(msgspec.Struct, frozen=True):
    """The description of a fault, and what should come of it."""

    alert: str
    steps: int
    begins: float
    """Share of the steps after which it begins."""
    by: float
    """Share of the steps by which the alert must have fired."""
    what: str
    """What is wrong in the one run, but not in its twin."""
    value: str
    """The series in which the runs differ, with its unit."""
    scale: float = 1.0
    """Factor from what the script logs to that unit."""
    ends: bool = True
    """Whether the faulty run ends by itself. One that does not is shown over time, not over steps."""

    def format_value(self, value: float) -> str:
        """Return a logged value in the series' unit, without the unit."""
        value *= self.scale
        return f"{value:.0f}" if 1 <= value < 1e6 else f"{value:.3g}"


KINDS: dict[Fault, TwinKind] = {
    "scaler": TwinKind(
        alert="ScalerCollapse", steps=240, begins=0.5, by=0.6,
        what="One divides its embeddings by their length in fp16, where the epsilon of 1e-8 is 0; its twin does so in "
        "fp32. From step {first} on the data hold padding, whose length is 0.",
        value="loss scale",
    ),
    "leak": TwinKind(
        alert="MemoryCreep", steps=2400, begins=0.0, by=0.8,
        what="One keeps a slice of each batch's logits for a plot, and with the slice the whole; its twin keeps the "
        "number that is to be plotted.",
        value="resident set (MB)", scale=1e-6,
    ),
    "hang": TwinKind(
        alert="Hang", steps=1000, begins=0.3, by=0.3,
        what="A thread reads ahead. Batch {first} is blank: in the one run the thread dies of it silently, and "
        "the loop waits and never goes on; in its twin it skips the batch.",
        value="steps done", ends=False,
    ),
}  # fmt: skip


class Side(msgspec.Struct):
    """One of the two runs, and its alerts."""

    name: str
    run_id: str
    curve: LossCurve
    alerts: list[RecordedAlert] = []


class Twins(msgspec.Struct):
    """The outcome of both runs."""

    fault: Fault
    seed: int
    steps: int
    faulty: Side
    healthy: Side
    python: str
    torch: str
    seconds: float

    @property
    def kind(self) -> TwinKind:
        return KINDS[self.fault]

    @property
    def first(self) -> int:
        """The step at which the fault begins."""
        return round(self.steps * self.kind.begins)

    @property
    def alert(self) -> RecordedAlert | None:
        """The alert of the fault."""
        return next((alert for alert in self.faulty.alerts if alert.alert == self.kind.alert), None)

    @property
    def x_label(self) -> str:
        return STEP_LABEL if self.kind.ends else "seconds since the first step"

    @property
    def span(self) -> float:
        """Length of the x axis."""
        return float(self.steps) if self.kind.ends else max(self.places(self.healthy)[-1], self.alert_at or 0.0) * 1.04

    def places(self, side: Side) -> list[float]:
        """Return the x of each step of a run."""
        return [float(s) for s in side.curve.steps] if self.kind.ends else [t - self._began for t in side.curve.times]

    def telling(self, side: Side) -> tuple[list[float], list[float]]:
        """Return x and y of the series in which the runs differ. A run that is stuck keeps its last value."""
        x, y = self.places(side), [value * self.kind.scale for value in side.curve.values]
        return (x, y) if self.kind.ends or side is self.healthy else ([*x, self.places(self.healthy)[-1]], [*y, y[-1]])

    @property
    def begins_at(self) -> float | None:
        """x of the fault's beginning; None if it was there from the start."""
        if not self.first:
            return None
        return float(self.first) if self.kind.ends else self.places(self.faulty)[-1]

    @property
    def alert_at(self) -> float | None:
        """x of the alert; None if there is none."""
        if self.alert is None:
            return None
        return float(self.alert.step) if self.kind.ends else self.alert.time - self._began

    @property
    def _began(self) -> float:
        return min(side.curve.times[0] for side in (self.faulty, self.healthy))

    def summary(self) -> dict[str, Any]:
        """Return what `sentinel demo --json` prints, without the paths of the files."""
        alert = self.alert
        return {
            "fault": self.fault,
            "seed": self.seed,
            "steps": self.steps,
            "fault_begins_at": self.first,
            "run_id": self.faulty.run_id,
            "alert": msgspec.to_builtins(alert),
            "alerts_of_the_twin": [other.alert for other in self.healthy.alerts],
            self.kind.value.split(" (")[0].replace(" ", "_"): {
                key: side.curve.values[-1] if side.curve.values else None
                for key, side in (("faulty", self.faulty), ("healthy", self.healthy))
            },
            "seconds": round(self.seconds, 1),
        }


def failing(twins: Twins) -> str:
    """Return what the demo did not show, in words; "" if it showed everything."""
    kind, alert = twins.kind, twins.alert
    if alert is None:
        others = ", ".join(other.alert for other in twins.faulty.alerts) or "nothing"
        return f"Sentinel did not raise {kind.alert} ({others} instead)"
    if not kind.ends and "hang.py:" not in alert.cause:
        return f"{kind.alert} came without the line at which the run is stuck: {alert.cause}"
    if not twins.first - (not kind.ends) <= alert.step <= twins.steps * kind.by:
        return f"{kind.alert} came at step {alert.step}, and the fault is there from step {twins.first} on"
    if twins.healthy.alerts:
        return f"Sentinel raised {twins.healthy.alerts[0].alert} for the healthy twin"
    return ""
