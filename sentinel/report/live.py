"""A live run as a report: from the daemon's memory, which holds its last 2,048 steps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sentinel.report import ranks
from sentinel.report.content import (
    SHOWN,
    ChartLine,
    Report,
    ReportPanel,
    Undone,
    find_unit,
    heat_of,
    list_logged_panels,
)
from sentinel.report.ranks import median
from sentinel.runs import Attempt
from sentinel.runs.steps import RunStep
from sentinel.store import Series

_RANK_STEPS = 256
_RANK_VALUES = 16_384
"""Steps that a rank's medians are of, at most, and steps of all ranks together."""


def report(
    name: str, run_id: str, attempt: Attempt, cases: Iterable[Mapping[str, Any]], undone: Iterable[tuple[int, int]]
) -> Report:
    """Of the steps that are remembered. `undone`: (to, at) of rollbacks, as seqs. Reads live state."""
    steps, offset = list(attempt.recent), attempt.step_offset
    titles = (*SHOWN, *list_logged_panels(name for step in steps for name in step.run))
    panels = tuple(filter(None, (_panel(steps, title, names, offset) for title, names in titles)))
    apart = _apart(steps)
    began, seconds = _find_times(attempt, steps)
    losses = [step.run["loss"] for step in steps[-20:] if "loss" in step.run]
    return Report(
        run=name,
        run_id=run_id,
        attempts=attempt.number + 1,
        began=began,
        seconds=seconds,
        first=steps[0].seq + offset if steps else 0,
        last=steps[-1].seq + offset if steps else 0,
        facts=dict(attempt.facts),
        panels=panels,
        incidents=tuple(dict(case) for case in cases),
        rollbacks=tuple(Undone(to + offset, at + offset) for to, at in undone),
        heat=heat_of(list(attempt.recent_layers), offset),
        ranks=ranks.rows(apart) if len(apart) > 1 else (),
        matrix=ranks.matrix(apart, offset),
        devices=tuple((f"gpu {gpu.index}", dict(gpu.values)) for gpu in attempt.devices.gpus.values()),
        final_loss=median(losses),
    )


def _find_times(attempt: Attempt, steps: list[RunStep]) -> tuple[float, float]:
    """(Unix time of the beginning, seconds until now), or until the last word of ranks that have gone. A daemon that
    was started again knows only what it remembers."""
    now = time.monotonic()
    end = now if attempt.live else max((rank.heard for rank in attempt.ranks.values()), default=now)
    remembered = steps[-1].time - steps[0].time if steps else 0.0
    seconds = max(end - attempt.began, remembered, 0.0)
    return time.time() - (now - end) - seconds, seconds


def _panel(steps: list[RunStep], title: str, names: tuple[str, ...], offset: int) -> ReportPanel | None:
    lines = []
    for name in names:
        seen = [step for step in steps if name in step.run]
        if seen:
            lines.append(ChartLine(name, [step.seq + offset for step in seen], [step.run[name] for step in seen]))
    return ReportPanel(title, find_unit(names[0]), tuple(lines)) if lines else None


def _apart(steps: list[RunStep]) -> dict[int, dict[str, Series]]:
    """Series of each rank, of as many of the last steps as a daemon with many ranks has time for."""
    numbers = sorted({rank for step in steps[-1:] for rank in step.ranks})
    recent = steps[-max(16, min(_RANK_STEPS, _RANK_VALUES // max(1, len(numbers)))) :]
    return {number: dict(_series(recent, number)) for number in numbers}


def _series(steps: list[RunStep], rank: int) -> Iterator[tuple[str, Series]]:
    own = [(step.seq, step.time, step.ranks[rank]) for step in steps if rank in step.ranks]
    for name in ranks.NAMES:
        seen = [(seq, time, values[name]) for seq, time, values in own if name in values]
        if seen:
            seqs, times, values = zip(*seen, strict=True)
            yield name, Series(array("q", seqs), array("d", times), array("d", values))
