"""Convert a closed step of a run for the rules."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from sentinel.engine import RUN, Entity, Observation, Table
from sentinel.runs.steps import RunStep


def observation(step: RunStep) -> Observation:
    """Return the numbers of the run, of each rank, and of each layer where they were sampled."""
    values: dict[Entity, Mapping[str, float]] = {RUN: step.run}
    for rank, sample in step.ranks.items():
        values[_rank(rank)] = sample
    table, layers = None, step.layers
    if layers is not None and layers.stats and all(layers.present):
        table = Table(_entities(layers.names), layers.stats)
    elif layers is not None:
        values.update((Entity("layer", name), stats) for name, stats in layers.items())
    return Observation(seq=step.seq, time=step.time, values=values, table=table)


def mark_resumed(first: Observation) -> Observation:
    """Mark the first step that rules see, where it is not the run's first: they must not take it for the start."""
    return msgspec.structs.replace(first, values={**first.values, RUN: {**first.values[RUN], "resumed": 1.0}})


@functools.lru_cache(maxsize=1 << 16)
def _rank(number: int) -> Entity:
    return Entity("rank", str(number))


@functools.lru_cache(maxsize=64)
def _entities(names: tuple[str, ...]) -> tuple[Entity, ...]:
    """Return the entities of these layers, made once and not at each step."""
    return tuple([Entity("layer", name) for name in names])
