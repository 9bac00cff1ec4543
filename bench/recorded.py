"""Recorded runs: what is known of each, and what came out when it was replayed."""

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
"""Sources of the half `tuning`. The others are deepobs, whose are nearly all late NaNs, and modded-nanogpt."""
BOTH = "both"
LATE_ROWS = 150
"""Rows before a NaN, or a divergence, from which on it could have been seen: LossSpike needs about 50 to know a run."""


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
        """Which half of the data it is in."""
        return HALVES[self.source not in TUNED_ON]

    @property
    def diverged(self) -> bool:
        """Whether it says that the run did; spikes, collapses and explosions of gradients are other faults."""
        return self.truth.casefold().startswith(("diverged", "unstable"))


class Alarm(msgspec.Struct, frozen=True):
    """An alert, by the row at which it fired."""

    rule: str
    severity: str
    row: int


class Found(msgspec.Struct, frozen=True):
    """A run, replayed."""

    run: str
    rows: int
    nonfinite: int | None
    """The first row whose loss or gradient norm is NaN or infinite."""
    nonfinite_loss: bool
    """Whether the loss itself ever is."""
    risen: int | None
    """The row at which `rise` begins."""
    alarms: tuple[Alarm, ...]
    blind: tuple[str, ...]
    """Rules that made no judgement: they were not applied, had no data, or could not have fired for want of some."""
    peers: dict[str, tuple[int, ...]]
    """The rows at which each other detector raised an alarm."""

    @property
    def late(self) -> bool:
        """Whether its NaN could have been foreseen."""
        return self.nonfinite is not None and self.nonfinite >= LATE_ROWS

    def first(self, severity: str = "critical", *, before: float = math.inf) -> Alarm | None:
        """Its first alarm."""
        return next((a for a in self.alarms if a.severity == severity and a.row < before), None)


Runs = list[tuple[Label, Found]]


def of(runs: Runs, half: str, *kinds: str) -> Runs:
    """Those of a half (or of BOTH) and of these kinds."""
    return [(label, found) for label, found in runs if half in (label.half, BOTH) and label.kind in kinds]


def labels(folder: Path) -> list[Label]:
    """Those that are scored, as labels.csv has them."""
    with (folder / "labels.csv").open(newline="") as file:
        found = [Label(*(row[name] for name in Label.__struct_fields__)) for row in csv.DictReader(file)]
    return [label for label in found if label.kind in KINDS]


def rise(losses: Sequence[float], stretch: int = 30, by: float = 1.5) -> int | None:
    """Where a loss that diverges begins to: the first of 30 rows in a row that lie half over the lowest one before
    them. A measure in hindsight, for runs that are known to have diverged."""
    lowest, high = math.inf, 0
    for row, loss in enumerate(losses):
        high = high + 1 if loss > by * lowest else 0
        if high == stretch:
            return row - stretch + 1
        if not high:
            lowest = min(lowest, loss)
    return None


def share(part: int, whole: int) -> str:
    """`3 of 40 (1 to 20 %)`, with Wilson's interval at 95 %."""
    if not whole:
        return "none there"
    z, p = 1.96, part / whole
    middle, spread = p + z * z / (2 * whole), z * math.sqrt(p * (1 - p) / whole + z * z / (4 * whole * whole))
    low, high = ((middle + sign * spread) / (1 + z * z / whole) for sign in (-1, 1))
    return f"{part} of {whole} ({max(low, 0):.0%} to {high:.0%})".replace("%", " %")


def rate(count: int, rows: int) -> str:
    """Alarms in 10,000 rows, with the exact Poisson interval at 95 %."""
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
    """P(X <= count) of a Poisson variable."""
    return (
        math.fsum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(count + 1)) if mean else 1.0
    )
