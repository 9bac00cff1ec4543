"""What a report shows of a run, read from its history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.runs import LayerStats
from sentinel.signals import SIGNALS
from sentinel.store import History

SHOWN = (
    ("loss", ("loss",)),
    ("gradient norm", ("grad_norm", "grad_norm_applied")),
    ("learning rate", ("learning_rate",)),
    ("loss scale", ("loss_scale",)),
    ("step time", ("step_seconds", "data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")),
    ("memory", ("rss_bytes", "memory_allocated_bytes", "memory_reserved_bytes")),
    ("update / weight ratio", ("update_ratio",)),
)
"""Charts of a run: title and signals, each shown where it was seen."""
_DEVICE_SIGNALS = ("gpu_utilization_ratio", "gpu_memory_used_bytes", "gpu_temperature_celsius", "gpu_power_watts")
_LAYERS, _COLUMNS = 60, 120
"""Of the heat map, at most."""


class Line(msgspec.Struct, frozen=True):
    """One signal over steps."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


class Panel(msgspec.Struct, frozen=True):
    """One chart: lines of one unit."""

    title: str
    unit: str
    lines: tuple[Line, ...]


class Heat(msgspec.Struct, frozen=True):
    """Gradient norms of layers over steps; None where there is no value."""

    layers: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    """One row a layer."""
    hidden: int
    """Layers that are left out."""


class RankRow(msgspec.Struct, frozen=True):
    """One rank: medians over its steps; NaN where it was not seen."""

    rank: int
    steps: int
    loss: float
    step_seconds: float
    data_seconds: float
    rss_bytes: float


class Undone(msgspec.Struct, frozen=True):
    """A rollback: the steps between were undone."""

    to: int
    at: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    run: str
    run_id: str
    attempts: int
    began: float
    seconds: float
    first: int
    last: int
    facts: dict[str, Any]
    panels: tuple[Panel, ...]
    incidents: tuple[dict[str, Any], ...]
    rollbacks: tuple[Undone, ...]
    heat: Heat | None
    ranks: tuple[RankRow, ...]
    devices: tuple[tuple[str, dict[str, float]], ...]
    """(GPU or node, highest reading of each of its signals)."""
    final_loss: float
    """Median of the last 20."""


def report(history: History) -> Report:
    """The whole of a run, over all its attempts."""
    attempts = history.attempts()
    numbers = [number for number, _, _ in attempts] or [0]
    offset = int(history.hello(numbers[-1]).get("step_offset", 0)) if attempts else 0
    seen = {name for number in numbers for name in history.signals(attempt=number)}
    panels = tuple(
        _panel(history, numbers, title, [name for name in names if name in seen], offset)
        for title, names in SHOWN
        if seen.intersection(names)
    )
    losses = [line for panel in panels for line in panel.lines if line.name == "loss"]
    steps = [step for panel in panels for line in panel.lines for step in (line.steps[0], line.steps[-1]) if line.steps]
    times = [time for number in numbers for time in history.series("step_seconds", attempt=number).times]
    began = min((began for _, began, _ in attempts), default=0.0)
    return Report(
        run=history.run,
        run_id=history.run_id,
        attempts=len(attempts),
        began=began,
        seconds=max(times, default=began) - began,
        first=min(steps, default=0),
        last=max(steps, default=0),
        facts=history.hello(numbers[-1]).get("facts", {}) if attempts else {},
        panels=panels,
        incidents=tuple(history.incidents()),
        rollbacks=_rollbacks(history, offset),
        heat=heat_of(history.layers(attempt=numbers[-1]), offset),
        ranks=_ranks(history, numbers[-1]),
        devices=_devices(history, numbers[-1]),
        final_loss=median(losses[0].values[-20:]) if losses else math.nan,
    )


def _panel(history: History, numbers: list[int], title: str, names: list[str], offset: int) -> Panel:
    lines = []
    for name in names:
        steps: list[int] = []
        values: list[float] = []
        for number in numbers:
            series = history.series(name, attempt=number)
            steps += [seq + offset for seq in series.seqs]
            values += series.values
        lines.append(Line(name, steps, values))
    return Panel(title, SIGNALS[names[0]].unit if names[0] in SIGNALS else "1", tuple(lines))


def _rollbacks(history: History, offset: int) -> tuple[Undone, ...]:
    found = []
    for event in history.events("rollback"):
        to, at = event.detail.get("to"), event.detail.get("at")
        if event.detail.get("ok") and isinstance(to, int) and isinstance(at, int):
            found.append(Undone(to + offset, at + offset))
    return tuple(found)


def heat_of(samples: Sequence[tuple[int, LayerStats]], offset: int) -> Heat | None:
    """The layers whose gradient norm moved most, in the model's order. A column is the worst of the samples in it."""
    if len(samples) < 2:
        return None
    width = -(-len(samples) // _COLUMNS)
    rows: dict[str, list[float | None]] = {}
    for at, (_, layers) in enumerate(samples):
        for name, values in layers.items():
            row = rows.setdefault(name, [None] * -(-len(samples) // width))
            if "layer_grad_norm" in values:
                row[at // width] = _worse(row[at // width], values["layer_grad_norm"])
    rows = {name: row for name, row in rows.items() if any(value is not None for value in row)}
    if not rows:
        return None
    kept = set(sorted(rows, key=lambda name: _spread(rows[name]), reverse=True)[:_LAYERS])
    shown = {name: tuple(row) for name, row in rows.items() if name in kept}
    steps = tuple(seq + offset for seq, _ in samples[::width])
    return Heat(tuple(shown), steps, tuple(shown.values()), len(rows) - len(shown))


def _worse(one: float | None, other: float) -> float:
    if one is None or not math.isfinite(other):
        return other
    return max(one, other) if math.isfinite(one) else one


def _spread(row: list[float | None]) -> float:
    values = [value for value in row if value is not None]
    if not all(map(math.isfinite, values)):
        return math.inf  # the first to be shown
    finite = [value for value in values if value > 0]
    return math.log(max(finite) / min(finite)) if finite else 0.0


def _ranks(history: History, attempt: int) -> tuple[RankRow, ...]:
    rows = []
    for rank in sorted(history.ranks(attempt)):
        values: dict[str, list[float]] = {}
        count = 0
        for _, _, row in history.rows(attempt=attempt, rank=rank):
            count += 1
            for name in ("loss", "step_seconds", "data_seconds", "rss_bytes"):
                if name in row:
                    values.setdefault(name, []).append(row[name])
        if count:
            medians = (median(values.get(name, ())) for name in ("loss", "step_seconds", "data_seconds", "rss_bytes"))
            rows.append(RankRow(rank, count, *medians))
    return tuple(rows)


def _devices(history: History, attempt: int) -> tuple[tuple[str, dict[str, float]], ...]:
    found = []
    for device in history.devices(attempt=attempt):
        highest = {}
        for name in _DEVICE_SIGNALS:
            values = [value for value in history.readings(name, device, attempt=attempt).values if math.isfinite(value)]
            if values:
                highest[name] = max(values)
        if highest:
            found.append((device, highest))
    return tuple(found)


def median(values: Sequence[float]) -> float:
    """Of those that are finite; NaN where none is."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else math.nan
