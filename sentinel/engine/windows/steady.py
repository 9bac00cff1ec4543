"""How far a series has risen in a straight line up to now, over as many samples as it takes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Literal

BLOCKS = 12
"""Blocks in a stretch: its four quarters have three each."""
LEVELS = 14
"""Stretches of 12 samples, of 24, ... of 98,304."""
EVEN = 0.27
"""Of the whole rise, the least from a quarter to the next, where a third is the mean. A start that levels out by a
quarter from one quarter to the next is no line."""
NEWEST = 1.5
"""Mean rises of a block that the newest block lies over the lowest of its quarter, where it is 2 on a line. At 1 the
rise is over: the newest block is where the one before was."""
STRAIGHT = 0.98
"""Correlation of the low-water marks with their number. Two caches that fill one after the other come to 0.97; 12
numbers that have nothing to do with each other to 0.98 once in 80 million times."""


class Steady:
    """Stretches of 12, 24, 48, ... newest samples, each as the low-water marks of 12 blocks of equal length.

    A stretch rises in a line where the lowest value of each quarter is over that of the quarter before, by `EVEN` of
    the whole rise at least, the newest block by `NEWEST`, and all of them are as `STRAIGHT` says. What is given back
    within a quarter (garbage collection, a loader's buffers) does not matter, and a step up for once is no line. Of
    several such stretches that one counts whose rise times its samples is the largest. A stretch of blocks of n samples
    is looked at after every n-th, which is O(1) a sample, amortised.
    """

    __slots__ = ("_blocks", "_pending", "_rises", "_what")

    def __init__(self, what: Literal["rise", "samples", "steps"]) -> None:
        self._what = what
        self._blocks = [list[_Block]() for _ in range(LEVELS)]
        """By level, the newest `BLOCKS` blocks, oldest first."""
        self._pending = list[_Block | None]([None] * LEVELS)
        """By level, the block that waits for the next one: two make one of the level above."""
        self._rises = [0.0] * LEVELS

    def push(self, seq: float, value: float) -> float | None:
        """Take a sample of step `seq`; answer the rise, its samples or its steps: 0 where there is none, None before
        there are 12."""
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
    """From the first to the last of 12 low-water marks; 0 where they do not rise in a line."""
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
    """How many of the newest values rise in a straight line; 0 where they do not."""
    steady, samples = Steady("samples"), None
    for number, value in enumerate(values):
        samples = steady.push(number, value)
    return int(samples or 0)
