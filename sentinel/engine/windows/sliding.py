"""Windows over a series: the memory of rules about a metric, at a cost per sample independent of the window's size.

    Past, WindowChange    the newest and the oldest of so many samples: past, delta
    Recent            the samples of a window, by count or by age
      Ends            newest and oldest of it: rate; delta by age
      CountedByAge    how many of it are true: count
      Ordered         and the same samples sorted: median, quantile, mad (order_statistics.py)
      Folded          and their folds by two stacks: mean, std, sum, slope; min and max by age (folds.py)
    Counted           of so many samples those that are true: count
    Extreme           of so many samples those that may still become the largest: min, max
    Steady            of stretches of 12, 24, 48, ... samples, the low-water marks of twelfths: steady_rise (steady.py)
    First, Lowest, Highest, Smoothed    one number, of all samples since the run's start (since_start.py)

A window takes finite numbers only. `push` returns the statistic, or None where the window has not enough samples.
Everything here is data, with no closure in it: the evaluator copies states by pickling them. `push` is most of what
a daemon computes, so the frequent operations of windows by count are written out in each class: a call would double
the cost.
Figures: docs/performance.md, by bench/engine.py.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import MutableSequence, Sequence
from typing import Protocol

SAMPLE_LIMIT = 100_000
"""Samples in one window, at most, 0.8 MB. A duration that holds more loses its oldest."""


class WindowState(Protocol):
    """What a function with a memory keeps for one series."""

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; return the statistic, or None where there are not enough samples for it."""


class Past:
    """A ring of the newest `count` samples, which returns the oldest."""

    __slots__ = ("_count", "_oldest", "_values")

    def __init__(self, count: int) -> None:
        self._count = min(count, SAMPLE_LIMIT)
        self._values, self._oldest = list[float](), 0  # an array would create a float for each element that is read

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; return the oldest, once there are `count`."""
        values, oldest = self._values, self._oldest
        if len(values) < self._count:
            values.append(value)
            return values[0] if len(values) == self._count else None
        values[oldest] = value
        self._oldest = oldest = oldest + 1 if oldest + 1 < self._count else 0
        return values[oldest]


class WindowChange(Past):
    """The newest sample minus the oldest of the newest `count`."""

    __slots__ = ("_needed",)

    def __init__(self, count: int, needed: int = 0) -> None:
        super().__init__(count)
        self._needed = max(2, min(needed, self._count) if needed else self._count)

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; return the difference, once there are as many samples as needed, and at least two."""
        values, oldest = self._values, self._oldest
        if len(values) < self._count:
            values.append(value)
            return value - values[0] if len(values) >= self._needed else None
        values[oldest] = value
        self._oldest = oldest = oldest + 1 if oldest + 1 < self._count else 0
        return value - values[oldest]


class Recent:
    """The newest `count` samples, or those of the last `seconds` (a sample exactly that old is out).

    By count, as most windows are, a ring: `_start` is the place of the oldest once it is full. By age, an array whose
    first `_start` samples are dead; it is moved down once half of it is, which is O(1) per sample, amortised.
    """

    __slots__ = ("_born", "_count", "_needed", "_seconds", "_start", "_times", "_values")

    def __init__(self, count: int, seconds: float = 0.0, needed: int = 0, timed: bool = False) -> None:
        self._count, self._seconds = min(count or SAMPLE_LIMIT, SAMPLE_LIMIT), seconds
        self._needed = min(needed, self._count) if needed or seconds else self._count
        self._values: MutableSequence[float] = array("d")
        self._times = array("d") if timed or seconds else None
        self._start, self._born = 0, math.nan

    def __len__(self) -> int:
        return len(self._values) - (0 if self._times is None else self._start)

    def _take(self, time: float, value: float) -> Sequence[float]:
        """Put a sample in; return the samples that leave, oldest first."""
        if self._times is not None:
            return self._take_by_age(self._times, time, value)
        values = self._values
        if len(values) < self._count:
            values.append(value)
            return ()
        start = self._start
        oldest = values[start]
        values[start] = value
        self._start = start + 1 if start + 1 < self._count else 0
        return (oldest,)

    def _take_by_age(self, times: array[float], time: float, value: float) -> Sequence[float]:
        values, first = self._values, self._start
        values.append(value)
        times.append(time)
        if math.isnan(self._born):
            self._born = time
        stop = max(first, len(values) - self._count)
        if self._seconds > 0.0:
            while stop < len(times) - 1 and times[stop] <= time - self._seconds:
                stop += 1
        leaving, self._start = values[first:stop], stop
        if stop >= 32 and 2 * stop >= len(values):
            del values[:stop], times[:stop]
            self._start = 0
        return leaving

    def _ready(self, time: float) -> bool:
        if self._times is None:
            return len(self._values) >= self._needed
        if self._needed:
            return len(self) >= self._needed
        return time - self._born >= self._seconds  # a duration is full once it has passed since the first sample

    def _in_order(self) -> Sequence[float]:
        """Return the samples, oldest first."""
        values, start = self._values, self._start
        return values[start:] if self._times is not None else [*values[start:], *values[:start]]


