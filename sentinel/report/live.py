"""A live run as a report: from the daemon's memory, which holds its last 2,048 steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from sentinel.report.content import SHOWN, Line, Panel, RankRow, Report, Undone, heat_of, median
from sentinel.runs import Attempt, Step
from sentinel.signals import SIGNALS

_RANK_STEPS = 256
"""Steps that a rank's medians are of."""


def report(
    name: str, run_id: str, attempt: Attempt, cases: Iterable[Mapping[str, Any]], undone: Iterable[tuple[int, int]]
) -> Report:
    """Of the steps that are remembered. `undone`: (to, at) of rollbacks, as seqs. Reads live state."""
    steps, offset = list(attempt.recent), attempt.step_offset
    panels = tuple(filter(None, (_panel(steps, title, names, offset) for title, names in SHOWN)))
    losses = [step.run["loss"] for step in steps[-20:] if "loss" in step.run]
    return Report(
        run=name,
        run_id=run_id,
        attempts=attempt.number + 1,
        began=time.time() - (steps[-1].time - steps[0].time) if steps else 0.0,
        seconds=steps[-1].time - steps[0].time if steps else 0.0,
        first=steps[0].seq + offset if steps else 0,
        last=steps[-1].seq + offset if steps else 0,
        facts=dict(attempt.facts),
        panels=panels,
        incidents=tuple(dict(case) for case in cases),
        rollbacks=tuple(Undone(to + offset, at + offset) for to, at in undone),
        heat=heat_of(list(attempt.recent_layers), offset),
        ranks=_ranks(steps[-_RANK_STEPS:]),
        devices=tuple((f"gpu {gpu.index}", dict(gpu.values)) for gpu in attempt.devices.gpus.values()),
        final_loss=median(losses),
    )


def _panel(steps: list[Step], title: str, names: tuple[str, ...], offset: int) -> Panel | None:
    lines = []
    for name in names:
        seen = [step for step in steps if name in step.run]
        if seen:
            lines.append(Line(name, [step.seq + offset for step in seen], [step.run[name] for step in seen]))
    return Panel(title, SIGNALS[names[0]].unit, tuple(lines)) if lines else None


def _ranks(steps: list[Step]) -> tuple[RankRow, ...]:
    numbers = sorted({rank for step in steps for rank in step.ranks})
    return tuple(_rank(steps, number) for number in numbers) if len(numbers) > 1 else ()


def _rank(steps: list[Step], number: int) -> RankRow:
    own = [step.ranks[number] for step in steps if number in step.ranks]

    def middle(signal: str) -> float:
        return median([values[signal] for values in own if signal in values])

    return RankRow(
        number, len(own), middle("loss"), middle("step_seconds"), middle("data_seconds"), middle("rss_bytes")
    )
