"""Windows over a series: what a rule remembers of a metric, at a cost a sample that does not grow with the window.

    Recent            the samples of a window, by count or by age, in one array
      Ends            newest and oldest of it: delta, rate, past
      Counted         how many of it are true: count
      Ordered         and the same samples sorted: median, quantile, mad
      Folded          and their folds by two stacks: mean, std, sum, min, max, slope

A window takes finite numbers only. `push` answers the statistic, or None where the window has not enough samples.
Everything here is data, with no closure in it: the evaluator copies states by pickling them.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import ClassVar

SAMPLE_LIMIT = 100_000
"""Samples in one window, 0.8 MB. A duration that holds more loses its oldest."""


class Recent:
    """The newest `count` samples, or those of the last `seconds` (the one that is exactly that old is out)."""

    __slots__ = ("_born", "_count", "_needed", "_seconds", "_start", "_times", "_values")

    def __init__(self, count: int, seconds: float = 0.0, needed: int = 0, timed: bool = False) -> None:
        self._count, self._seconds = min(count or SAMPLE_LIMIT, SAMPLE_LIMIT), seconds
        self._needed = min(needed, self._count) if needed or seconds else self._count
        self._values = array("d")
        self._times = array("d") if timed or seconds else None
        self._start, self._born = 0, math.nan

    def __len__(self) -> int:
        return len(self._values) - self._start

    def _take(self, time: float, value: float) -> int:
        """Append a sample; answer how many of the oldest have to leave (none where it is below 1)."""
        self._values.append(value)
        leaving = len(self._values) - self._start - self._count
        if self._times is None:  # by count, as most windows are
            return leaving
        self._times.append(time)
        if math.isnan(self._born):
            self._born = time
        if self._seconds > 0.0:
            leaving = max(leaving, 0)
            while self._times[self._start + leaving] <= time - self._seconds:
                leaving += 1
        return leaving

    def _drop(self) -> float:
        """Let the oldest sample go. The array is moved down once half of it is dead: O(1) a sample, amortised."""
        oldest = self._values[self._start]
        self._start += 1
        if self._start >= 32 and 2 * self._start >= len(self._values):
            del self._values[: self._start]
            if self._times is not None:
                del self._times[: self._start]
            self._start = 0
        return oldest

    def _ready(self, time: float) -> bool:
        if self._needed:
            return len(self._values) - self._start >= self._needed
        return time - self._born >= self._seconds  # a duration is full once it has been lived through


class Ends(Recent):
    """From the oldest sample to the newest."""

    __slots__ = ("_what",)

    def __init__(self, what: str, count: int, seconds: float = 0.0, needed: int = 0) -> None:
        super().__init__(count, seconds, needed, timed=what == "rate")
        self._what = what

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer `past` (the oldest), `delta` (newest less oldest) or `rate` (delta a second)."""
        for _ in range(self._take(time, value)):
            self._drop()
        if not self._ready(time):
            return None
        oldest = self._values[self._start]
        if self._what == "past":
            return oldest
        if self._what == "delta":
            return value - oldest
        assert self._times is not None
        elapsed = time - self._times[self._start]
        return (value - oldest) / elapsed if elapsed > 0 else None


class Counted(Recent):
    """How many samples of a condition are true."""

    __slots__ = ("_true",)

    def __init__(self, count: int, seconds: float = 0.0, needed: int = 0) -> None:
        super().__init__(count, seconds, needed)
        self._true = 0.0

    def push(self, time: float, value: float) -> float | None:
        """Take 1.0 or 0.0; answer the number of ones."""
        self._true += value
        for _ in range(self._take(time, value)):
            self._true -= self._drop()
        return self._true if self._ready(time) else None


