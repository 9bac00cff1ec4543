"""Makes a report on a live run from the daemon's memory, which holds its last 2,048 steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sentinel.report import ranks
from sentinel.report.content import SHOWN, Report, Undone, heat_of, list_logged_panels, measure_goodput, panels_of
from sentinel.report.ranks import median
from sentinel.runs import Run
from sentinel.runs.steps import RunStep
from sentinel.store import Series

_RANK_STEPS = 256
_RANK_VALUES = 16_384
"""Most steps for the medians of all ranks together; `_RANK_STEPS` is the limit for one rank."""
_Row = tuple[int, float, Mapping[str, float]]


class LiveRun:
    """The live state of a run, as it was when this object was made. `undone`: (to, at) of rollbacks, as seqs."""

    def __init__(self, run: Run, cases: Iterable[Mapping[str, Any]], undone: Iterable[tuple[int, int]]) -> None:
        attempt, offset = run.attempt, run.attempt.step_offset
        self._run, self._number, self._offset = run, attempt.number, offset
        self._steps, self._layers, self._facts = list(attempt.recent), list(attempt.recent_layers), dict(attempt.facts)
        self._seconds, self._reached = max(attempt.find_end() - run.began, 0.0), attempt.closed_to + offset
        self._rollbacks = tuple(Undone(to + offset, at + offset) for to, at in undone)
        self._incidents = tuple(dict(case) for case in cases)
        self._devices = tuple((f"gpu {gpu.index}", dict(gpu.values)) for gpu in attempt.devices.gpus.values())

    def make_report(self) -> Report:
        """Make the report on the steps in memory: on a thread, as a large model's layers take a while. The goodput of a
        run that was started again is unknown: what it did before is only in its history."""
        run, steps, offset, seconds = self._run, self._steps, self._offset, self._seconds
        titles = (*SHOWN, *list_logged_panels(name for step in steps for name in step.run))
        shown, apart = tuple(name for _, names in titles for name in names), _apart(steps)
        columns = dict(_list_series([(step.seq, step.time, step.run) for step in steps], shown))
        step_seconds = median(columns["step_seconds"].values) if "step_seconds" in columns else math.nan
        first, last = (steps[0].seq + offset, steps[-1].seq + offset) if steps else (0, 0)
        goodput = measure_goodput(offset, self._reached, self._rollbacks, step_seconds, seconds)
        return Report(
            run=run.name, run_id=run.run_id, attempts=self._number + 1, began=run.began, seconds=seconds,
            first=first, last=last, facts=self._facts, panels=panels_of([(offset, columns)], titles),
            incidents=self._incidents, rollbacks=self._rollbacks, heat=heat_of(self._layers, offset),
            ranks=ranks.rows(apart) if len(apart) > 1 else (), matrix=ranks.matrix(apart, offset),
            final_loss=median([step.run["loss"] for step in steps[-20:] if "loss" in step.run]),
            devices=self._devices, step_seconds=step_seconds, goodput=math.nan if self._number else goodput,
        )  # fmt: skip


def _apart(steps: list[RunStep]) -> dict[int, dict[str, Series]]:
    """Return the series of each rank, of as many of the last steps as a daemon with many ranks has time for."""
    numbers = sorted({rank for step in steps[-1:] for rank in step.ranks})
    recent = steps[-max(16, min(_RANK_STEPS, _RANK_VALUES // max(1, len(numbers)))) :]
    rows = {
        rank: [(step.seq, step.time, step.ranks[rank]) for step in recent if rank in step.ranks] for rank in numbers
    }
    return {rank: dict(_list_series(own, ranks.NAMES)) for rank, own in rows.items()}


def _list_series(rows: list[_Row], names: Iterable[str]) -> Iterator[tuple[str, Series]]:
    """Yield a series for each name that occurs in rows of (seq, time, values)."""
    for name in names:
        if seen := [(seq, time, values[name]) for seq, time, values in rows if name in values]:
            seqs, times, values = zip(*seen, strict=True)
            yield name, Series(array("q", seqs), array("d", times), array("d", values))
