"""Statistics that keep one number for all samples since the run's start."""

from __future__ import annotations

import math


class Smoothed:
    """Exponentially weighted mean of span n: weight 2 / (n + 1) on the newest (pandas' `ewm(span=n, adjust=False)`)."""

    __slots__ = ("_left", "_value", "_weight")

    def __init__(self, count: int, needed: int = 0) -> None:
        self._weight, self._value = 2.0 / (count + 1.0), math.nan
        self._left = min(needed or count, count)

    def push(self, time: float, value: float) -> float | None:
        """Take a sample; return the mean, once as many samples as the span (or `min_samples`) are in."""
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
        """Take a sample; return the first one."""
        if math.isnan(self._value):
            self._value = value
        return self._value


class Lowest(First):
    """The lowest value since the run's start."""

    __slots__ = ()

    def push(self, time: float, value: float) -> float:
        """Take a sample; return the lowest so far."""
        if not value >= self._value:  # also true of the first sample, as the initial value is NaN
            self._value = value
        return self._value


class Highest(First):
    """The highest value since the run's start."""

    __slots__ = ()

    def push(self, time: float, value: float) -> float:
        """Take a sample; return the highest so far."""
        if not value <= self._value:
            self._value = value
        return self._value
