"""Recorded runs: what is known about each, and the result of replaying it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

KINDS = ("healthy", "healthy_event", "faulty")
HALVES = ("tuning", "held out")
TUNED_ON = frozenset(
    {"algoperf", "bigscience", "deepspeed-chat", "detectron2", "llm-action", "megatron-golden", "mlperf"}
)
"""Sources of the half `tuning`. The others are deepobs, which has nearly all late NaNs, and modded-nanogpt."""
BOTH = "both"
LATE_ROWS = 150
"""Least rows before a NaN or divergence for it to count as foreseeable: LossSpike needs about 50 to know a run."""


class Label(msgspec.Struct, frozen=True):
    """A row of labels.csv."""

    run: str
    kind: str
    domain: str
    source: str
    truth: str
    repo: str
    commit: str
    licence: str

    @property
    def half(self) -> str:
        """The half of the data that the run is in."""
        return HALVES[self.source not in TUNED_ON]

    @property
    def diverged(self) -> bool:
        """Whether the label says that the run diverged; spikes, collapses and exploding gradients are other faults."""
        return self.truth.casefold().startswith(("diverged", "unstable"))


class Alarm(msgspec.Struct, frozen=True):
    """An alert, with the row at which it fired."""

    rule: str
    severity: str
    row: int


class Found(msgspec.Struct, frozen=True):
    """The result of replaying a run."""

    run: str
    rows: int
    nonfinite: int | None
    """The first row whose loss or gradient norm is NaN or infinite."""
    nonfinite_loss: bool
    """Whether the loss itself is ever NaN or infinite."""
    risen: int | None
    """The row that `rise` finds: where a divergence begins; None: there is none."""
    alarms: tuple[Alarm, ...]
    blind: tuple[str, ...]
    """Rules that judged nothing: they were not applied, had no data, or lacked some without which they cannot fire."""
    peers: dict[str, tuple[int, ...]]
    """Name of a peer -> the rows at which it raised an alarm."""

    @property
    def late(self) -> bool:
        """Whether the run has a NaN that could have been foreseen."""
        return self.nonfinite is not None and self.nonfinite >= LATE_ROWS

    def first(self, severity: str = "critical", *, before: float = math.inf) -> Alarm | None:
        """Return the first alarm of a severity before a row, or None."""
        return next((a for a in self.alarms if a.severity == severity and a.row < before), None)


Runs = list[tuple[Label, Found]]


def of(runs: Runs, half: str, *kinds: str) -> Runs:
    """Return the runs of a half (or of BOTH) and of these kinds."""
    return [(label, found) for label, found in runs if half in (label.half, BOTH) and label.kind in kinds]


def labels(folder: Path) -> list[Label]:
    """Return the labels in labels.csv whose kind is scored."""
    with (folder / "labels.csv").open(newline="") as file:
        found = [Label(*(row[name] for name in Label.__struct_fields__)) for row in csv.DictReader(file)]
    return [label for label in found if label.kind in KINDS]


def rise(losses: Sequence[float], stretch: int = 30, by: float = 1.5) -> int | None:
    """Return the row at which a loss begins to diverge, or None.

    That is the first of `stretch` rows in a row that are over `by` times the lowest loss before them. A measure in
    hindsight, for runs that are known to have diverged.
    """
    lowest, high = math.inf, 0
    for row, loss in enumerate(losses):
        high = high + 1 if loss > by * lowest else 0
        if high == stretch:
            return row - stretch + 1
        if not high:
            lowest = min(lowest, loss)
    return None


def share(part: int, whole: int) -> str:
    """Return e.g. `3 of 40 (3 % to 20 %)`, with Wilson's interval at 95 %."""
    if not whole:
        return "none there"
    z, p = 1.96, part / whole
    middle, spread = p + z * z / (2 * whole), z * math.sqrt(p * (1 - p) / whole + z * z / (4 * whole * whole))
    low, high = ((middle + sign * spread) / (1 + z * z / whole) for sign in (-1, 1))
    return f"{part} of {whole} ({max(low, 0):.0%} to {high:.0%})".replace("%", " %")


def rate(count: int, rows: int) -> str:
    """Return the alarms in 10,000 rows as text, with the exact Poisson interval at 95 %."""
    if not rows:
        return "none there"

    def bound(target: Callable[[float], bool]) -> float:
        low, high = 0.0, 10.0 * count + 20.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if target(middle) else (low, middle)
        return low

    lowest = bound(lambda mean: 1 - below(count - 1, mean) < 0.025) if count else 0.0
    highest = bound(lambda mean: below(count, mean) > 0.025)
    per = 10_000 / rows
    return f"{count * per:.3f} ({lowest * per:.3f} to {highest * per:.3f})"


def below(count: int, mean: float) -> float:
    """Return P(X <= count) of a Poisson variable with this mean."""
    return (
        math.fsum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(count + 1)) if mean else 1.0
    )
