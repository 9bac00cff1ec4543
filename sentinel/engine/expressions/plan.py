"""A compiled expression, and how it runs: slots, stages, feeds.

An expression over one entity is a row of numbered slots. Slot 0 is the step's seq; inputs are slots that a metric is
copied into; each function with a memory is a stage, which reads its operand from the slots before it and writes its
own. An expression without a memory is a function of the slots, computed where its value is wanted.

    median(past(loss, 3), 100)      slot 1: loss      slot 2: past of slot 1      slot 3: median of slot 2

A sample sets the `fresh` bit of its slot; a stage runs when a slot that it reads is fresh, and is fresh itself once
it has a value. So a window counts the samples of its own metric, whatever else is sampled at other steps.

A value that belongs to no single entity (`across`, and in a layer's rule the run's metrics) is a feed: a plan of its
own, run once a step, whose result is an input here.

Plans are code, made once; `Track` and `Cohort` are data, and can be copied by pickling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sentinel.engine.expressions.arithmetic import exact_mean
from sentinel.engine.expressions.functions import Window
from sentinel.engine.observation import SCOPES, Entity, ObservedStep, Sampled, Scope
from sentinel.engine.windows.sliding import WindowState

Slots = list[float | None]
Read = Callable[[Slots], Any]
SEQ = 0
"""The slot with the present step's seq."""
ASKED = 1
"""The slot that is true once an operator asked for the seq: otherwise a computed value holds until the next sample."""


Advance = Callable[[Slots, Sequence[WindowState], int, float, Mapping[str, float], int, bool], int]
"""Takes a step's samples of an entity: slots and states, the step's seq and time, the values, bits of the slots that
are fresh already, whether windows over `past` are frozen. Returns the fresh bits: of its inputs, and of the slots that
feeds of another plan ask for."""


Scan = Callable[[Slots, Iterable[Sequence[float]]], bool]
"""Takes slots with what is the same for all entities, and the samples of each entity; returns whether a condition holds
for any of them. Raises UnreadyError."""


class UnreadyError(Exception):
    """Raised where a slot that is read has no value yet. Raised often, with the slot's number: an `__init__` would
    double the cost."""

    @property
    def slot(self) -> int:
        """The number of the slot without a value."""
        number: int = self.args[0]
        return number


class Input(NamedTuple):
    """A slot that takes a metric's samples."""

    slot: int
    metric: str
    seen: int
    """The slot that keeps the seq of its last sample, where `age` or `absent` asks for it; else -1."""


class PlanStage(NamedTuple):
    """A slot that a function with a memory writes."""

    slot: int
    operand: str
    """Python source over the slots, as `operators` writes it."""
    bare: int
    """The slot that the operand is, if it is nothing but a slot; else 0."""
    needs: int
    """Bits of the slots that the operand reads."""
    baseline: bool
    """Whether it is a window over `past`, which freezes."""
    judges: bool
    """Whether the operand is a condition (which may be about non-finite numbers)."""
    make: Callable[[Window], WindowState]
    window: Window


@dataclass(frozen=True, slots=True)
class Feed:
    """A slot that is filled from a plan of its own, with the same value for all entities."""

    slot: int
    plan: int
    """Position of that plan in `Plan.subplans`."""
    read: Read
    needs: int
    how: str
    """As in `across`, or `only` where that plan is about the run."""
    sources: tuple[int, ...]
    """Slots of the metrics that it comes from, as far as they are inputs here too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the expressions of one scope need, compiled."""

    scope: Scope
    size: int
    inputs: tuple[Input, ...]
    stages: tuple[PlanStage, ...]
    feeds: tuple[Feed, ...]
    subplans: tuple[Plan, ...]
    always: bool
    """Whether each step is news: `age` and `absent` ask about steps without a sample."""
    awaited: int
    """Bits of the slots that stages read."""
    advance: Advance
    timed: bool
    """Whether it has a window by duration, or a rate, so that steps need a time."""
    standing: int = field(init=False)
    """Bits of the slots that are fresh at each step."""
    reads: frozenset[str] = field(init=False)
    """Metrics of the inputs."""
    scopes: frozenset[str] = field(init=False)
    """Its own scope, and those of the plans that feed it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "standing", 1 << SEQ if self.always else 0)
        object.__setattr__(self, "reads", frozenset(source.metric for source in self.inputs))
        object.__setattr__(self, "scopes", frozenset([self.scope, *(plan.scope for plan in self.subplans)]))

    @property
    def forgetful(self) -> bool:
        """Whether its result for a step depends only on a sample of that step."""
        return not self.stages and not self.feeds and len(self.inputs) == 1

    @property
    def momentary(self) -> bool:
        """Whether nothing is kept of an entity but its last samples, and no step without a sample is news."""
        return self.scope != "run" and not self.stages and not self.always and bool(self.inputs)

    @property
    def weight(self) -> int:
        """Cost of an entity, in operations of about a microsecond."""
        return len(self.stages) + 3

    @property
    def metrics(self) -> set[str]:
        """All metrics that it and the plans that feed it take samples of."""
        return {source.metric for source in self.inputs}.union(*(plan.metrics for plan in self.subplans))


def list_wanted(plans: Iterable[Plan]) -> dict[str, set[str]]:
    """Return scope -> metrics that plans, and the plans that feed them, take samples of."""
    found: dict[str, set[str]] = {scope: set() for scope in SCOPES}
    waiting = list(plans)
    while waiting:
        plan = waiting.pop()
        found[plan.scope].update(source.metric for source in plan.inputs)
        waiting += plan.subplans
    return found


class Track:
    """The slots and states of one entity."""

    __slots__ = ("fresh", "slots", "states")

    def __init__(self, plan: Plan) -> None:
        self.slots: Slots = [None] * plan.size
        self.states = [stage.make(stage.window) for stage in plan.stages]
        self.fresh = 0


Fed = tuple[float | None, bool]
"""A feed's last value, and whether it is from this step."""


