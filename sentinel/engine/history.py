"""What it takes to go back: copies of the rules' state, and the samples since.

    checkpoint     every 256 steps. The newest four are kept, and of the older ones fewer and fewer
    samples        since the oldest of these four: what the rules read, and no more, in packed arrays

To rewind is to take the newest checkpoint that is not too new and to replay the samples after it. So the state after
a rewind is the state that was, windows since the start and frozen baselines with it; no function has to know how to
run backwards. Further back than the samples reach, the state is that of the older checkpoint.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from sentinel.engine.observation import SCOPES, Entity, Observation
from sentinel.engine.plan import Plan

SPACING = 256
"""Steps between checkpoints."""

DENSE = 4
"""Checkpoints whose samples are kept: a rewind of 768 steps or less is exact. Rollback's own reach (`every=200,
keep=2, margin=100`) is 500."""

SPARSE = 6
"""Older checkpoints, spread so that each is about twice as far back as the one after it."""


class _Series:
    """The samples of one metric of one entity."""

    __slots__ = ("seqs", "values")

    def __init__(self) -> None:
        self.seqs, self.values = array("q"), array("d")

    def cut(self, start: int, stop: int) -> None:
        """Keep the samples with start < seq <= stop."""
        first, last = bisect_right(self.seqs, start), bisect_right(self.seqs, stop)
        del self.seqs[last:], self.values[last:], self.seqs[:first], self.values[:first]


class History:
    """Checkpoints and samples of one run."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._wanted: dict[str, set[str]] = {scope: set() for scope in SCOPES}
        for plan in plans:
            self._want(plan)
        self._checkpoints: list[tuple[int, bytes]] = []
        self._series: dict[tuple[Entity, str], _Series] = {}
        self._steps, self._times = array("q"), array("d")

    def _want(self, plan: Plan) -> None:
        for source in plan.inputs:
            self._wanted[plan.scope].add(source.metric)
        for below in plan.subplans:
            self._want(below)

    def record(self, observation: Observation) -> None:
        """Keep what the rules read of a step."""
        self._steps.append(observation.seq)
        self._times.append(observation.time)
        for entity, values in observation.values.items():
            wanted = self._wanted.get(entity[0])
            if not wanted:
                continue
            for metric, value in values.items():
                if metric in wanted:
                    series = self._series.get((entity, metric))
                    if series is None:
                        series = self._series[entity, metric] = _Series()
                    series.seqs.append(observation.seq)
                    series.values.append(value)

    @property
    def checkpoint_due(self) -> bool:
        """Whether it is time for one."""
        newest = self._checkpoints[-1][0] if self._checkpoints else self._steps[0] - 1
        return self._steps[-1] - newest >= SPACING

    def checkpoint(self, seq: int, state: bytes) -> None:
        """Keep the state after a step, and let go of what is too old."""
        self._checkpoints.append((seq, state))
        while len(self._checkpoints) > DENSE + SPARSE:
            del self._checkpoints[self._most_crowded()]
        if len(self._checkpoints) > DENSE:
            self._cut(self._checkpoints[-DENSE][0], seq)

    @property
    def checkpoints(self) -> list[tuple[int, bytes]]:
        """(seq, state), rising."""
        return list(self._checkpoints)

    def restore(self, checkpoints: Iterable[tuple[int, bytes]], past: Iterable[Observation]) -> None:
        """Take these for what was kept so far; of the past as much as would have been."""
        self._checkpoints = list(checkpoints)
        oldest = self._checkpoints[-DENSE][0] if len(self._checkpoints) > DENSE else -1
        for observation in past:
            if observation.seq > oldest:
                self.record(observation)

    def _most_crowded(self) -> int:
        """The old checkpoint that is missed least: its neighbours are near, for how far back they are."""
        seqs = [seq for seq, _ in self._checkpoints]
        gaps = [(later - earlier) / (seqs[-1] - earlier) for earlier, later in pairwise([-1, *seqs[: -DENSE + 1]])]
        joined = [one + two for one, two in pairwise(gaps)]
        return joined.index(min(joined))

    def rewind(self, to: int) -> tuple[bytes | None, list[Observation]]:
        """Forget what is after `to`; answer the newest state before it (None: the empty one) and what to replay."""
        while self._checkpoints and self._checkpoints[-1][0] > to:
            self._checkpoints.pop()
        base, state = self._checkpoints[-1] if self._checkpoints else (-1, None)
        self._cut(self._steps[0] - 1 if self._steps else -1, to)
        return state, list(self._replayed(base))

    def _replayed(self, base: int) -> Iterator[Observation]:
        found: dict[int, dict[Entity, dict[str, float]]] = {seq: {} for seq in self._steps if seq > base}
        for (entity, metric), series in self._series.items():
            first = bisect_right(series.seqs, base)
            for seq, value in zip(series.seqs[first:], series.values[first:], strict=True):
                found[seq].setdefault(entity, {})[metric] = value
        first = bisect_right(self._steps, base)
        for seq, time in zip(self._steps[first:], self._times[first:], strict=True):
            yield Observation(seq, time, found[seq])

    def _cut(self, start: int, stop: int) -> None:
        first, last = bisect_right(self._steps, start), bisect_right(self._steps, stop)
        del self._steps[last:], self._times[last:], self._steps[:first], self._times[:first]
        for key, series in list(self._series.items()):
            series.cut(start, stop)
            if not series.seqs:
                del self._series[key]
