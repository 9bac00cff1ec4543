"""Brings the ranks' samples together by step.

A step is closed, and judged, once all live ranks reported it, or `PATIENCE_SECONDS` after the first did, or when that
one is `PATIENCE_STEPS` ahead and `BATCH_SECONDS` have passed: ranks send in batches, and a batch of 3 ms steps holds
a hundred and more. Steps close in order. A rank that made the others wait is silent: it holds nothing up until it has
caught up. A single process is the case of one rank. No clock of its own: `now` is handed in, in seconds, monotonic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

PATIENCE_SECONDS = 2.0
PATIENCE_STEPS = 8
BATCH_SECONDS = 1.0
"""Longer than batches of two healthy ranks are apart: each sends every half second (`hooks/sender.py`)."""

Sample = TypeVar("Sample")


class Alignment(Generic[Sample]):
    """Steps of one attempt, one stream.

    Ranks report their steps in rising order (their socket is a stream), so a rank that reported step s will never
    report an earlier one: what was dropped on its side stays away.
    """

    def __init__(self, *, seconds: float = PATIENCE_SECONDS, steps: int = PATIENCE_STEPS, closed_to: int = -1) -> None:
        """`closed_to`: the last step that was closed before, by a daemon that is no more."""
        self._seconds, self._steps = seconds, steps
        self._reached: dict[int, int] = {}
        self._silent: set[int] = set()
        self._open: dict[int, _OpenStep[Sample]] = {}
        self._closed_to = closed_to
        self.late = 0
        """Samples that arrived after their step was closed."""

    @property
    def closed_to(self) -> int:
        """The last closed seq; -1 before the first."""
        return self._closed_to

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that are not waited for until they caught up."""
        return frozenset(self._silent)

    def join(self, rank: int, next_seq: int = 0) -> None:
        """Wait for this rank from step `next_seq` on. A rank that joins again goes on where it was."""
        reached = max(next_seq - 1, self._reached.get(rank, -1))
        if rank in self._reached:
            self.leave(rank)
        self._reached[rank] = reached
        for seq, step in self._open.items():
            step.waiting += seq > reached

    def leave(self, rank: int) -> None:
        """Wait for this rank no more: lost, or gone."""
        reached = self._reached.pop(rank, None)
        if reached is not None and rank not in self._silent:
            for seq, step in self._open.items():
                step.waiting -= seq > reached
        self._silent.discard(rank)

    def report(self, rank: int, seq: int, sample: Sample, now: float) -> None:
        """Take one rank's sample of one step."""
        self._advance(rank, seq)
        if seq <= self._closed_to:
            self.late += 1
            return
        step = self._open.get(seq)
        if step is None:
            waiting = sum([reached < seq for other, reached in self._reached.items() if other not in self._silent])
            step = self._open[seq] = _OpenStep(now, waiting, {})
        step.samples[rank] = sample

    def report_all(self, rank: int, samples: Iterable[tuple[int, Sample]], now: float) -> None:
        """Take one rank's samples of several steps."""
        if self._open or self._reached.keys() != {rank} or rank in self._silent:
            for seq, sample in samples:
                self.report(rank, seq, sample, now)
            return
        # Nobody else is waited for, and nothing waits for this one: a fast loop's batch holds hundreds of steps.
        reached = self._reached[rank]
        for seq, sample in samples:
            reached = max(reached, seq)
            if seq <= self._closed_to:
                self.late += 1
            else:
                self._open[seq] = _OpenStep(now, 0, {rank: sample})
        self._reached[rank] = reached

    def closed(self, now: float) -> list[tuple[int, Mapping[int, Sample]]]:
        """The steps that closed since the last call, in order: (seq, samples by rank)."""
        ready: list[tuple[int, Mapping[int, Sample]]] = []
        front = max(self._reached.values(), default=-1)
        for seq in sorted(self._open):
            step = self._open[seq]
            if step.waiting > 0:
                waited = now - step.since
                if waited < (self._seconds if front - seq < self._steps else BATCH_SECONDS):
                    break
                self._give_up_waiting(seq)
            ready.append((seq, self._open.pop(seq).samples))
            self._closed_to = seq
        return ready

    def _advance(self, rank: int, seq: int) -> None:
        before = self._reached.get(rank)
        if before is None:
            self.join(rank, seq)
            before = self._reached[rank]
        if rank in self._silent:
            # Back among those who are waited for once it is no further behind than patience allows.
            if seq < max(self._reached.values()) - self._steps // 2:
                self._reached[rank] = max(seq, before)
                return
            self._silent.discard(rank)
            for number, step in self._open.items():
                step.waiting += number > before
        if seq == before + 1:  # as nearly always: no other step can have waited for it
            if seq in self._open:
                self._open[seq].waiting -= 1
        else:
            for number, step in self._open.items():
                step.waiting -= before < number <= seq
        self._reached[rank] = max(seq, before)

    def _give_up_waiting(self, seq: int) -> None:
        for rank, reached in self._reached.items():
            if reached < seq and rank not in self._silent:
                self._silent.add(rank)
                for number, step in self._open.items():
                    step.waiting -= number > reached


class _OpenStep(Generic[Sample]):
    """A step that some rank reported and that is not closed. `waiting`: ranks that are still to report it."""

    __slots__ = ("samples", "since", "waiting")

    def __init__(self, since: float, waiting: int, samples: dict[int, Sample]) -> None:
        self.since, self.waiting, self.samples = since, waiting, samples
