"""The record of a demo's runs, from which the table, the picture, the page and `--json` are made."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from sentinel.demo.shard import Damage

SMOOTH_STEPS = 20
"""Steps whose median loss is a level: single batches of 1,024 bytes differ by half a nat."""
SAVED_NATS = 0.5
"""Nats by which a run that was saved ends better than its twin; single seeds differ by less than a tenth of it."""


class RecordedRollback(msgspec.Struct, frozen=True):
    """One rollback: the training went on from the exit of step `at` with the state of the exit of step `to`."""

    at: int
    to: int

    @property
    def lost_steps(self) -> int:
        """Number of steps whose work was discarded."""
        return self.at - self.to


class RecordedAlert(msgspec.Struct, frozen=True):
    """The part of an incident in `sentinel incidents --json` that the demo shows."""

    id: str
    alert: str
    severity: str
    state: str
    first_step: int
    """First step of the first sign."""
    step: int
    """Step at which it fired."""
    summary: str
    signs: tuple[str, ...] = ()
    """Signals that moved, the first one first: `grad_norm at step 450`."""
    layers: tuple[str, ...] = ()
    """Layers whose gradient grew most."""
    done: tuple[str, ...] = ()
    cause: str = ""
    remedy: str = ""
    time: float = 0.0
    """Unix seconds at which it fired."""


class LossCurve(msgspec.Struct):
    """The loss of each step of one training process; NaN if it was not finite."""

    steps: list[int] = []
    losses: list[float] = []
    times: list[float] = []
    """Unix seconds at the end of each step."""
    values: list[float] = []
    """Values of the demo's own series, if it is about another than the loss."""
    rollbacks: list[RecordedRollback] = []
    starts: list[int] = []
    """Steps at which the script began, if it logs them: 0, and after each restart the step where it resumed."""
    places: list[int] = []
    """Indices of these starts in `steps`."""
    weights: str = ""
    """Digest of the weights at the end, if the script logs it."""

    def add(self, line: str) -> None:
        """Add one line of the log that the training script writes."""
        entry: dict[str, Any] = json.loads(line)
        if "rollback" in entry:
            self.rollbacks.append(msgspec.convert(entry["rollback"], RecordedRollback))
        elif "start" in entry:
            self.starts.append(entry["start"])
            self.places.append(len(self.steps))
        elif "weights" in entry:
            self.weights = entry["weights"]
        else:
            self.steps.append(entry["step"])
            self.losses.append(entry["loss"])
            self.times.append(entry["time"])
            if "value" in entry:
                self.values.append(entry["value"])

    def count_damaged(self, damage: Damage) -> int:
        """Return how many of the damaged batches the run trained on."""
        seen = self.rollbacks[0].at if self.rollbacks else self.steps[-1]
        return max(0, min(seen, damage.last) - damage.first + 1)

    @property
    def seconds(self) -> float:
        """Seconds from the first step to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    def level(self, stop: int | None = None, steps: int = SMOOTH_STEPS) -> float:
        """Return the median loss of the `steps` steps before `stop`, or of the last ones; NaN if one was not finite."""
        taken = [loss for step, loss in zip(self.steps, self.losses, strict=True) if stop is None or step < stop]
        return _median(taken[-steps:])

    def worst(self, first: int, stop: int) -> float:
        """Return the highest loss of the steps from `first` to before `stop`; NaN if one was not finite."""
        taken = [loss for step, loss in zip(self.steps, self.losses, strict=True) if first <= step < stop]
        return math.nan if not taken or any(math.isnan(loss) for loss in taken) else max(taken)

    def smooth_losses(self) -> list[float]:
        """Return the trailing median of up to `SMOOTH_STEPS` losses; a non-finite one or a rollback starts it over."""
        restarts = {rollback.at + 1 for rollback in self.rollbacks}
        smooth, window = [], list[float]()
        for step, loss in zip(self.steps, self.losses, strict=True):
            if step in restarts:
                window.clear()
            window = [*window, loss][-SMOOTH_STEPS:] if math.isfinite(loss) else []
            smooth.append(_median(window))
        return smooth


class Samples(msgspec.Struct, frozen=True):
    """A signal of the watched run, from the daemon's history."""

    steps: list[int]
    values: list[float]


