"""A recorded run: rows as they were logged, and the observations that rules get from them."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from sentinel.engine import RUN, Entity, Observation, Rewound, Staged
from sentinel.errors import LogError
from sentinel.naming import choose_columns, find_rl_columns

RANK = Entity("rank", "0")
"""The only rank of a log that does not distinguish ranks: its numbers are the run's and rank 0's."""

SHOWN_FAULTS = 3
"""Most bad lines that are quoted; the others are counted."""

WITHHELD_ROWS = 16
"""Most consecutive non-finite norms that may come from steps that a scaler withheld: the number of halvings in its
search for the first scale (docs/detection.md)."""

EXPLODED = 100.0
"""Multiple of the median of a log's norms above which a gradient overflows by itself, and not because of the scaler's
search: two recorded explosions reach 1e8 times and more beside their infinite rows."""

RESTART_LIMIT = 100
"""How often steps may go back. Above it, they are not steps of a run but of an epoch, a chunk, a worker."""


def number(value: object) -> float | None:
    """Return a logged value as a number, also in any spelling of NaN and infinity; None if it is none."""
    if isinstance(value, float):
        return value
    if isinstance(value, int | str):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None
    return None


@dataclass(slots=True)
class BadLines:
    """The lines of a log that could not be read."""

    path: Path
    count: int = 0
    shown: list[str] = field(default_factory=list)
    """The first few, as `file:line: what is wrong`."""

    def add(self, line: int, message: str) -> None:
        """Count a bad line. `line`: its number from 1."""
        self.count += 1
        if self.count <= SHOWN_FAULTS:
            self.shown.append(f"{self.path}:{line}: {message}")


@dataclass(slots=True)
class LogColumn:
    """One logged quantity: the rows that have it, and its values there."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def put(self, row: int, value: float) -> bool:
        """Add a value; a second one for a row replaces the first. Returns whether it did."""
        if self.rows and self.rows[-1] == row:
            self.values[-1] = value
            return True
        self.rows.append(row)
        self.values.append(value)
        return False


class Recording:
    """One run as it was logged: columns over rows."""

    def __init__(self, path: Path, format: str) -> None:
        self.path, self.format = path, format
        self.run = ""
        """Name of the run, if the log has it."""
        self.step_offset = 0
        """What to add to a seq to get the logged step, before any rewind."""
        self.judged_from: int | None = None
        """First step that the rules see, if the source has only some of the steps before it."""
        self.columns: dict[str, LogColumn] = {}
        self.faults = BadLines(path)
        self.replaced = 0
        """How many rows replaced a value of the row before, as both have one step."""
        self._steps, self._times = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """Names of the columns, in the order in which they first appear."""
        return list(self.columns)

    @property
    def rl_columns(self) -> tuple[str, ...]:
        """The columns by which the log is recognised as reinforcement learning; empty if it is not."""
        return find_rl_columns(self.names)

    @property
    def timed(self) -> bool:
        """Whether the log says when its rows were written."""
        return any(not math.isnan(time) for time in self._times)

    def add(self, step: int | None, time: float | None, values: Mapping[str, float]) -> None:
        """Add a row. If it has the step of the row before, it is joined to it; without a step, it is the next step."""
        if step is None:
            step = self._steps[-1] + 1 if self._steps else 0
        if not self._steps or step != self._steps[-1]:
            self._steps.append(step)
            self._times.append(math.nan if time is None else time)
        row, replaces = len(self._steps) - 1, False
        for name, value in values.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = LogColumn()
            replaces |= column.put(row, value)
        self.replaced += replaces

    def choose_columns(self, wanted: Collection[str], named: Mapping[str, str]) -> dict[str, str]:
        """Return metric -> column for the metrics in `wanted`, as `naming.choose_columns` does."""
        return choose_columns(self.names, wanted, named)

    def check(self) -> Recording:
        """Return the recording itself. Raises LogError if it is empty, or if all rows are of one step."""
        if not self.columns:
            because = f": {self.faults.shown[0]}" if self.faults.shown else ""
            raise LogError(f"{self.path}: no row of numbers in it, read as {self.format}{because}")
        if self.replaced and len(self) == 1:
            raise LogError(
                f"{self.path}: its {self.replaced + 1} rows all have step {self._steps[0]}, read as {self.format}: "
                "rename the column if it is not the number of a step, as where `batch` is a size"
            )
        return self

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of a column, as logged."""
        column = self.columns[name]
        return [self._steps[row] for row in column.rows], list(column.values)

    def observations(self, chosen: Mapping[str, str]) -> Iterator[Observation | Rewound | Staged]:
        """Yield what the rules see, with a `Rewound` where the log was resumed further back.

        `chosen`: the column of each metric. The seq of an observation is the logged step, as long as it rises. If a log
        does not say which steps a scaler withheld, a non-finite norm is left out if the norms around it are healthy: it
        did not reach the weights. So is a rate of 0 in a log that rounds its rates. If there are `rl_columns`, the
        first row, and the first after a `Rewound`, says so.
        """
        mark = {"reinforcement_learning": 1.0} if self.rl_columns else {}
        columns = {metric: self.columns[name] for metric, name in chosen.items()}
        if "grad_norm" in columns and "step_skipped" not in columns:
            columns["grad_norm"] = self._leave_withheld_out(columns["grad_norm"])
        if "learning_rate" in columns:
            columns["learning_rate"] = _leave_rounded_out(columns["learning_rate"])
        kept = sorted(set().union(*(column.rows for column in columns.values())))
        clock = _Clock(self._times, columns.get("step_seconds"))
        steps = self._lasting(kept)
        cursors = [(metric, iter(zip(column.rows, column.values, strict=True))) for metric, column in columns.items()]
        heads = [next(cursor, None) for _, cursor in cursors]
        trail = _Trail()
        for row, step in zip(kept, steps, strict=True):
            values = dict(mark) if not len(trail) else {}
            for i, (metric, cursor) in enumerate(cursors):
                head = heads[i]
                if head is not None and head[0] == row:
                    values[metric] = head[1]
                    heads[i] = next(cursor, None)
            rewound = trail.went_back(step)
            if rewound is not None:
                values |= mark
                yield rewound
            seq = trail.take(step)
            yield Observation(seq, clock.read_time(row, seq, values), {RUN: values, RANK: values})

    def _leave_withheld_out(self, norms: LogColumn) -> LogColumn:
        kept, held, before = LogColumn(), list[tuple[int, float]](), 0.0
        limit = EXPLODED * statistics.median([norm for norm in norms.values if math.isfinite(norm)] or [0.0])
        for row, norm in zip(norms.rows, norms.values, strict=True):
            if not math.isfinite(norm):
                held.append((row, norm))
                continue
            resumed = bool(held) and self._steps[row] <= self._steps[held[-1][0]]  # then its weights are older
            for each in held if resumed or len(held) > WITHHELD_ROWS or max(before, norm) > limit else ():
                kept.put(*each)
            held.clear()
            kept.put(row, before := norm)
        for each in held:
            kept.put(*each)
        return kept

    def _lasting(self, kept: list[int]) -> list[int]:
        """Return the steps of the rows that count; the rows' numbers if the logged steps start over all the time."""
        steps = [self._steps[row] for row in kept]
        restarts = sum(later <= earlier for earlier, later in pairwise(steps))
        return kept if restarts > RESTART_LIMIT or (restarts and self._starts_with_epochs(kept, steps)) else steps

    def _starts_with_epochs(self, kept: list[int], steps: list[int]) -> bool:
        """Whether the steps start over exactly where the epoch rises."""
        epoch = self.columns.get("epoch")
        if epoch is None:
            return False
        of = dict(zip(epoch.rows, epoch.values, strict=True))
        return all(
            of.get(kept[i], math.nan) >= of.get(kept[i - 1], math.nan) + 1
            for i in range(1, len(steps))
            if steps[i] <= steps[i - 1]
        )


