"""Checkpoints for a rewind: copies of the rules' state, and the samples since.

    checkpoint     every 256 steps, more rarely in a fast loop. The newest four are kept, and ever fewer older ones
    samples        since the oldest of these four: what the rules read, and no more, in packed arrays

To rewind is to take the newest checkpoint that is not too new and to replay the samples after it. So the state after
a rewind is the earlier state, including windows since the start and frozen baselines; no function has to know how to
run backwards. Further back than the samples reach, the state is that of the older checkpoint.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from sentinel.engine.expressions.plan import Plan, list_wanted
from sentinel.engine.observation import Entity, Observation, ObservedStep, Sampled, Table

SPACING = 256
"""Steps between checkpoints, at least."""
SECONDS, LONGEST = 4.0, 2048
"""Seconds of the run between checkpoints, at least, unless these are over `LONGEST` steps: copying the state takes some
ms."""

DENSE = 4
"""Checkpoints whose samples are kept: a rewind of 768 steps or less is exact. Rollback itself reaches back 500 steps
(`every=200, keep=2, margin=100`)."""

FEW = 4
"""Samples of one entity, at most, that are kept as they came: most steps of a fast loop have only the loss."""

GROUPS = 64
"""Sets of entities that are remembered, at most."""

SPARSE = 6
"""Older checkpoints, spread so that each is about twice as far back as the one after it."""


class _Block(NamedTuple):
    """Samples of one step: each of these metrics for each of these entities."""

    entities: tuple[Entity, ...]
    metrics: tuple[str, ...]
    values: array[float]
    """Shape (metrics, entities)."""


class ObservationHistory:
    """Checkpoints and samples of one run."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._wanted = list_wanted(plans)
        self._checkpoints: list[tuple[int, bytes]] = []
        self._steps, self._times = array("q"), array("d")
        self._blocks: list[tuple[_Block | Sampled, ...]] = []
        """The samples of each step."""
        self._groups: dict[tuple[Entity, ...], tuple[Entity, ...]] = {}
        """Entities that were sampled together: each such tuple is kept once."""

    def record(self, step: ObservedStep) -> None:
        """Keep what the rules read of a step."""
        self._steps.append(step.seq)
        self._times.append(step.time)
        blocks: list[_Block | Sampled] = []
        for scope, group in step.groups():
            blocks += group if len(group) == 1 and len(group[0][1]) <= FEW else self._pack_blocks(step, scope, group)
        if step.table is not None and (block := self._make_table_block(step.table)) is not None:
            blocks.append(block)
        self._blocks.append(tuple(blocks))

    def _make_table_block(self, table: Table) -> _Block | None:
        names = self._wanted[table.scope] & table.columns.keys()
        packed = array("d")
        for name in names:
            packed.extend(array("d", table.columns[name]))
        return _Block(table.entities, tuple(names), packed) if names else None

    def _pack_blocks(self, step: ObservedStep, scope: str, group: Sequence[Sampled]) -> Iterator[_Block]:
        names = self._wanted[scope]
        if len(group) == 1:
            ((entity, values),) = group
            if kept := tuple([name for name in values if name in names]):
                yield _Block((entity,), kept, array("d", [values[name] for name in kept]))
            return
        entities = self._together(tuple([entity for entity, _ in group]))
        whole, packed = [], array("d")
        for name in names:
            column = step.column(scope, name)
            if None not in column:
                whole.append(name)
                packed.extend(column)  # type: ignore[arg-type]
                continue
            there = [(entity, value) for entity, value in zip(entities, column, strict=True) if value is not None]
            if there:
                some = self._together(tuple([entity for entity, _ in there]))
                yield _Block(some, (name,), array("d", [value for _, value in there]))
        if whole:
            yield _Block(entities, tuple(whole), packed)

    def _together(self, entities: tuple[Entity, ...]) -> tuple[Entity, ...]:
        if len(self._groups) >= GROUPS:
            self._groups.clear()
        return self._groups.setdefault(entities, entities)

    @property
    def checkpoint_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        newest = self._checkpoints[-1][0] if self._checkpoints else self._steps[0] - 1
        since = self._steps[-1] - newest
        if since < SPACING or since >= LONGEST:
            return since >= SPACING
        return self._times[-1] - self._times[bisect_right(self._steps, newest)] >= SECONDS

    def checkpoint(self, seq: int, state: bytes) -> None:
        """Keep the state after a step, and drop what is too old."""
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
        """Replace what was kept so far by these; of the past, keep as much as would have been kept."""
        self._checkpoints = list(checkpoints)
        oldest = self._checkpoints[-DENSE][0] if len(self._checkpoints) > DENSE else -1
        for observation in past:
            if observation.seq > oldest:
                self.record(ObservedStep(observation))

    def _most_crowded(self) -> int:
        """Return the index of the old checkpoint that is missed least: the gaps to its neighbours are small for how far
        back they are."""
        seqs = [seq for seq, _ in self._checkpoints]
        gaps = [(later - earlier) / (seqs[-1] - earlier) for earlier, later in pairwise([-1, *seqs[: -DENSE + 1]])]
        joined = [one + two for one, two in pairwise(gaps)]
        return joined.index(min(joined))

    def rewind(self, to: int) -> tuple[bytes | None, list[Observation]]:
        """Forget what is after `to`; return the newest state before it (None: the empty state) and the observations to
        replay."""
        while self._checkpoints and self._checkpoints[-1][0] > to:
            self._checkpoints.pop()
        base, state = self._checkpoints[-1] if self._checkpoints else (-1, None)
        self._cut(self._steps[0] - 1 if self._steps else -1, to)
        return state, list(self._replay_from(base))

    def _replay_from(self, base: int) -> Iterator[Observation]:
        for place in range(bisect_right(self._steps, base), len(self._steps)):
            found: dict[Entity, dict[str, float]] = {}
            for block in self._blocks[place]:
                if not isinstance(block, _Block):
                    found.setdefault(block[0], {}).update(block[1])
                    continue
                entities, metrics, values = block
                for i, name in enumerate(metrics):
                    for entity, value in zip(entities, values[i * len(entities) :], strict=False):
                        found.setdefault(entity, {})[name] = value
            yield Observation(self._steps[place], self._times[place], found)

    def _cut(self, start: int, stop: int) -> None:
        """Keep the steps with start < seq <= stop."""
        first, last = bisect_right(self._steps, start), bisect_right(self._steps, stop)
        for kept in (self._steps, self._times, self._blocks):
            del kept[last:], kept[:first]