class Cohort:
    """The tracks of a plan, one per entity, and the cohorts that feed it."""

    __slots__ = ("_fed", "below", "tracks")

    def __init__(self, plan: Plan) -> None:
        self.tracks: dict[Entity, Track] = {}
        self.below = [Cohort(subplan) for subplan in plan.subplans]
        self._fed: list[Fed] = [(None, False)] * len(plan.feeds)

    def idle(self, plan: Plan, step: ObservedStep) -> bool:
        """Return whether no entity has a sample in this step, so that no window moves."""
        if self.below:
            return False
        for entity, values in step.list_sampled(plan.scope):
            if entity not in self.tracks or not plan.reads.isdisjoint(values):
                return False
        return True

    def advance(self, plan: Plan, step: ObservedStep, *, below_frozen: bool) -> News:
        """Take a step; return the entities that have news.

        `below_frozen`: windows over `past` of the feeds, which serve all entities, are frozen.
        """
        if self.below:
            self.feed(plan, step, below_frozen)
        return self.take(plan, step.list_sampled(plan.scope), step, (), below_frozen)

    def take(
        self,
        plan: Plan,
        group: Sequence[Sampled],
        step: ObservedStep,
        frozen: Collection[Entity],
        below_frozen: bool = False,
    ) -> News:
        """Take a step for some of the entities, after the cohorts that feed it have taken it."""
        news = []
        advance, tracks, always = plan.advance, self.tracks, plan.standing
        for entity, values in group:
            track = tracks.get(entity)
            if track is None:
                track = tracks[entity] = Track(plan)
            fresh = always | self.put(plan, track.slots) if self._fed else always
            stand_still = below_frozen or (entity in frozen if frozen else False)
            track.fresh = advance(track.slots, track.states, step.seq, step.time, values, fresh, stand_still)
            if track.fresh:
                news.append((entity, track))
        return news

    def put(self, plan: Plan, slots: Slots) -> int:
        """Write the values of the feeds into an entity's slots; return the bits of those that are new."""
        fresh = 0
        for feed, (value, is_new) in zip(plan.feeds, self._fed, strict=True):
            slots[feed.slot] = value
            fresh |= is_new << feed.slot
        return fresh

    def feed(self, plan: Plan, step: ObservedStep, stand_still: bool) -> None:
        """Bring the cohorts that feed it up to this step."""
        pairs = zip(plan.subplans, self.below, strict=True)
        self.gather(plan, [cohort.advance(subplan, step, below_frozen=stand_still) for subplan, cohort in pairs])

    def gather(self, plan: Plan, below: Sequence[News]) -> None:
        """Combine the news of the cohorts below into one number for each feed."""
        for i, feed in enumerate(plan.feeds):
            value = _gather_news(feed, below[feed.plan])
            self._fed[i] = (self._fed[i][0], False) if value is None else (value, True)


News = list[tuple[Entity, Track]]


def _gather_news(feed: Feed, news: News) -> float | None:
    """Return one number from the tracks that have news; NaN where one of them is not finite, None where there is
    none."""
    found: dict[Entity, float] = {}
    for entity, track in news:
        if track.fresh & feed.needs:
            try:
                found[entity] = feed.read(track.slots)
            except UnreadyError:
                continue
    return _gather(found, feed.how) if found else None


def _gather(found: dict[Entity, float], how: str) -> float:
    values = list(found.values())
    if how == "only":
        return values[0]
    if not all(map(math.isfinite, values)):
        return math.nan
    if how == "argmax":
        return float(max(found, key=found.__getitem__).name)
    if how == "mean":
        return exact_mean(values)
    if how == "norm":
        return math.hypot(*values)
    if how == "spread":
        return max(values) - min(values)
    return max(values) if how == "max" else min(values)
