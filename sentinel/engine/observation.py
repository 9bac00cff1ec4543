"""The input of the engine: one closed step of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

Scope = Literal["run", "rank", "layer", "gpu", "node"]
SCOPES: tuple[Scope, ...] = ("run", "rank", "layer", "gpu", "node")


class Entity(NamedTuple):
    """The run, rank, layer, GPU or node that a number is about."""

    scope: str
    name: str
    """Empty for the run; a rank's number; the name of a layer, GPU or node."""

    def __str__(self) -> str:
        if self.scope in ("run", "layer"):
            return self.name or "the run"
        return f"{'GPU' if self.scope == 'gpu' else self.scope} {self.name}"


RUN = Entity("run", "")


class Table(NamedTuple):
    """Samples of many entities of one scope, in columns: layers come in thousands, and few rules look at each."""

    entities: tuple[Entity, ...]
    """At least one entity, all of one scope."""
    columns: Mapping[str, Sequence[float]]
    """Metric -> one sample per entity."""

    @property
    def scope(self) -> str:
        """The scope of all these entities."""
        return self.entities[0].scope


class Observation(msgspec.Struct, frozen=True):
    """All numbers of one closed step. A signal that was not sampled at this step is absent."""

    seq: int
    time: float
    """Unix seconds at which the step ended."""
    values: Mapping[Entity, Mapping[str, float]]
    table: Table | None = None
    """Further numbers, of a scope that does not occur in `values`."""


class Rewound(NamedTuple):
    """The run went back to its state after step `to`; the next step is after `at`."""

    to: int
    at: int
    step_offset: int
    """The offset from now on that is added to a seq to get the user's step."""


class Staged(NamedTuple):
    """The user announced another task or other data (`monitor.stage`), from the next step on."""


Sampled = tuple[Entity, Mapping[str, float]]

WIDE = 128
"""Entities of one scope above which the scope is wide: see `Evaluator`."""


_NONE = frozenset[str]()


class ObservedStep:
    """An observation sorted by scope, once for all rules."""

    __slots__ = ("_by_scope", "_columns", "_rows", "seq", "table", "time", "values", "wide")

    def __init__(self, observation: Observation) -> None:
        self.seq, self.time, self.values = observation.seq, observation.time, observation.values
        self.table = observation.table
        self._rows: list[Sampled] | None = None
        """The rows of the table, made on first use."""
        self._by_scope: dict[str, list[Sampled]] = {}
        self._columns: dict[tuple[str, str], Sequence[float | None]] = {}
        groups = self._by_scope
        for sampled in self.values.items():
            scope = sampled[0][0]
            if scope in groups:
                groups[scope].append(sampled)
            else:
                groups[scope] = [sampled]
        if "run" not in groups:
            groups["run"] = [(RUN, {})]
        self.wide = _NONE
        """Scopes with many entities."""
        if len(self.values) > WIDE or self.table is not None:
            wide = [scope for scope, group in groups.items() if len(group) > WIDE]
            if self.table is not None and len(self.table.entities) > WIDE:
                wide.append(self.table.scope)
            self.wide = frozenset(wide)

    def list_sampled(self, scope: str) -> Sequence[Sampled]:
        """Return the entities of a scope with their samples at this step. The run is always included."""
        group = self._by_scope.get(scope)
        return self._list_table_rows(scope) if group is None else group

    def _list_table_rows(self, scope: str) -> Sequence[Sampled]:
        """Return the rows of the table, made only when needed: most rules do not need them at most steps."""
        table = self.table
        if table is None or scope != table.scope:
            return ()
        if self._rows is None:
            rows = zip(*table.columns.values(), strict=True)
            samples = [dict(zip(table.columns, row, strict=True)) for row in rows]
            self._rows = list(zip(table.entities, samples, strict=True))
        return self._rows

    def groups(self) -> Iterable[tuple[str, Sequence[Sampled]]]:
        """Return the samples of each scope, except those of the entities in the table."""
        return self._by_scope.items()

    def column(self, scope: str, metric: str) -> Sequence[float | None]:
        """Return a metric's samples, in the order of `list_sampled`; None for an entity without one."""
        column = self._columns.get((scope, metric))
        if column is None:
            column = self._columns[scope, metric] = [values.get(metric) for _, values in self._by_scope[scope]]
        return column
