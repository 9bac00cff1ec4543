"""Exact sums and means that never raise, unlike `math.fsum`, which does where a partial sum is over 1.8e308."""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOWN, _UP = 2.0**-32, 2.0**32
"""Powers of two, so that scaling by them rounds nothing."""


def exact_sum(values: Sequence[float]) -> float:
    """Return the sum of finite values; infinity where no float holds it."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.fsum(value * _DOWN for value in values) * _UP


def exact_mean(values: Sequence[float]) -> float:
    """Return the mean of finite values."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value * _DOWN for value in values) / len(values) * _UP
