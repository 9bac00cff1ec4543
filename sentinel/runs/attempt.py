"""One start of a run: its ranks, what they report, and the steps that are closed by it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sentinel import wire
from sentinel.alignment import Alignment
from sentinel.devices import Devices
from sentinel.replicas import differing
from sentinel.runs.rank import Rank
from sentinel.runs.reported import Reported, check_layers, reported_steps
from sentinel.signals import SIGNALS
from sentinel.steps import LayerStats, Step, combined, combined_layers

RECENT_STEPS = 2048
RECENT_LAYER_STATS = 256
RELAXED_STEPS = 64
"""Of so many one is whole, in the fastest loops (`hooks/pacing.py`)."""
RECENT_RARE = 16
"""Of those that have what is taken rarely (tier 3): at their side 256 that were taken at every step are a moment."""
_RARE = frozenset(name for name, signal in SIGNALS.items() if signal.scope == "layer" and signal.tier == 3)
RECENT_DIFFERING = 64
ARRIVAL_SECONDS = 10.0
"""How long ranks of the world that have not said hello are waited for. Rank 0 alone may be attached, for good."""


class Stage(NamedTuple):
    """`monitor.stage`: from a step on the task or the data are others, on purpose."""

    seq: int
    name: str


class Attempt:
    """One start of a run: from the first hello of its ranks to the last goodbye."""

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.began = now
        self.ranks: dict[int, Rank] = {}
        self.tables: dict[str, wire.LayerTable] = {}
        self.recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        self.recent_layers: deque[tuple[int, LayerStats]] = deque(maxlen=RECENT_LAYER_STATS)
        self._rare_layers: deque[tuple[int, LayerStats]] = deque(maxlen=RECENT_RARE)
        self.recent_differing: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=RECENT_DIFFERING)
        """Steps at which ranks that should hold the same parameters did not, and the layers."""
        self.before_alert: dict[int, list[Step]] = {}
        """Incident -> the steps that were at hand when it fired, of those whose evidence takes long to come."""
        self.stages: list[Stage] = []
        """In the order in which they were announced."""
        self.devices = Devices()
        """This node, as it was read last."""
        self.clock_shift = 0.0
        """Seconds that make a moment of the rules one of the wall clock, for people."""
        self._alignments: dict[int, Alignment[Reported]] = {}
        self._awaited: set[int] = set()

    @property
    def live(self) -> list[Rank]:
        """Ranks with an open connection."""
        return [rank for rank in self.ranks.values() if rank.state == "live"]

    def has(self, rank: Rank) -> bool:
        """Whether it is of this attempt: one of a former attempt may still be connected."""
        return self.ranks.get(rank.identity.rank) is rank

    @property
    def complete(self) -> bool:
        """Whether every rank of the world is live: what is agreed by all can be done."""
        return bool(self.live) and len(self.live) == max(rank.identity.world_size for rank in self.ranks.values())

    @property
    def held(self) -> set[int]:
        """Seqs of the snapshots that every rank holds."""
        return set.intersection(*(rank.snapshots for rank in self.live)) if self.live else set()

    @property
    def last_seq(self) -> int:
        """The furthest step that any rank reported; -1 before the first."""
        return max((rank.last_seq for rank in self.ranks.values()), default=-1)

    @property
    def step_offset(self) -> int:
        """What makes the user's step of a seq."""
        return min(self.ranks.items())[1].hello.step_offset if self.ranks else 0

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the first rank said of the run in its hello."""
        return min(self.ranks.items())[1].hello.facts if self.ranks else {}

    @property
    def unseen(self) -> Sequence[str]:
        """What the first rank said that it cannot see."""
        return min(self.ranks.items())[1].hello.unseen if self.ranks else ()

    @property
    def layers(self) -> Sequence[wire.Layer]:
        """All parameters of the first optimizer and its models, as they were told last."""
        return next((table.layers for table in reversed(self.tables.values()) if table.stream == 0), ())

    @property
    def layer_samples(self) -> list[tuple[int, LayerStats]]:
        """(seq, statistics) of the last steps that have any, and of those before that have the rare ones."""
        oldest = self.recent_layers[0][0] if self.recent_layers else 0
        return [*(pair for pair in self._rare_layers if pair[0] < oldest), *self.recent_layers]

    def step_seconds(self) -> float:
        """Median time of the last 20 steps; 0.1 s where that is not known."""
        last = itertools.islice(reversed(self.recent), 20)
        times = sorted(
            seconds for step in last if math.isfinite(seconds := step.run.get("step_seconds", math.nan)) and seconds > 0
        )
        return times[len(times) // 2] if times else 0.1

    def present(self) -> dict[str, float]:
        """The run's newest values. In a fast loop not all of them are of the last step."""
        return {name: value for step in self._last() for name, value in step.run.items()}

    def _last(self) -> list[Step]:
        return [*itertools.islice(reversed(self.recent), RELAXED_STEPS)][::-1]

    def latest(self, signal: str) -> float | None:
        """The run's newest value of a signal; sampled ones are not in every step."""
        return next((step.run[signal] for step in reversed(self.recent) if signal in step.run), None)

    def latest_of_ranks(self, signal: str) -> dict[int, float]:
        """The ranks' newest values of a signal, of the last steps."""
        found: dict[int, float] = {}
        for step in itertools.islice(reversed(self.recent), RELAXED_STEPS):
            if signal in step.run and len(found) < len(self.ranks):
                for number, values in step.ranks.items():
                    if signal in values:
                        found.setdefault(number, values[signal])
        return found

    def silent(self) -> frozenset[int]:
        """Ranks that are connected and do not report steps as the others do."""
        return self._alignments[0].silent if 0 in self._alignments else frozenset()

    def resume(self, ranks: Mapping[int, Rank], steps: Iterable[Step], closed_to: int) -> None:
        """Go on where another daemon was: with its ranks, which are waited for again, and its closed steps."""
        self.ranks.update(ranks)
        for step in steps:
            self._remember(step)
        alignment = self._alignments[0] = Alignment(closed_to=closed_to)
        self._awaited = {number for number, rank in ranks.items() if rank.state == "lost"}
        for number in self._awaited:
            alignment.join(number, closed_to + 1)

    def hello(self, hello: wire.Hello, now: float) -> Rank:
        """A rank arrives, or comes back after its connection broke."""
        number = hello.identity.rank
        known = self.ranks.get(number)
        if known is None:
            self.ranks[number] = known = Rank(hello, now)
        else:
            known.hello, known.state, known.heard, known.goodbye = hello, "live", now, None
            known.snapshots = set(hello.snapshots)
        alignment = self._alignment(0)
        if len(self.ranks) == 1:
            self._awaited = set(range(hello.identity.world_size)) - {number}
            for other in self._awaited:
                alignment.join(other)
        self._awaited.discard(number)
        alignment.join(number, hello.next_seq)
        return known

    def lose(self, number: int, goodbye: wire.Goodbye | None) -> None:
        """A rank's connection ended, with a goodbye or without."""
        rank = self.ranks[number]
        rank.state, rank.goodbye = ("gone", goodbye) if goodbye else ("lost", None)
        for alignment in self._alignments.values():
            alignment.leave(number)

    def take(self, rank: Rank, batch: wire.Batch, now: float) -> None:
        """Take in a batch. Raises ProtocolError where its columns do not fit together, or its layers their table."""
        for block in batch.layers:
            if block.table in self.tables:
                check_layers(block, len(self.tables[block.table].layers))
        rank.heard, rank.dropped, rank.pace = now, batch.dropped, batch.pace or rank.pace
        rows = reported_steps(batch, self.tables)
        self._alignment(batch.stream).report_all(rank.identity.rank, rows, now)
        if batch.stream == 0:
            rank.last_seq = max(rank.last_seq, max([seq for seq, _ in rows], default=-1))

    def closed(self, now: float) -> Iterator[Step]:
        """The steps of the first optimizer that closed since the last call. Each is remembered when it is handed out:
        a batch may hold more of them than are kept, and an alert looks back from its own step, not from the last."""
        alignment = self._alignment(0)
        if self._awaited and now - self.began > ARRIVAL_SECONDS:
            for number in self._awaited:
                alignment.leave(number)
            self._awaited.clear()
        for stream, other in self._alignments.items():
            if stream:  # a series of its own, which nothing is made of yet: it must not pile up
                other.closed(now)
        for seq, reported in alignment.closed(now):
            step = self._step(seq, reported)
            if step.layers is None:
                self.recent.append(step)
            else:
                self._remember(step)
            yield step

    @property
    def closed_to(self) -> int:
        """The last closed step of the first optimizer; -1 before the first."""
        return self._alignment(0).closed_to

    def announced(self, stage: Stage) -> bool:
        """A rank announced a stage; whether that is news. All ranks say it, at the same step as a rule, and again to a
        daemon that takes over; the first counts."""
        if stage in self.stages or (self.stages and stage.name == self.stages[-1].name):
            return False
        self.stages.append(stage)
        return True

    @property
    def stage_seq(self) -> int:
        """The first step of the present stage; 0 where none was announced."""
        return self.stages[-1].seq if self.stages else 0

    def rewind(self, to: int, at: int) -> None:
        """Forget the samples of the steps after `to` up to `at`: their state is no longer that of the run."""
        self.recent = deque((s for s in self.recent if not to < s.seq <= at), RECENT_STEPS)
        self.recent_layers = deque((p for p in self.recent_layers if not to < p[0] <= at), RECENT_LAYER_STATS)
        self._rare_layers = deque((p for p in self._rare_layers if not to < p[0] <= at), RECENT_RARE)

    def _remember(self, step: Step) -> None:
        # Layers are kept apart: at every step they would be 100 times the scalars.
        if step.layers is not None:
            self.recent_layers.append((step.seq, step.layers))
            if not _RARE.isdisjoint(step.layers.stats):
                self._rare_layers.append((step.seq, step.layers))
            step = msgspec.structs.replace(step, layers=None)
        self.recent.append(step)

    def _alignment(self, stream: int) -> Alignment[Reported]:
        if stream not in self._alignments:
            self._alignments[stream] = Alignment()
        return self._alignments[stream]

    def _step(self, seq: int, reported: Mapping[int, Reported]) -> Step:
        if len(reported) == 1:
            ((number, sample),) = reported.items()
            if sample.layers is None:  # as most are, in a loop that is fast
                return Step(seq, sample.time, {number: sample.values}, combined((sample.values,)))
        ranks = {number: sample.values for number, sample in reported.items()}
        blocks = [sample.layers for sample in reported.values() if sample.layers is not None]
        known = [(self.tables[block.table], block) for block in blocks if block.table in self.tables]
        if apart := differing(known):
            self.recent_differing.append((seq, apart))
        return Step(
            seq=seq,
            time=max([sample.time for sample in reported.values()]),
            ranks=ranks,
            run=combined(ranks.values()),
            layers=combined_layers(known) if known else None,
        )
