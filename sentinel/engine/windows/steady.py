"""Measure how far a series has risen in a straight line up to now, over as many samples as the rise lasts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Literal

BLOCKS = 12
"""Blocks in a stretch: its four quarters have three each."""
LEVELS = 14
"""Number of stretches: of 12 samples, of 24, ... of 98,304."""
EVEN = 0.27
"""Least rise from a quarter to the next, as a share of the whole rise, where a third is the mean. A start that levels
out, with each rise a quarter less than the one before, is no line."""
NEWEST = 1.5
"""How far the newest block must lie over the lowest of its quarter, in mean rises per block, where it is 2 on a line.
At 1 the rise is over: the newest block is no higher than the one before."""
STRAIGHT = 0.98
"""Least correlation of the low-water marks with their number. Two caches that fill one after the other come to 0.97; 12
independent numbers come to 0.98 once in 80 million times."""


class Steady:
    """Stretches of 12, 24, 48, ... newest samples, each as the low-water marks of 12 blocks of equal length.

    A stretch rises in a line where the lowest value of each quarter is over that of the quarter before by at least
    `EVEN` of the whole rise, the newest block by `NEWEST`, and the blocks correlate with their number by `STRAIGHT`.
    What is given back within a quarter (garbage collection, a loader's buffers) does not matter, and a single step up
    is no line. Of several such stretches the one counts whose rise times its samples is the largest. A stretch of
    blocks of n samples is checked after every n-th sample, which is O(1) per sample, amortised.
    """

    __slots__ = ("_blocks", "_pending", "_rises", "_what")

    def __init__(self, what: Literal["rise", "samples", "steps"]) -> None:
        self._what = what
        self._blocks = [list[_Block]() for _ in range(LEVELS)]
        """For each level, the newest `BLOCKS` blocks, oldest first."""
        self._pending = list[_Block | None]([None] * LEVELS)
        """For each level, the block that waits for the next one: two make one of the level above."""
        self._rises = [0.0] * LEVELS

    def push(self, seq: float, value: float) -> float | None:
        """Take a sample of step `seq`; return the rise, its samples or its steps: 0 where there is none, None before
        there are 12 samples."""
        block = (seq, value)
        for level, blocks in enumerate(self._blocks):
            blocks.append(block)
            if len(blocks) > BLOCKS:
                del blocks[0]
            if len(blocks) == BLOCKS:
                self._rises[level] = straight_rise([low for _, low in blocks])
            other = self._pending[level]
            if other is None:
                self._pending[level] = block
                break
            self._pending[level] = None
            block = (other[0], min(other[1], block[1]))
        if len(self._blocks[0]) < BLOCKS:
            return None
        level = max(range(LEVELS), key=lambda level: self._rises[level] * (1 << level))
        if self._what == "rise" or not self._rises[level]:
            return self._rises[level]
        return float(BLOCKS << level) if self._what == "samples" else seq - self._blocks[level][0][0] + 1


_Block = tuple[float, float]
"""(seq of its first sample, low-water mark)."""


def straight_rise(blocks: Sequence[float]) -> float:
    """Return the rise from the first to the last of 12 low-water marks; 0 where they do not rise in a line."""
    first, second, third, fourth = (min(blocks[at : at + 3]) for at in range(0, BLOCKS, 3))
    whole = fourth - first
    least = min(second - first, third - second, fourth - third)
    if whole <= 0.0 or least < EVEN * whole or blocks[-1] - fourth < NEWEST * whole / 9:
        return 0.0
    mean = sum(blocks) / BLOCKS
    deviations = [value - mean for value in blocks]
    covariance = sum(map(operator.mul, _NUMBERS, deviations))
    straight = covariance**2 > STRAIGHT**2 * _NUMBERS_SQUARED * sum(map(operator.mul, deviations, deviations))
    return blocks[-1] - blocks[0] if straight else 0.0


_NUMBERS = tuple(at - (BLOCKS - 1) / 2 for at in range(BLOCKS))
_NUMBERS_SQUARED = sum(number * number for number in _NUMBERS)


def count_steady_samples(values: Iterable[float]) -> int:
    """Return how many of the newest values rise in a straight line; 0 where they do not."""
    steady, samples = Steady("samples"), None
    for number, value in enumerate(values):
        samples = steady.push(number, value)
    return int(samples or 0)
