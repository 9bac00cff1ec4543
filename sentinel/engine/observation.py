"""What the engine is fed: one closed step of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

Scope = Literal["run", "rank", "layer", "gpu", "node"]
SCOPES: tuple[Scope, ...] = ("run", "rank", "layer", "gpu", "node")


class Entity(NamedTuple):
    """Whom a number is about."""

    scope: str
    name: str
    """Empty for the run; a rank's number; a layer's, a GPU's or a node's name."""

    def __str__(self) -> str:
        if self.scope in ("run", "layer"):
            return self.name or "the run"
        return f"{'GPU' if self.scope == 'gpu' else self.scope} {self.name}"


RUN = Entity("run", "")


class Observation(msgspec.Struct, frozen=True):
    """All numbers of one step, once it is closed. A signal that was not sampled at this step is not there."""

    seq: int
    time: float
    """Unix seconds at which the step ended."""
    values: Mapping[Entity, Mapping[str, float]]


class Rewound(NamedTuple):
    """The run went back to where it was after step `to`; the next step is after `at`."""

    to: int
    at: int
    step_offset: int
    """What makes a seq the step that people are shown, from now on."""


class Step:
    """An observation sorted by scope, once for all rules."""

    __slots__ = ("_by_scope", "seq", "time")

    def __init__(self, observation: Observation) -> None:
        self.seq, self.time = observation.seq, observation.time
        self._by_scope: dict[str, list[tuple[Entity, Mapping[str, float]]]] = {}
        for sampled in observation.values.items():
            scope = sampled[0][0]
            if scope in self._by_scope:
                self._by_scope[scope].append(sampled)
            else:
                self._by_scope[scope] = [sampled]
        self._by_scope.setdefault("run", [(RUN, {})])

    def of(self, scope: str) -> Iterable[tuple[Entity, Mapping[str, float]]]:
        """Who has samples at this step. The run is always there."""
        return self._by_scope.get(scope, ())
