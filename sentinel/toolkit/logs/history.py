"""Reads Sentinel's history of a run: the steps that a daemon judged, with ranks, layers and the rollbacks between."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

from sentinel.engine import Observation, Rewound, Staged
from sentinel.errors import ConfigError, LogError
from sentinel.rulebook.observation import observation
from sentinel.store import History
from sentinel.toolkit.logs.recording import LogColumn, Recording

NAME = "Sentinel's history"


class LoggedAttempt(Recording):
    """One attempt of a run. Its columns have the names of metrics already."""

    def __init__(self, path: Path, history: History, number: int, *, alone: bool) -> None:
        super().__init__(path, NAME)
        self.run = history.run_id if alone else f"{history.run_id}, attempt {number}"
        self._number = number
        self.step_offset = history.step_offset(number)
        for seq, time in _times(history, number):
            self._steps.append(seq + self.step_offset)
            self._times.append(time)
        rows = {step: row for row, step in enumerate(self._steps)}
        for name in history.signals(attempt=number):
            series = history.series(name, attempt=number)
            at = array("q", [rows[seq + self.step_offset] for seq in series.seqs])
            self.columns[name] = LogColumn(at, series.values)

    @property
    def rl_columns(self) -> tuple[str, ...]:
        """No columns: a column of its own says whether the run was judged as reinforcement learning."""
        return ()

    def observations(self, chosen: Mapping[str, str]) -> Iterator[Observation | Rewound | Staged]:
        """Yield the steps as they were judged."""
        with History(self.path) as history:
            between = sorted(self._list_between(history), key=lambda found: found[0])
            for step in history.steps(attempt=self._number):
                while between and step.seq >= between[0][0]:
                    yield between.pop(0)[1]
                yield observation(step)

    def _list_between(self, history: History) -> Iterator[tuple[int, Rewound | Staged]]:
        """Yield rollbacks and stages between steps, each with the first step after it."""
        for attempt, to, at in history.rollbacks():
            if attempt == self._number:
                yield at + 1, Rewound(to, at, self.step_offset)
        for event in history.events("stage"):
            if event.attempt == self._number:
                yield event.seq, Staged()


def recognise(path: Path, head: bytes) -> bool:
    """Whether the file is a SQLite database."""
    return head.startswith(b"SQLite format 3\0")


def read(path: Path) -> list[Recording]:
    """Return a recording for each attempt with steps. Raises LogError if this version cannot read the history."""
    try:
        with History(path) as history:
            numbers = [number for number, _, _ in history.attempts() if history.last_seq(number) >= 0]
            return [LoggedAttempt(path, history, number, alone=len(numbers) == 1) for number in numbers]
    except (ConfigError, sqlite3.Error) as error:
        raise LogError(str(error)) from None


def _times(history: History, number: int) -> Iterator[tuple[int, float]]:
    for step in history.steps(attempt=number):
        yield step.seq, step.time
