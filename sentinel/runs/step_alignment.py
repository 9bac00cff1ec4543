"""Join the ranks' samples by step.

A step is closed, and judged, once all live ranks reported it, or `PATIENCE_SECONDS` after the first did, or when that
one is `PATIENCE_STEPS` ahead and `BATCH_SECONDS` have passed: ranks send in batches, and a batch of 3 ms steps holds
a hundred and more. Steps close in order. A rank that made the others wait is silent: it holds nothing up until it has
caught up. A single process is the case of one rank. It has no clock: `now` is passed in, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

PATIENCE_SECONDS = 2.0
PATIENCE_STEPS = 8
BATCH_SECONDS = 1.0
"""Longer than batches of two healthy ranks are apart: each sends every half second (`hooks/transport/sender.py`)."""
OPEN_STEPS = 16_384
"""Steps that may wait for other ranks; above it the oldest are closed without them. A loop of 1 ms steps has 10,000 by
the time at which ranks that never came are no longer waited for."""

Sample = TypeVar("Sample")


class Alignment(Generic[Sample]):
    """The steps of one attempt in one stream.

    Ranks report their steps in rising order (their socket is a stream), so a rank that reported step s will never
    report an earlier one: a step that was dropped on its side never comes.
    """

    def __init__(self, *, seconds: float = PATIENCE_SECONDS, steps: int = PATIENCE_STEPS, closed_to: int = -1) -> None:
        """`closed_to`: the last step that an earlier daemon closed."""
        self._seconds, self._steps = seconds, steps
        self._reached: dict[int, int] = {}
        self._silent: set[int] = set()
        self._open: dict[int, _OpenStep[Sample]] = {}
        self._closed_to = closed_to
        self._front: int | None = None
        """The furthest step that a rank has reached; None: not known."""
        self._last: tuple[int, int] | None = None
        """The slowest rank and the step that it has reached: searched for again only after it has moved on."""

    @property
    def closed_to(self) -> int:
        """The last closed seq; -1 before the first."""
        return self._closed_to

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that are not waited for before they have caught up."""
        return frozenset(self._silent)

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks that are waited for."""
        return frozenset(self._reached.keys() - self._silent)

    def join(self, rank: int, next_seq: int = 0) -> None:
        """Wait for this rank from step `next_seq` on. A rank that joins again goes on where it was."""
        reached = max(next_seq - 1, self._reached.get(rank, -1))
        if rank in self._silent or rank not in self._reached:
            self._silent.discard(rank)
            self._last = None
        self._front = max(self._furthest(), reached)
        self._reached[rank] = reached

    def join_all(self, ranks: Iterable[int], next_seq: int = 0) -> None:
        """Wait for these ranks, none of which is waited for yet."""
        self._reached.update(dict.fromkeys(ranks, next_seq - 1))
        self._front = self._last = None

    def leave(self, rank: int) -> None:
        """Stop waiting for this rank, which is lost or gone."""
        self._reached.pop(rank, None)
        self._silent.discard(rank)
        self._front = None

    def report(self, rank: int, seq: int, sample: Sample, now: float) -> None:
        """Take one rank's sample of one step."""
        self.report_all(rank, [(seq, sample)], now)

    def report_all(self, rank: int, samples: Iterable[tuple[int, Sample]], now: float) -> None:
        """Take one rank's samples of several steps; for each step the first sample counts."""
        reached = self._reached.get(rank)
        if reached is None:
            self._last = None
        # A silent rank is waited for again when it is at most half the patience in steps behind.
        back = self._furthest() - self._steps // 2 if rank in self._silent else -1
        for seq, sample in samples:
            reached = seq if reached is None else max(reached, seq)
            if seq >= back and rank in self._silent:
                self._silent.discard(rank)
                self._last = None
            if seq <= self._closed_to:
                continue
            step = self._open.get(seq)
            if step is None:
                step = self._open[seq] = _OpenStep(now, {})
            step.samples.setdefault(rank, sample)
        if reached is not None:
            self._front = max(self._furthest(), reached)
            self._reached[rank] = reached

    def take_closed(self, now: float) -> Iterator[tuple[int, Mapping[int, Sample]]]:
        """Yield the steps that closed since the last call, in order: (seq, samples by rank). Each is closed when it is
        handed out: if the caller stops in between, the next call yields the others."""
        if not self._open:
            return
        front = self._furthest()
        reached_by_all = self._find_step_reached_by_all()
        for seq in sorted(self._open):
            if seq > reached_by_all:
                waited = now - self._open[seq].since
                patience = self._seconds if front - seq < self._steps else BATCH_SECONDS
                if waited < patience and len(self._open) <= OPEN_STEPS:
                    return
                self._silent.update(rank for rank, reached in self._reached.items() if reached < seq)
                reached_by_all = self._find_step_reached_by_all()
            self._closed_to = seq
            yield seq, self._open.pop(seq).samples

    def _find_step_reached_by_all(self) -> float:
        """Return the last step that waits for no rank."""
        if self._last is None or self._last[0] in self._silent or self._reached.get(self._last[0]) != self._last[1]:
            waited = ((reached, rank) for rank, reached in self._reached.items() if rank not in self._silent)
            lowest = min(waited, default=None)
            if lowest is None:
                return math.inf
            self._last = lowest[1], lowest[0]
        return self._last[1]

    def _furthest(self) -> int:
        if self._front is None:
            self._front = max(self._reached.values(), default=-1)
        return self._front


class _OpenStep(Generic[Sample]):
    """A step that at least one rank reported and that is not closed."""

    __slots__ = ("samples", "since")

    def __init__(self, since: float, samples: dict[int, Sample]) -> None:
        self.since, self.samples = since, samples
