"""The content of a report on a run, read from its history."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import msgspec

from sentinel.report import ranks
from sentinel.report.outcomes import find_outcome
from sentinel.report.ranks import COLUMNS, Heat, RankRow, median, spread_median
from sentinel.runs.steps import LayerStats
from sentinel.signals import SIGNALS
from sentinel.store import History, Series

SHOWN = (
    ("loss", ("loss",)),
    ("gradient norm", ("grad_norm", "grad_norm_applied")),
    ("learning rate", ("learning_rate",)),
    ("loss scale", ("loss_scale",)),
    ("step time", ("step_seconds", "data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")),
    ("memory", ("rss_bytes", "memory_allocated_bytes", "memory_reserved_bytes")),
    ("update / weight ratio", ("update_ratio",)),
)
"""Charts of a run: title and signals, of which those that were sampled are shown."""
_DEVICE_SIGNALS = ("gpu_utilization_ratio", "gpu_memory_used_bytes", "gpu_temperature_celsius", "gpu_power_watts")
_LOGGED = 12
"""Most charts of numbers that the script or its trainer logs."""
_LAYERS = 60
"""Most layers of the heat map."""


class ChartLine(msgspec.Struct, frozen=True):
    """One signal over steps; in a demo, it may be over seconds."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]


class ReportPanel(msgspec.Struct, frozen=True):
    """One chart: lines with the same unit."""

    title: str
    unit: str
    lines: tuple[ChartLine, ...]


class Undone(msgspec.Struct, frozen=True):
    """A rollback: the steps between were undone."""

    to: int
    at: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a report on one run."""

    run: str
    run_id: str
    attempts: int
    began: float
    seconds: float
    first: int
    last: int
    facts: dict[str, Any]
    panels: tuple[ReportPanel, ...]
    incidents: tuple[dict[str, Any], ...]
    rollbacks: tuple[Undone, ...]
    heat: Heat | None
    ranks: tuple[RankRow, ...]
    matrix: Heat | None = None
    """Each rank's own time over steps."""
    devices: tuple[tuple[str, dict[str, float]], ...]
    """(GPU or node, highest reading of each of its signals)."""
    final_loss: float
    """Median of the last 20 losses."""
    step_seconds: float = math.nan
    """Median time of a step."""
    goodput: float = math.nan
    """The result of `measure_goodput`; NaN: unknown."""
    reached: int = -1
    """The step that the run stands at: below `last` if it was resumed from further back; -1 before the first."""
    outcome: str = ""
    """How the run ended, in words; empty while it is watched."""
    job: tuple[str, ...] = ()
    """The nodes of a job over several, and what the report lacks of them, in words."""


def report(history: History, *, over: bool = False) -> Report:
    """Return the report on a run, over all its attempts.

    `over`: no daemon watches it any more, and incidents that fire in its history fired until its end.
    """
    attempts = history.attempts()
    numbers = [number for number, _, _ in attempts] or [0]
    offsets = {number: history.step_offset(number) for number in numbers}
    titles = (*SHOWN, *list_logged_panels(name for number in numbers for name in history.signals(attempt=number)))
    shown = tuple(name for _, names in titles for name in names)
    kept = [(offsets[number], history.columns(shown, attempt=number)) for number in numbers]
    panels = panels_of(kept, titles)
    lines = {line.name: line for panel in panels for line in panel.lines}
    ends = [offset + series.seqs[at] for offset, columns in kept for series in columns.values() for at in (0, -1)]
    began, seconds = history.lifetime(over=over)
    last, names = numbers[-1], ranks.NAMES
    reached, undone = offsets[last] + history.last_seq(last), _list_undone(history, offsets)
    sparsest = max(map(history.find_spacing, numbers))  # the other steps that are kept have the highest values
    usual = [history.columns(("step_seconds",), attempt=number, every=sparsest) for number in numbers]
    step_seconds = spread_median([time for one in usual for series in one.values() for time in series.values])
    every = history.find_spacing(last)
    apart = {rank: history.columns(names, attempt=last, rank=rank, every=every) for rank in history.ranks(last)}
    cases = history.final_incidents() if over else history.incidents()
    return Report(
        run=history.run,
        run_id=history.run_id,
        attempts=len(attempts),
        began=began,
        seconds=seconds,
        first=min(ends, default=0),
        last=max(ends, default=0),
        facts=history.facts(last),
        panels=panels,
        incidents=tuple(cases),
        rollbacks=_rollbacks(history, offsets),
        heat=heat_of(history.layers(attempt=last), offsets[last]),
        ranks=ranks.rows(apart),
        matrix=ranks.matrix(apart, offsets[last]),
        devices=_devices(history, last),
        final_loss=median(lines["loss"].values[-20:]) if "loss" in lines else math.nan,
        step_seconds=step_seconds,
        goodput=measure_goodput(min(offsets.values()), reached, undone, step_seconds, seconds),
        reached=reached,
        outcome=find_outcome(history, last, cases).words if over else "",
    )