class Ordered(Recent):
    """The window sorted beside itself: a sample costs a binary search and a memmove."""

    __slots__ = ("_share", "_sorted", "_what")

    def __init__(self, what: str, count: int, seconds: float = 0.0, needed: int = 0, share: float = 0.5) -> None:
        super().__init__(count, seconds, needed)
        self._what, self._share, self._sorted = what, share, array("d")

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer `quantile` (of which the median is the half) or `mad`."""
        insort(self._sorted, value)
        for _ in range(self._take(time, value)):
            del self._sorted[bisect_left(self._sorted, self._drop())]
        if not self._ready(time):
            return None
        return median_deviation(self._sorted) if self._what == "mad" else quantile(self._sorted, self._share)


def quantile(ordered: array[float], share: float) -> float:
    """Linear between order statistics: type 7 of Hyndman and Fan (1996), as numpy and pandas have it."""
    place = share * (len(ordered) - 1)
    below = int(place)
    if below + 1 >= len(ordered):
        return ordered[-1]
    low, high = ordered[below], ordered[below + 1]
    part = place - below
    return (low + high) / 2 if part == 0.5 else low + (high - low) * part


def median_deviation(ordered: array[float]) -> float:
    """Median absolute deviation from the median, unscaled: for normal noise it is 0.674 standard deviations.

    The distances of the lower half, read downwards, and those of the upper half, read upwards, are two sorted
    sequences; their k-th smallest is a binary search for how many come from the lower one. O(log n).
    """
    count = len(ordered)
    middle, half = quantile(ordered, 0.5), count // 2
    rank = (count - 1) // 2
    low, high = max(0, rank - (count - half)), min(rank, half)
    while low < high:
        taken = (low + high) // 2
        if middle - ordered[half - 1 - taken] < ordered[half + rank - taken - 1] - middle:
            low = taken + 1
        else:
            high = taken
    # So many distances of the lower half, and rank - low of the upper one, come before the one that is wanted.
    left, right = half - 1 - low, half + rank - low
    below, above = _below(ordered, left, middle), _above(ordered, right, middle)
    if count % 2:
        return min(below, above)
    if below <= above:
        return (below + min(_below(ordered, left - 1, middle), above)) / 2
    return (above + min(below, _above(ordered, right + 1, middle))) / 2


def _below(ordered: array[float], place: int, middle: float) -> float:
    return middle - ordered[place] if place >= 0 else math.inf


def _above(ordered: array[float], place: int, middle: float) -> float:
    return ordered[place] - middle if place < len(ordered) else math.inf


Fold = tuple[float, float]
"""What is known of a stretch of samples, beside its length: see `Folded`."""


class Folded(Recent):
    """A fold over the window that never subtracts, so that a huge value leaves no trace once it is gone.

    Two stacks: `_front` holds, for each old sample, the fold from it to the end of the old stretch; `_back` is the
    fold of what came since. Dropping the oldest pops `_front`; once it is empty it is built anew from the samples.
    O(1) a sample, amortised. Folds of stretches a then b, of lengths m and n:

        sum, min, max    a + b, min(a, b), max(a, b)
        mean, std        (mean, sum of squared deviations), joined after Chan, Golub and LeVeque (1979)
        slope            (mean, sum of (i - mean i)(x - mean x)): the same, with the covariance to the index
    """

    __slots__ = ("_back", "_back_length", "_front", "_what")

    def __init__(self, what: str, count: int, seconds: float = 0.0, needed: int = 0) -> None:
        super().__init__(count, seconds, needed)
        self._what = what
        self._front = array("d")
        self._back: Fold = (0.0, 0.0)
        self._back_length = 0

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer the statistic."""
        leaving = self._take(time, value)
        join = _JOINS[self._what]
        self._back = join(self._back_length, self._back, 1, (value, 0.0)) if self._back_length else (value, 0.0)
        self._back_length += 1
        for _ in range(leaving):
            if not self._front:
                self._turn(join)
            self._drop()
            del self._front[-2:]
        if not self._ready(time):
            return None
        return _RESULTS[self._what](len(self), self._whole(join))

    def _turn(self, join: Join) -> None:
        """Make the front of all samples that there are; the back is empty then."""
        fold = (0.0, 0.0)
        for length, value in enumerate(reversed(self._values[self._start :])):
            fold = join(1, (value, 0.0), length, fold) if length else (value, 0.0)
            self._front.extend(fold)
        self._back, self._back_length = (0.0, 0.0), 0

    def _whole(self, join: Join) -> Fold:
        if not self._front:
            return self._back
        front = (self._front[-2], self._front[-1])
        return join(len(self._front) // 2, front, self._back_length, self._back) if self._back_length else front


Join = Callable[[int, Fold, int, Fold], Fold]


def _join_sum(m: int, a: Fold, n: int, b: Fold) -> Fold:
    return a[0] + b[0], 0.0


def _join_min(m: int, a: Fold, n: int, b: Fold) -> Fold:
    return (a if a[0] <= b[0] else b)[0], 0.0


def _join_max(m: int, a: Fold, n: int, b: Fold) -> Fold:
    return (a if a[0] >= b[0] else b)[0], 0.0


def _join_spread(m: int, a: Fold, n: int, b: Fold) -> Fold:
    apart = b[0] - a[0]
    return a[0] + apart * (n / (m + n)), a[1] + b[1] + apart * apart * (m * n / (m + n))


def _join_slope(m: int, a: Fold, n: int, b: Fold) -> Fold:
    apart = b[0] - a[0]  # the mean indices of the two stretches are (m + n) / 2 apart
    return a[0] + apart * (n / (m + n)), a[1] + b[1] + apart * (m * n / 2)


def _std(count: int, fold: Fold) -> float:
    return math.sqrt(fold[1] / (count - 1)) if count > 1 else 0.0


def _slope(count: int, fold: Fold) -> float:
    return 12.0 * fold[1] / (count * (count * count - 1.0)) if count > 1 else 0.0


def _first(count: int, fold: Fold) -> float:
    return fold[0]


# By name, so that a state is data and can be pickled.
_JOINS: dict[str, Join] = {
    "sum": _join_sum, "min": _join_min, "max": _join_max,
    "mean": _join_spread, "std": _join_spread, "slope": _join_slope,
}  # fmt: skip
_RESULTS: dict[str, Callable[[int, Fold], float]] = {
    "sum": _first, "min": _first, "max": _first, "mean": _first, "std": _std, "slope": _slope,
}  # fmt: skip


class Smoothed:
    """Exponentially weighted mean of span n: weight 2 / (n + 1) on the newest (pandas' `ewm(span=n, adjust=False)`)."""

    __slots__ = ("_left", "_value", "_weight")

    def __init__(self, count: int, needed: int = 0) -> None:
        self._weight, self._value = 2.0 / (count + 1.0), math.nan
        self._left = min(needed or count, count)

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer the mean, once as many samples as the span (or `min_samples`) are in."""
        fresh = math.isnan(self._value)
        self._value = value if fresh else self._value + self._weight * (value - self._value)
        self._left -= self._left > 0
        return None if self._left else self._value


class Since:
    """Since the run's start: the `first`, `lowest` or `highest` value."""

    __slots__ = ("_value", "_what")

    _CHOICES: ClassVar[dict[str, Callable[[float, float], float]]] = {"lowest": min, "highest": max}

    def __init__(self, what: str) -> None:
        self._what, self._value = what, math.nan

    def push(self, time: float, value: float) -> float:
        """Take a sample; answer the value so far."""
        if math.isnan(self._value):
            self._value = value
        elif self._what != "first":
            self._value = self._CHOICES[self._what](self._value, value)
        return self._value


State = Ends | Counted | Ordered | Folded | Smoothed | Since
"""What a function with a memory keeps for one series."""
