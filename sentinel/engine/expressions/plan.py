"""A compiled expression, and how it runs: slots, stages, feeds.

An expression over one entity is a row of numbered slots. Slot 0 is the step's seq; inputs are slots that a metric is
copied into; each function with a memory is a stage, which reads its operand from the slots before it and writes its
own. What has no memory is an expression over the slots, computed where its value is wanted.

    median(past(loss, 3), 100)      slot 1: loss      slot 2: past of slot 1      slot 3: median of slot 2

A sample sets the `fresh` bit of its slot; a stage runs when a slot that it reads is fresh, and is fresh itself once
it has a value. So a window counts the samples of its own metric, whatever else is sampled at other steps.

What belongs to no single entity (`across`, and in a layer's rule the run's metrics) is a feed: a plan of its own, run
once a step, whose result is an input here.

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
"""The slot of the present step's seq."""
ASKED = 1
"""The slot that is true once an operator asked for the seq: else what was computed holds until there is a sample."""


Advance = Callable[[Slots, Sequence[WindowState], int, float, Mapping[str, float], int, bool], int]
"""Takes a step's samples of an entity: slots and states, the step's seq and time, the values, bits of the slots that
are fresh already, whether windows over `past` stand still. Answers the fresh bits: of its inputs, and of the slots that
feeds of another plan ask for."""


Scan = Callable[[Slots, Iterable[Sequence[float]]], bool]
"""Takes slots that have what is the same for all entities, and the samples of each entity; answers whether a condition
holds for any. Raises UnreadyError."""


class UnreadyError(Exception):
    """A slot that is asked for has no value yet. Raised often, with its number: an `__init__` would double the cost."""

    @property
    def slot(self) -> int:
        """Which one."""
        number: int = self.args[0]
        return number


class Input(NamedTuple):
    """A slot that takes a metric's samples."""

    slot: int
    metric: str
    seen: int
    """The slot that keeps the seq of its last sample, where `age` or `absent` asks; else -1."""


class PlanStage(NamedTuple):
    """A slot that a function with a memory writes."""

    slot: int
    operand: str
    """Source over the slots, as `operators` writes it."""
    bare: int
    """The slot that the operand is, where it is no more than that; else 0."""
    needs: int
    """Bits of the slots that the operand reads."""
    baseline: bool
    """Whether it is a window over `past`, which freezes."""
    judges: bool
    """Whether the operand is a condition (and may be about non-finite numbers)."""
    make: Callable[[Window], WindowState]
    window: Window


@dataclass(frozen=True, slots=True)
class Feed:
    """A slot that is filled from a plan of its own, the same for all entities."""

    slot: int
    plan: int
    """Position in `Plan.subplans`."""
    read: Read
    needs: int
    how: str
    """As `across` has it, or `only` where the plan is about the run."""
    sources: tuple[int, ...]
    """Slots of the metrics that it comes from, as far as they are here too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that expressions of one scope need, compiled."""

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
    """Whether a window is a duration, or a rate is taken: steps without a time will not do."""
    standing: int = field(init=False)
    """Bits of the slots that are fresh at each step."""
    reads: frozenset[str] = field(init=False)
    """Metrics of the inputs."""
    scopes: frozenset[str] = field(init=False)
    """Its own, and those of what feeds it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "standing", 1 << SEQ if self.always else 0)
        object.__setattr__(self, "reads", frozenset(source.metric for source in self.inputs))
        object.__setattr__(self, "scopes", frozenset([self.scope, *(plan.scope for plan in self.subplans)]))

    @property
    def forgetful(self) -> bool:
        """Whether what it says of a step depends on nothing but a sample of that step."""
        return not self.stages and not self.feeds and len(self.inputs) == 1

    @property
    def momentary(self) -> bool:
        """Whether nothing is kept of an entity but its last samples, and no step without one is news."""
        return self.scope != "run" and not self.stages and not self.always and bool(self.inputs)

    @property
    def weight(self) -> int:
        """What an entity costs, in operations of about a microsecond."""
        return len(self.stages) + 3

    @property
    def metrics(self) -> set[str]:
        """All that it takes samples of, and what feeds it."""
        return {source.metric for source in self.inputs}.union(*(plan.metrics for plan in self.subplans))


def list_wanted(plans: Iterable[Plan]) -> dict[str, set[str]]:
    """Scope -> metrics that plans take samples of, what feeds them too."""
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
"""A feed's last value, and whether it is of this step."""


class Cohort:
    """The tracks of a plan, one an entity, and the cohorts that feed it."""

    __slots__ = ("_fed", "below", "tracks")

    def __init__(self, plan: Plan) -> None:
        self.tracks: dict[Entity, Track] = {}
        self.below = [Cohort(subplan) for subplan in plan.subplans]
        self._fed: list[Fed] = [(None, False)] * len(plan.feeds)

    def idle(self, plan: Plan, step: ObservedStep) -> bool:
        """Whether no entity has a sample in this step: no window moves."""
        if self.below:
            return False
        for entity, values in step.list_sampled(plan.scope):
            if entity not in self.tracks or not plan.reads.isdisjoint(values):
                return False
        return True

    def advance(self, plan: Plan, step: ObservedStep, *, below_frozen: bool) -> News:
        """Take a step; answer the entities that have news.

        `below_frozen`: windows over `past` of the feeds, which serve all entities, stand still.
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
        """Take a step for some of the entities, once what feeds them is there."""
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
        """Put what the feeds have into an entity's slots; answer the bits of what is new."""
        fresh = 0
        for feed, (value, is_new) in zip(plan.feeds, self._fed, strict=True):
            slots[feed.slot] = value
            fresh |= is_new << feed.slot
        return fresh

    def feed(self, plan: Plan, step: ObservedStep, stand_still: bool) -> None:
        """Bring what feeds it up to this step."""
        pairs = zip(plan.subplans, self.below, strict=True)
        self.gather(plan, [cohort.advance(subplan, step, below_frozen=stand_still) for subplan, cohort in pairs])

    def gather(self, plan: Plan, below: Sequence[News]) -> None:
        """Make one number of each feed, out of the news of the cohorts below."""
        for i, feed in enumerate(plan.feeds):
            value = _gather_news(feed, below[feed.plan])
            self._fed[i] = (self._fed[i][0], False) if value is None else (value, True)


News = list[tuple[Entity, Track]]


def _gather_news(feed: Feed, news: News) -> float | None:
    """One number out of the tracks that have news; NaN where one of them is not finite, None where there is none."""
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
