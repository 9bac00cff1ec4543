"""What the engine is fed: one closed step of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


Sampled = tuple[Entity, Mapping[str, float]]

WIDE = 128
"""Entities of one scope from which on it is wide: see `Evaluator`."""


class Step:
    """An observation sorted by scope, once for all rules."""

    __slots__ = ("_by_scope", "_columns", "seq", "time", "values", "wide")

    def __init__(self, observation: Observation) -> None:
        self.seq, self.time, self.values = observation.seq, observation.time, observation.values
        self._by_scope: dict[str, list[Sampled]] = {}
        self._columns: dict[tuple[str, str], list[float | None]] = {}
        for sampled in observation.values.items():
            scope = sampled[0][0]
            if scope in self._by_scope:
                self._by_scope[scope].append(sampled)
            else:
                self._by_scope[scope] = [sampled]
        self._by_scope.setdefault("run", [(RUN, {})])
        self.wide = frozenset(scope for scope, group in self._by_scope.items() if len(group) > WIDE)
        """Scopes with many entities."""

    def of(self, scope: str) -> Sequence[Sampled]:
        """Who has samples at this step. The run is always there."""
        return self._by_scope.get(scope, ())

    def groups(self) -> Iterable[tuple[str, Sequence[Sampled]]]:
        """Those of each scope."""
        return self._by_scope.items()

    def column(self, scope: str, metric: str) -> list[float | None]:
        """A metric's samples, in the order of `of`; None for whom there is none."""
        column = self._columns.get((scope, metric))
        if column is None:
            column = self._columns[scope, metric] = [values.get(metric) for _, values in self._by_scope[scope]]
        return column
