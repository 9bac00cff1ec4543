"""A closed step of a run as the rules see it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from sentinel.engine import RUN, Entity, Observation
from sentinel.steps import Step


def observation(step: Step) -> Observation:
    """The numbers of the run, of each rank, and of each layer where they were sampled."""
    values: dict[Entity, Mapping[str, float]] = {RUN: step.run}
    for rank, sample in step.ranks.items():
        values[Entity("rank", str(rank))] = sample
    if step.layers is not None:
        for name, stats in step.layers.items():
            values[_layer(name)] = stats
    return Observation(seq=step.seq, time=step.time, values=values)


@functools.lru_cache(maxsize=4096)
def _layer(name: str) -> Entity:
    """Made once, and not at each step."""
    return Entity("layer", name)
