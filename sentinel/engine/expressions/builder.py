"""Lay out the slots of a plan while expressions are compiled into it; equal subexpressions share a slot."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sentinel.engine.expressions.functions import Function, Window
from sentinel.engine.expressions.generation import advancing, reading
from sentinel.engine.expressions.operators import slot
from sentinel.engine.expressions.plan import ASKED, SEQ, Feed, Input, Plan, PlanStage, Read
from sentinel.engine.observation import Scope

Type = Literal["number", "condition"]

Vocabulary = Mapping[str, str]
"""Metric -> its scope: `rank`, `layer`, `gpu` or `node`. In other scopes a rank's metric means the run's value."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A compiled (sub)expression."""

    type: Type
    key: str
    """The expression's text in a normal form: equal for equal expressions."""
    source: str
    """Python source over the slots: see `operators`."""
    slot: int = 0
    """The slot that the term is, if it is nothing but a slot; else 0."""
    needs: int = 0
    """Bits of the slots that it reads."""
    exposed: int = 0
    """Bits of the inputs that must be finite for the term to have a meaning: those not inside is*() or count()."""
    metrics: frozenset[str] = frozenset()
    own: bool = False
    """Whether it contains a metric of the plan's own entities, and not only what feeds the plan."""
    baseline: bool = False
    """Whether it contains a `past`."""
    size: int = 1
    """Number of operations that it takes to compute."""

    @functools.cached_property
    def read(self) -> Read:
        """The function that returns the term's value. It raises UnreadyError."""
        return reading(self.source)


class Builder:
    """Builds one plan. `_children` holds the builders of the plans that feed it."""

    def __init__(self, scope: Scope, vocabulary: Vocabulary, min_samples: int = 0) -> None:
        self.scope, self.vocabulary, self.min_samples = scope, vocabulary, min_samples
        self._size = max(SEQ, ASKED) + 1
        self._inputs: dict[str, Input] = {}
        self._stages: list[PlanStage] = []
        self._feeds: list[Feed] = []
        self._children: dict[Scope, Builder] = {}
        self._terms: dict[str, Term] = {}
        self._always = self._timed = False

    def plan(self, told: int = 0) -> Plan:
        """Return all that was compiled, ready to run. `told`: bits of the slots whose changes another plan asks for."""
        subplans = tuple(
            child.plan(self._combine_needs(position)) for position, child in enumerate(self._children.values())
        )
        awaited = functools.reduce(operator.or_, (stage.needs for stage in self._stages), 0)
        inputs = tuple(self._inputs.values())
        return Plan(
            scope=self.scope,
            size=self._size,
            inputs=inputs,
            stages=tuple(self._stages),
            feeds=tuple(self._feeds),
            subplans=subplans,
            always=self._always,
            awaited=awaited,
            advance=advancing(inputs, self._stages, awaited, told),
            timed=self._timed or any(plan.timed for plan in subplans),
        )

    def _combine_needs(self, position: int) -> int:
        return functools.reduce(operator.or_, (feed.needs for feed in self._feeds if feed.plan == position), 0)

    def _slot(self) -> int:
        self._size += 1
        return self._size - 1

    def input(self, metric: str) -> Term:
        """Return the term for a metric's newest sample: the entity's own, or the run's."""
        if metric not in self._terms:
            if self.scope != "run" and self.vocabulary[metric] != self.scope:
                return self.feed(metric, self.child("run").input(metric), "run", "only")
            index = self._slot()
            self._inputs[metric] = Input(slot=index, metric=metric, seen=-1)
            self._terms[metric] = Term(type="number", key=metric, source=slot(index), slot=index, needs=1 << index,
                                       exposed=1 << index, metrics=frozenset({metric}), own=True)  # fmt: skip
        return self._terms[metric]

    def add_seen_slot(self, metric: str) -> int:
        """Return the slot with the seq of the last sample of one of the plan's own metrics. From now on each step
        counts as news to the plan."""
        source = self._inputs[metric]
        self._always = True
        if source.seen < 0:
            source = self._inputs[metric] = source._replace(seen=self._slot())
        return source.seen

    def stage(self, function: Function, key: str, operand: Term, window: Window) -> Term:
        """Add a function with a memory over an operand; return its term."""
        if key not in self._terms:
            assert function.state is not None
            self._timed |= window.seconds > 0 or function.name == "rate"
            index, judges = self._slot(), operand.type == "condition"
            baseline = operand.baseline or function.name == "past"
            self._stages.append(PlanStage(slot=index, operand=operand.source, bare=operand.slot, needs=operand.needs,
                                      baseline=operand.baseline, judges=judges, make=function.state,
                                      window=window))  # fmt: skip
            self._terms[key] = Term(type="number", key=key, source=slot(index), slot=index, needs=1 << index,
                                    exposed=0 if judges else operand.exposed, metrics=operand.metrics, own=operand.own,
                                    baseline=baseline)  # fmt: skip
        return self._terms[key]

    def child(self, scope: Scope) -> Builder:
        """Return the builder of the plan of another scope that feeds this one."""
        if scope not in self._children:
            self._children[scope] = Builder(scope, self.vocabulary, self.min_samples)
        return self._children[scope]

    def feed(self, key: str, term: Term, scope: Scope, how: str) -> Term:
        """Add a slot for a number from a child's term; return its term."""
        if key not in self._terms:
            index, position = self._slot(), list(self._children).index(scope)
            bare = key in term.metrics
            self._terms[key] = Term(type="number", key=key, source=slot(index), slot=index, needs=1 << index,
                                    exposed=1 << index, metrics=term.metrics, baseline=term.baseline)  # fmt: skip
            sources = (index,) if bare else self._sources(term.metrics)
            feed = Feed(slot=index, plan=position, read=term.read, needs=term.needs, how=how, sources=sources)
            self._feeds.append(feed)
        return self._terms[key]

    def _sources(self, metrics: frozenset[str]) -> tuple[int, ...]:
        """Return the slots of a feed's metrics, which are inputs here too, so that `no data` and `warming` can be
        distinguished.

        A layer's metric has no value for a run, a rank or a GPU: such a feed has no known slots.
        """
        known = [metric for metric in sorted(metrics) if self.vocabulary[metric] in ("rank", self.scope)]
        return tuple(self.input(metric).needs.bit_length() - 1 for metric in known)
