"""Windows over a series: what a rule remembers of a metric, at a cost a sample that does not grow with the window.

    Past, Change      the newest and the oldest of so many samples: past, delta
    Recent            the samples of a window, by count or by age
      Ends            newest and oldest of it: rate; delta by age
      CountedByAge    how many of it are true: count
      Ordered         and the same samples sorted: median, quantile, mad
      Folded          and their folds by two stacks: mean, std, sum, slope; min and max by age
    Counted           of so many samples those that are true: count
    Extreme           of so many samples those that may still become the largest: min, max
    First, Lowest, Highest, Smoothed

A window takes finite numbers only. `push` answers the statistic, or None where the window has not enough samples.
Everything here is data, with no closure in it: the evaluator copies states by pickling them. `push` is most of what
a daemon computes, so what windows by count do most is written out in each: a call costs as much as the rest of it.
Figures: docs/performance.md, by bench/engine.py.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, MutableSequence, Sequence

SAMPLE_LIMIT = 100_000
"""Samples in one window, 0.8 MB. A duration that holds more loses its oldest."""


class Past:
    """A ring of the newest `count` samples, of which the oldest is wanted."""

    __slots__ = ("_count", "_oldest", "_values")

    def __init__(self, count: int) -> None:
        self._count = min(count, SAMPLE_LIMIT)
        self._values, self._oldest = list[float](), 0  # an array would make a float of each that is read

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer the oldest, once there are so many."""
        values, oldest = self._values, self._oldest
        if len(values) < self._count:
            values.append(value)
            return values[0] if len(values) == self._count else None
        values[oldest] = value
        self._oldest = oldest = oldest + 1 if oldest + 1 < self._count else 0
        return values[oldest]


class Change(Past):
    """And by how much the newest is above it."""

    __slots__ = ("_needed",)

    def __init__(self, count: int, needed: int = 0) -> None:
        super().__init__(count)
        self._needed = max(2, min(needed, self._count) if needed else self._count)

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer the difference, once there are as many as are needed, and two."""
        values, oldest = self._values, self._oldest
        if len(values) < self._count:
            values.append(value)
            return value - values[0] if len(values) >= self._needed else None
        values[oldest] = value
        self._oldest = oldest = oldest + 1 if oldest + 1 < self._count else 0
        return value - values[oldest]


class Recent:
    """The newest `count` samples, or those of the last `seconds` (the one that is exactly that old is out).

    By count, as most windows are, a ring: `_start` is the place of the oldest once it is full. By age, an array whose
    first `_start` samples are dead; it is moved down once half of it is, which is O(1) a sample, amortised.
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
        """Put a sample in; answer those that leave for it, oldest first."""
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
            while times[stop] <= time - self._seconds:
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
        return time - self._born >= self._seconds  # a duration is full once it has been lived through

    def _in_order(self) -> Sequence[float]:
        """The samples, oldest first."""
        values, start = self._values, self._start
        return values[start:] if self._times is not None else [*values[start:], *values[:start]]


class Ends(Recent):
    """From the oldest sample to the newest."""

    __slots__ = ("_what",)

    def __init__(self, what: str, count: int, seconds: float = 0.0, needed: int = 0) -> None:
        super().__init__(count, seconds, needed, timed=True)
        self._what = what

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer `delta` (newest less oldest) or `rate` (delta a second)."""
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
    """How many samples of a condition are true, by count: kept are the places of those, which are few as a rule."""

    __slots__ = ("_count", "_first", "_needed", "_seen", "_true", "_trues")

    def __init__(self, count: int, needed: int = 0) -> None:
        self._count = min(count, SAMPLE_LIMIT)
        self._needed = min(needed, self._count) if needed else self._count
        self._trues = list[int]()
        self._first = self._seen = 0
        self._true = 0.0

    def push(self, time: float, value: float) -> float | None:
        """Take whether it is true; answer how many are."""
        self._seen = seen = self._seen + 1
        if value or self._true:
            self._true = self._counted(seen, value)
        return self._true if seen >= self._needed else None

    def _counted(self, seen: int, value: float) -> float:
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
    """The same by age."""

    __slots__ = ("_true",)

    def __init__(self, seconds: float, needed: int = 0) -> None:
        super().__init__(0, seconds, needed)
        self._true = 0.0

    def push(self, time: float, value: float) -> float | None:
        """Take whether it is true; answer how many are."""
        self._true += value - math.fsum(self._take(time, value))
        return self._true if self._ready(time) else None


class Ordered(Recent):
    """The window sorted beside itself: a sample costs a binary search and a memmove.

    Both hold the same floats, in lists: an array would make a float of each that the search looks at.
    """

    __slots__ = ("_middle", "_share", "_sorted", "_what")

    def __init__(self, what: str, count: int, seconds: float = 0.0, needed: int = 0, share: float = 0.5) -> None:
        super().__init__(count, seconds, needed)
        self._what, self._share, self._middle = what, share, what != "mad" and share == 0.5
        self._values, self._sorted = list[float](), list[float]()

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer `quantile` (of which the median is the half) or `mad`."""
        ordered, values = self._sorted, self._values
        if self._times is not None:
            insort(ordered, value)
            for leaving in self._take_by_age(self._times, time, value):
                del ordered[bisect_left(ordered, leaving)]
            if not self._ready(time):
                return None
            count = len(ordered)
        else:
            count = len(values)
            if count < self._count:
                insort(ordered, value)
                values.append(value)
                count += 1
                if count < self._needed:
                    return None
            else:
                start = self._start
                del ordered[bisect_left(ordered, values[start])]
                insort(ordered, value)
                values[start] = value
                start += 1
                self._start = start if start < count else 0
        if self._middle:
            half = count >> 1
            return ordered[half] if count & 1 else (ordered[half - 1] + ordered[half]) / 2
        return median_deviation(ordered) if self._what == "mad" else quantile(ordered, self._share)


