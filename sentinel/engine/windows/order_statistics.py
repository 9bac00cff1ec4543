"""Median, quantile and median absolute deviation of a window."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from sentinel.engine.windows.sliding import Recent


class Ordered(Recent):
    """Median, quantile or MAD of a window, which is kept both in order of arrival and sorted.

    A sample costs a binary search and a memmove. Both lists hold the same floats: an array would create a float for
    each element that the search reads.
    """

    __slots__ = ("_middle", "_share", "_sorted", "_what")

    def __init__(self, what: str, count: int, seconds: float = 0.0, needed: int = 0, share: float = 0.5) -> None:
        super().__init__(count, seconds, needed)
        self._what, self._share, self._middle = what, share, what != "mad" and share == 0.5
        self._values, self._sorted = list[float](), list[float]()

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; return the quantile (with share 0.5 the median) or the MAD."""
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
    """Return the quantile, linear between order statistics: type 7 of Hyndman and Fan (1996), as in numpy and
    pandas."""
    place = share * (len(ordered) - 1)
    below = int(place)
    if below + 1 >= len(ordered):
        return ordered[-1]
    low, high = ordered[below], ordered[below + 1]
    part = place - below
    return low + (high - low) * part


def median_deviation(ordered: Sequence[float]) -> float:
    """Return the median absolute deviation from the median, unscaled: for normal noise it is 0.674 standard deviations.

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
    # `low` distances of the lower half, and rank - low of the upper one, come before the wanted one.
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
