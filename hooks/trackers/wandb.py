"""Weights & Biases: writes into the script's `wandb.run`.

`Run.log` without a step and with `commit=False` adds to the row that the script commits next: it is the only way that
neither moves the script's step nor ends its row. So a row takes marks of one step, on their own axis (`define_metric`),
and the next marks wait until it is committed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from sentinel.hooks.trackers import NAMESPACE, IncidentMark, Summary

NAME = "wandb"

STEP = f"{NAMESPACE}step"
SHOWN = 50
"""Most texts of incidents in the summary: the last ones."""


class WandbRun:
    """Writes into W&B's run. See `Tracker`."""

    def __init__(self) -> None:
        self._prepared: weakref.ref[Any] | None = None
        """The run whose axis is defined."""
        self._row: int | None = None
        """Step of the script's row that holds our last marks; None: no open row holds any."""
        self._texts: list[str] = []

    def look(self) -> None:
        """Do nothing: `wandb.run` is the same on all threads."""

    @property
    def open(self) -> bool:
        """Whether the script has a run open."""
        return getattr(sys.modules.get("wandb"), "run", None) is not None

    def write(self, marks: Sequence[IncidentMark], summary: Summary | None) -> int:
        """Write marks of one step, if the script's row has none yet. At the end, the summary gets the texts of all."""
        run: Any = sys.modules["wandb"].run
        if self._prepared is None or self._prepared() is not run:
            run.define_metric(STEP, hidden=True)
            run.define_metric(f"{NAMESPACE}*", step_metric=STEP)
            self._prepared, self._row = weakref.ref(run), None
        taken = self._add_to_row(run, marks)
        if summary is not None:
            texts = [*self._texts, *(mark.text for mark in marks[taken:])]
            shown = {f"{NAMESPACE}incidents": texts[-SHOWN:]} if texts else {}
            run.summary.update({f"{NAMESPACE}summary": summary.text, **summary.counts, **shown})
            return len(marks)
        return taken

    def _add_to_row(self, run: Any, marks: Sequence[IncidentMark]) -> int:
        if not marks or (self._row is not None and run.step <= self._row):
            return 0
        row = dict[str, IncidentMark]()
        for mark in takewhile(lambda mark: mark.step == marks[0].step and mark.key not in row, marks):
            row[mark.key] = mark
        text = "\n".join(mark.text for mark in row.values())
        levels = {mark.key: mark.level for mark in row.values()}
        run.log({**levels, f"{NAMESPACE}incident": text, STEP: marks[0].step}, commit=False)
        self._row = run.step  # read after the call: the script may have committed a row meanwhile
        self._texts = [*self._texts, *(mark.text for mark in row.values())][-SHOWN:]
        return len(row)

    def close(self) -> None:
        """Do nothing: `look` puts nothing in place."""
