"""Sums and means that are exact, and of which none raises: `math.fsum` does where a partial sum is over 1.8e308."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOWN, _UP = 2.0**-32, 2.0**32
"""Powers of two: nothing is rounded by them."""


def exact_sum(values: Sequence[float]) -> float:
    """The sum of finite values, an infinity where no float holds it."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.fsum(value * _DOWN for value in values) * _UP


def exact_mean(values: Sequence[float]) -> float:
    """The mean of finite values."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value * _DOWN for value in values) / len(values) * _UP
