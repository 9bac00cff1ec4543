"""Statistics of a window that are folds of its samples: sum, mean, standard deviation, slope, minimum and maximum."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

from sentinel.engine.windows.sliding import Recent

Fold = tuple[float, float]
"""What is known of a stretch of samples, beside its length: see `Folded`."""


class Folded(Recent):
    """A fold over the window that never subtracts, so that a huge value leaves no trace once it is gone.

    Two stacks: `_front` holds, for each old sample, the fold from it to the end of the old stretch; `_back` is the
    fold of what came since. Dropping the oldest pops `_front`; once it is empty it is built again from the samples.
    O(1) per sample, amortised. Folds of stretches a then b, of lengths m and n:

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
        """Take a sample; return the statistic."""
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
        """Make the front from all present samples; the back is empty afterwards."""
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
    # A lone sample in a window of time has no known spread: 0 would make an outlier of the next one.
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
