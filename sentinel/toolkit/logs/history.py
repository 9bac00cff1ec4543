"""Reads Sentinel's history of a run: the steps that a daemon judged, with ranks, layers and the rollbacks between."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from sentinel.engine import Observation, Rewound, Staged
from sentinel.errors import ConfigError, LogError
from sentinel.rulebook.observation import mark_resumed, observation
from sentinel.store import FIRST, History
from sentinel.toolkit.logs.recording import Recording

NAME = "Sentinel's history"


class LoggedAttempt(Recording):
    """One attempt of a run. Its columns have the names of metrics already."""

    def __init__(self, path: Path, history: History, number: int, *, alone: bool) -> None:
        super().__init__(path, NAME)
        self.run = history.run_id if alone else f"{history.run_id}, attempt {number}"
        self._number = number
        self.step_offset = history.step_offset(number)
        for seq, time, values in history.rows(attempt=number):
            self.add(seq + self.step_offset, time, values)
        self._whole = history.find_whole(number)
        if self._whole != FIRST:
            self.judged_from = self._whole + self.step_offset

    @property
    def rl_columns(self) -> tuple[str, ...]:
        """No columns: a column of its own says whether the run was judged as reinforcement learning."""
        return ()

    def choose_columns(self, wanted: Collection[str], named: Mapping[str, str]) -> dict[str, str]:
        """Return the columns in `wanted`, which have the names of metrics, and those that the user takes for others."""
        chosen = super().choose_columns(wanted, named)
        return {metric: column for metric, column in chosen.items() if column == metric or column in named}

    def observations(self, chosen: Mapping[str, str]) -> Iterator[Observation | Rewound | Staged]:
        """Yield the steps as they were judged, and as far as all are kept: of the steps before, the highest are, which
        windows of samples would take for usual."""
        taken = {metric: column for metric, column in chosen.items() if metric != column}
        with History(self.path) as history:
            between = sorted(self._list_between(history), key=lambda found: found[0])
            first: int | None = None
            for step in history.steps(attempt=self._number, after=self._whole - 1):
                while between and step.seq >= between[0][0]:
                    _, item = between.pop(0)
                    if isinstance(item, Rewound) and first is not None and item.to < first:
                        first = None  # the rules start over
                    yield item
                seen = _take_columns(observation(step), taken)
                yield seen if first is not None or step.seq == 0 else mark_resumed(seen)
                first = step.seq if first is None else first

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


def _take_columns(seen: Observation, taken: Mapping[str, str]) -> Observation:
    """Return an observation with other columns in place of some metrics. `taken`: metric -> column."""
    if not taken:
        return seen
    values = {
        entity: {name: value for name, value in own.items() if name not in taken}
        | {metric: own[column] for metric, column in taken.items() if column in own}
        for entity, own in seen.values.items()
    }
    return msgspec.structs.replace(seen, values=values)