def _leave_rounded_out(rates: LogColumn) -> LogColumn:
    """Return the rates without zeros, if a zero may be a rate below the last digit of the log.

    That is so if all rates are multiples of the smallest, which is one unit of a decimal place, and the highest is at
    least ten times that.
    """
    positive = {rate for rate in rates.values if 0 < rate < math.inf}
    unit = min(positive, default=0.0)
    is_digit = unit > 0 and math.isclose(math.log10(unit), round(math.log10(unit)), abs_tol=1e-9)
    if not is_digit or max(positive) < 10 * unit or any(abs(r / unit - round(r / unit)) > 1e-6 for r in positive):
        return rates
    kept = LogColumn()
    for row, rate in zip(rates.rows, rates.values, strict=True):
        if rate != 0:
            kept.put(row, rate)
    return kept


class _Trail:
    """Gives a logged step its seq, which never falls: steps that a resumed log repeats are new, after a rewind."""

    def __init__(self) -> None:
        self._steps, self._seqs = array("q"), array("q")
        self._shift, self._last = 0, -1

    def __len__(self) -> int:
        return len(self._steps)

    def went_back(self, step: int) -> Rewound | None:
        """Return the rewind, if this step is not after the one before."""
        if not self._steps or step > self._steps[-1]:
            return None
        keep = bisect_left(self._steps, step)
        to = self._seqs[keep - 1] if keep else self._seqs[0] - 1
        del self._steps[keep:], self._seqs[keep:]
        self._shift = self._last + 1 - step
        return Rewound(to, self._last, -self._shift)

    def take(self, step: int) -> int:
        """Add a step, and return its seq."""
        self._last = step + self._shift
        self._steps.append(step)
        self._seqs.append(self._last)
        return self._last


class _Clock:
    """The time of a row: the log's; or from the durations of its steps; or, without both, one second per step."""

    def __init__(self, times: array[float], step_seconds: LogColumn | None) -> None:
        self._times, self._counts = times, step_seconds is not None
        self._now, self._seq = 0.0, 0

    def read_time(self, row: int, seq: int, values: Mapping[str, float]) -> float:
        """Return the time of a row in seconds; it never falls."""
        logged = self._times[row]
        if not math.isnan(logged):
            self._now = max(self._now, logged)
        else:
            length = values.get("step_seconds", 0.0 if self._counts else 1.0)
            if math.isfinite(length) and length > 0:
                self._now += length * max(seq - self._seq, 1)
        self._seq = seq
        return self._now