def measure_goodput(first: int, last: int, rollbacks: Iterable[Undone], step_seconds: float, seconds: float) -> float:
    """Return the share of a run's `seconds` that its valid steps take at the median time of a step, `step_seconds`; NaN
    if unknown.

    Valid steps are those from `first` to `last` that no rollback undid. The rest went into the start, evaluations,
    checkpoints, stalls, restarts, and steps that were undone or done again.
    """
    steps, covered = last - first + 1, first - 1
    for undone in sorted(rollbacks, key=lambda one: one.to):
        begin, end = max(undone.to, covered), min(undone.at, last)
        steps -= max(end - begin, 0)
        covered = max(covered, end)
    return min(steps * step_seconds / seconds, 1.0) if steps > 0 and seconds > 0 else math.nan


def list_logged_panels(names: Iterable[str]) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return titles and signals of the charts of logged numbers, in the order in which they were first logged."""
    titles = {title for title, _ in SHOWN}  # a chart is found by its title
    logged = [name for name in dict.fromkeys(names) if name not in SIGNALS][:_LOGGED]
    return [(f"{name} (logged)" if name in titles else name, (name,)) for name in logged]


def find_unit(signal: str) -> str:
    """Return the unit of a signal; "1" for one that is not Sentinel's own."""
    return SIGNALS[signal].unit if signal in SIGNALS else "1"


def panels_of(
    kept: Sequence[tuple[int, Mapping[str, Series]]], titles: Iterable[tuple[str, Sequence[str]]]
) -> tuple[ReportPanel, ...]:
    """Return the charts for which there are samples. `kept`: (step of seq 0, series) of each attempt."""
    return tuple(filter(None, (_panel(kept, title, names) for title, names in titles)))


def _panel(kept: Sequence[tuple[int, Mapping[str, Series]]], title: str, names: Sequence[str]) -> ReportPanel | None:
    lines = []
    for name in names:
        steps, values = array("q"), array("d")
        for offset, columns in kept:
            if name in columns:
                seqs = columns[name].seqs
                steps.extend(array("q", [seq + offset for seq in seqs]) if offset else seqs)
                values.extend(columns[name].values)
        if steps:
            lines.append(ChartLine(name, steps, values))
    return ReportPanel(title, find_unit(names[0]), tuple(lines)) if lines else None


def _rollbacks(history: History, offsets: Mapping[int, int]) -> tuple[Undone, ...]:
    found = ((offsets.get(attempt, 0), to, at) for attempt, to, at in history.rollbacks())
    return tuple(Undone(to + offset, at + offset) for offset, to, at in found)


def _list_undone(history: History, offsets: Mapping[int, int]) -> Iterator[Undone]:
    """Yield the rollbacks, without the steps that a later attempt did again."""
    for attempt, to, at in history.rollbacks():
        again = min((offset for number, offset in offsets.items() if number > attempt), default=math.inf)
        offset = offsets.get(attempt, 0)
        yield Undone(to + offset, int(min(at + offset, again - 1)))


def heat_of(samples: Sequence[tuple[int, LayerStats]], offset: int) -> Heat | None:
    """Return the layers whose gradient norm changed most, in the model's order. A cell is the worst sample in it."""
    if len(samples) < 2:
        return None
    width = -(-len(samples) // COLUMNS)
    rows: dict[str, list[float | None]] = {}
    for at, (_, layers) in enumerate(samples):
        norms = layers.stats.get("layer_grad_norm", ())
        for name, norm in compress(zip(layers.names, norms, strict=False), layers.present):
            row = rows.setdefault(name, [None] * -(-len(samples) // width))
            row[at // width] = _worse(row[at // width], norm)
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
        return math.inf  # such layers are shown first
    finite = [value for value in values if value > 0]
    return math.log(max(finite) / min(finite)) if finite else 0.0


def _devices(history: History, attempt: int) -> tuple[tuple[str, dict[str, float]], ...]:
    found = []
    for device in history.devices(attempt=attempt):
        readings = history.readings(_DEVICE_SIGNALS, device, attempt=attempt)
        finite = {name: [*filter(math.isfinite, series.values)] for name, series in readings.items()}
        highest = {name: max(values) for name, values in finite.items() if values}
        if highest:
            found.append((device, highest))
    return tuple(found)