class DemoRecord(msgspec.Struct):
    """Two runs of one script on one damaged file: one watched by Sentinel, one alone."""

    seed: int
    steps: int
    damage: Damage
    watched: LossCurve
    alone: LossCurve
    alerts: list[RecordedAlert]
    grad_norm: Samples
    run_id: str
    python: str
    torch: str
    seconds: float
    """Seconds that the whole demo took."""

    @property
    def alert(self) -> RecordedAlert | None:
        """The alert that the rollback answered: the first critical one from the damaged batches on."""
        late = [alert for alert in self.alerts if alert.step >= self.damage.first]
        return next((alert for alert in late if alert.severity == "critical"), None)

    @property
    def rollback(self) -> RecordedRollback | None:
        """The first rollback."""
        return self.watched.rollbacks[0] if self.watched.rollbacks else None

    @property
    def saved(self) -> bool:
        """Whether the watched run's loss is finite at the end, and its twin's is NaN, or higher by `SAVED_NATS`."""
        watched, alone = self.watched.level(), self.alone.level()
        return math.isfinite(watched) and not alone - watched < SAVED_NATS

    @property
    def parted(self) -> int | None:
        """First step at which the two losses differ by a bit: after a rollback, unless Sentinel affected the run."""
        both = zip(self.watched.steps, self.watched.losses, self.alone.losses, strict=False)
        return next((step for step, a, b in both if a != b and not (math.isnan(a) and math.isnan(b))), None)

    def summary(self) -> dict[str, Any]:
        """Return what `sentinel demo --json` prints, without the paths of the files."""
        return {
            "fault": self.damage.fault,
            "seed": self.seed,
            "steps": self.steps,
            "run_id": self.run_id,
            "saved": self.saved,
            "damaged_batches": {"first": self.damage.first, "last": self.damage.last},
            "alert": msgspec.to_builtins(self.alert),
            "rollbacks": msgspec.to_builtins(self.watched.rollbacks),
            "runs": self.figures(),
            "seconds": round(self.seconds, 1),
        }

    def figures(self) -> dict[str, Any]:
        """Return the figures that are compared in `--json`. Losses are in nats per byte; None stands for NaN."""
        first = self.damage.first
        struck = (first, first + self.damage.batches)
        return {
            name: {
                "loss_before_fault": _json(curve.level(first)),
                "loss_at_fault": _json(curve.worst(*struck)),
                "loss_at_end": _json(curve.level()),
                "steps_lost": sum(rollback.lost_steps for rollback in curve.rollbacks),
                "seconds": round(curve.seconds, 1),
            }
            for name, curve in (("with_sentinel", self.watched), ("without", self.alone))
        }


def save(record: DemoRecord, path: Path) -> None:
    """Write a record as JSON, with Python's NaN."""
    path.write_text(json.dumps(msgspec.to_builtins(record)), encoding="utf-8")


def load(path: Path) -> DemoRecord:
    """Read a record that `save` wrote."""
    return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), DemoRecord)


def alert_of(case: dict[str, Any]) -> RecordedAlert:
    """Return the recorded alert from a case of the history."""
    return RecordedAlert(
        id=case["id"], alert=case["alert"], severity=case["severity"], state=case["state"],
        first_step=case["first_step"], step=case["step"], summary=case["summary"],
        signs=tuple(f"{sign['signal']} at step {sign['seq']}" for sign in case["signs"]),
        layers=tuple(layer["name"] for layer in case["layers"]), done=tuple(case["done"]),
        cause=case["diagnosis"]["cause"], remedy=case["diagnosis"]["remedy"], time=case["time"],
    )  # fmt: skip


def _median(values: list[float]) -> float:
    return median(values) if values and all(math.isfinite(value) for value in values) else math.nan


def _json(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