def _median(ordered: Sequence[float]) -> float:
    count = len(ordered)
    half = count >> 1
    return ordered[half] if count & 1 else (ordered[half - 1] + ordered[half]) / 2


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between order statistics: type 7 of Hyndman and Fan (1996), as numpy and pandas have it."""
    place = share * (len(ordered) - 1)
    below = int(place)
    if below + 1 >= len(ordered):
        return ordered[-1]
    low, high = ordered[below], ordered[below + 1]
    part = place - below
    return low + (high - low) * part


def median_deviation(ordered: Sequence[float]) -> float:
    """Median absolute deviation from the median, unscaled: for normal noise it is 0.674 standard deviations.

    The distances of the lower half, read downwards, and those of the upper half, read upwards, are two sorted
    sequences; their k-th smallest is a binary search for how many come from the lower one. O(log n).
    """
    count = len(ordered)
    middle, half = _median(ordered), count // 2
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


def _below(ordered: Sequence[float], place: int, middle: float) -> float:
    return middle - ordered[place] if place >= 0 else math.inf


def _above(ordered: Sequence[float], place: int, middle: float) -> float:
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
        join = _JOINS[self._what]
        self._back = join(self._back_length, self._back, 1, (value, 0.0)) if self._back_length else (value, 0.0)
        self._back_length += 1
        for _ in self._take(time, value):
            if not self._front:
                self._turn(join)
                break
            del self._front[-2:]
        if not self._ready(time):
            return None
        return _RESULTS[self._what](len(self), self._whole(join))

    def _turn(self, join: Join) -> None:
        """Make the front of all samples that there are; the back is empty then."""
        fold = (0.0, 0.0)
        for length, value in enumerate(reversed(self._in_order())):
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


def _std(count: int, fold: Fold) -> float | None:
    # A lone sample in a window of time has no spread that is known: 0 would make of the next one an outlier.
    return math.sqrt(fold[1] / (count - 1)) if count > 1 else None


def _slope(count: int, fold: Fold) -> float | None:
    return 12.0 * fold[1] / (count * (count * count - 1.0)) if count > 1 else None


def _first(count: int, fold: Fold) -> float:
    return fold[0]


# By name, so that a state is data and can be pickled.
_JOINS: dict[str, Join] = {
    "sum": _join_sum, "min": _join_min, "max": _join_max,
    "mean": _join_spread, "std": _join_spread, "slope": _join_slope,
}  # fmt: skip
_RESULTS: dict[str, Callable[[int, Fold], float | None]] = {
    "sum": _first, "min": _first, "max": _first, "mean": _first, "std": _std, "slope": _slope,
}  # fmt: skip


class Extreme:
    """The largest of the newest `count` samples: kept are those that no later one exceeds, in falling order.

    The first of them is the largest; it leaves when its turn comes, and a new sample drops all that are not above it:
    O(1) a sample, amortised. The smallest is the largest of the negated samples. Before the first stands an infinity,
    which no sample drops.
    """

    __slots__ = ("_count", "_first", "_leaving", "_needed", "_seen", "_sign", "_values")

    def __init__(self, sign: float, count: int, needed: int = 0) -> None:
        self._sign, self._count = sign, count
        self._needed = min(needed, count) if needed else count
        self._values, self._leaving = [math.inf], [0]
        """Of each the number of the sample for which it leaves."""
        self._first, self._seen = 1, 0

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; answer the largest value, or the smallest where `sign` is -1."""
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


class First:
    """The first value since the run's start."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = math.nan

    def push(self, time: float, value: float) -> float:
        """Take a sample; answer the first one."""
        if math.isnan(self._value):
            self._value = value
        return self._value


class Lowest(First):
    """The lowest since then."""

    __slots__ = ()

    def push(self, time: float, value: float) -> float:
        """Take a sample; answer the lowest so far."""
        if not value >= self._value:  # nor is it that of NaN, before the first one
            self._value = value
        return self._value


class Highest(First):
    """The highest since then."""

    __slots__ = ()

    def push(self, time: float, value: float) -> float:
        """Take a sample; answer the highest so far."""
        if not value <= self._value:
            self._value = value
        return self._value


State = Past | Ends | Counted | CountedByAge | Ordered | Folded | Extreme | Smoothed | First
"""What a function with a memory keeps for one series."""