class Ends(Recent):
    """The change over a window by count or by age, from its oldest sample to its newest."""

    __slots__ = ("_what",)

    def __init__(self, what: str, count: int, seconds: float = 0.0, needed: int = 0) -> None:
        super().__init__(count, seconds, needed, timed=True)
        self._what = what

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; return `delta` (newest less oldest) or `rate` (delta per second)."""
        self._take(time, value)
        if not self._ready(time):
            return None
        oldest = self._values[self._start]
        if self._what == "delta":
            return value - oldest if len(self) > 1 else None
        assert self._times is not None
        elapsed = time - self._times[self._start]
        return (value - oldest) / elapsed if elapsed > 0 else None


class Counted:
    """How many of the newest `count` samples of a condition are true.

    It keeps the positions of the true samples, which are usually few.
    """

    __slots__ = ("_count", "_first", "_needed", "_seen", "_true", "_trues")

    def __init__(self, count: int, needed: int = 0) -> None:
        self._count = min(count, SAMPLE_LIMIT)
        self._needed = min(needed, self._count) if needed else self._count
        self._trues = list[int]()
        self._first = self._seen = 0
        self._true = 0.0

    def push(self, time: float, value: float) -> float | None:
        """Take the newest truth value; return how many are true."""
        self._seen = seen = self._seen + 1
        if value or self._true:
            self._true = self._count_trues(seen, value)
        return self._true if seen >= self._needed else None

    def _count_trues(self, seen: int, value: float) -> float:
        trues, first = self._trues, self._first
        if value:
            trues.append(seen)
        if trues[first] <= seen - self._count:
            first += 1
            if first >= 32 and 2 * first >= len(trues):
                del trues[:first]
                first = 0
            self._first = first
        return float(len(trues) - first)


class CountedByAge(Recent):
    """How many samples of a condition are true in the last `seconds`."""

    __slots__ = ("_true",)

    def __init__(self, seconds: float, needed: int = 0) -> None:
        super().__init__(0, seconds, needed)
        self._true = 0.0

    def push(self, time: float, value: float) -> float | None:
        """Take the newest truth value; return how many are true."""
        self._true += value - math.fsum(self._take(time, value))
        return self._true if self._ready(time) else None


class Extreme:
    """The largest of the newest `count` samples. Keeps the samples that no later one exceeds, in falling order.

    The first of them is the largest; it leaves when its time comes, and a new sample drops all that are not above it:
    O(1) per sample, amortised. The smallest is the largest of the negated samples. An infinity, which no sample drops,
    stands before the first one.
    """

    __slots__ = ("_count", "_first", "_leaving", "_needed", "_seen", "_sign", "_values")

    def __init__(self, sign: float, count: int, needed: int = 0) -> None:
        self._sign, self._count = sign, count
        self._needed = min(needed, count) if needed else count
        self._values, self._leaving = [math.inf], [0]
        """For each kept sample, the number of the sample at which it leaves the window."""
        self._first, self._seen = 1, 0

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; return the largest value, or the smallest where `sign` is -1."""
        values, leaving, first, sign = self._values, self._leaving, self._first, self._sign
        value *= sign
        self._seen = seen = self._seen + 1
        while values[-1] <= value:
            values.pop()
            leaving.pop()
        values.append(value)
        leaving.append(seen + self._count)
        if leaving[first] <= seen:
            values[first] = math.inf
            first += 1
            if first >= 32 and 2 * first >= len(values):
                del values[: first - 1], leaving[: first - 1]
                first = 1
            self._first = first
        return values[first] * sign if seen >= self._needed else None
