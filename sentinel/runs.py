"""Live state of runs, their ranks and their steps: written by the ingest, read by all the rest.

    Runs -> Run (name, id) -> Attempt (ranks, layer tables, steps) -> Rank (state, what it said in its hello)

What ranks report of a step becomes a `Step` (`steps.py`) once it is closed.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from sentinel import wire
from sentinel.alignment import Alignment
from sentinel.devices import Devices
from sentinel.errors import ProtocolError
from sentinel.flight import Flight
from sentinel.heartbeat import Heartbeat, Stall
from sentinel.replicas import differing
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

FURTHEST = 1 << 53
"""Step: as `wire.parts.Integer` has it."""

RankState = Literal["live", "lost", "gone"]


class Stage(NamedTuple):
    """`monitor.stage`: from a step on the task or the data are others, on purpose."""

    seq: int
    name: str


class Ending(msgspec.Struct, frozen=True):
    """How the process of a rank ended."""

    time: float
    """Monotonic seconds."""
    status: int | None
    """Its exit status, a signal negative; None: not known."""
    oom: bool
    """Whether its cgroup counts a kill for want of memory since it began."""


class Rank:
    """One rank of an attempt."""

    def __init__(self, hello: wire.Hello, now: float) -> None:
        self.hello = hello
        self.state: RankState = "live"
        self.heard = now
        self.last_seq = hello.next_seq - 1
        self.dropped = 0
        self.process = 0
        """pid as this node's kernel knows it; `identity.pid` is what the rank calls itself, maybe in a container."""
        self.phase = ""
        self.pace = wire.Pace(spacing={}, wanted={}, costs={})
        self.daemon_share = 0.0
        """CPU seconds a second that the daemon uses for it."""
        self.snapshots: set[int] = set(hello.snapshots)
        self.goodbye: wire.Goodbye | None = None
        self.ending: Ending | None = None
        self.heartbeat: Heartbeat | None = None
        self.stall = Stall()
        self.dump = ""
        """Its stacks, when it stalled last: text of faulthandler."""
        self.flight: Flight | None = None
        """Its collectives then."""
        self.collected: dict[str, Any] = {}
        """Evidence of an incident, the newest of each kind (`sentinel.collected`)."""

    @property
    def identity(self) -> wire.Identity:
        return self.hello.identity


class _Reported(msgspec.Struct):
    time: float
    values: dict[str, float]
    layers: wire.LayerBlock | None = None


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
        self._alignments: dict[int, Alignment[_Reported]] = {}
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
                _check(block, len(self.tables[block.table].layers))
        rank.heard, rank.dropped, rank.pace = now, batch.dropped, batch.pace or rank.pace
        rows = _rows(batch, self.tables)
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

    def _alignment(self, stream: int) -> Alignment[_Reported]:
        if stream not in self._alignments:
            self._alignments[stream] = Alignment()
        return self._alignments[stream]

    def _step(self, seq: int, reported: Mapping[int, _Reported]) -> Step:
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


class Run:
    """One run: its attempts, the last of which is the present one."""

    def __init__(self, name: str, run_id: str, now: float) -> None:
        self.name, self.run_id = name, run_id
        self.attempt = Attempt(0, now)

    def hello(self, hello: wire.Hello, now: float) -> tuple[Rank, bool]:
        """A rank says who it is. Returns it, and whether a new attempt began with it.

        A rank that comes back with the same session only lost its connection. One with another session was started
        or attached again: the first such rank opens the attempt, the others follow into it. Raises ProtocolError
        for a rank of an attempt that is over.
        """
        identity = hello.identity
        current = self.attempt
        known = current.ranks.get(identity.rank)
        again = known is not None and known.identity.session != identity.session
        restarts = max((rank.identity.attempt for rank in current.ranks.values()), default=identity.attempt)
        if identity.attempt < restarts and (known is None or again):
            raise ProtocolError(f"attempt {identity.attempt} of {self.name} is over: attempt {current.number} runs")
        if not current.ranks:
            current.number = max(identity.attempt, current.number)
        began = not current.ranks or identity.attempt > restarts or again
        if began and current.ranks:
            self.attempt = Attempt(max(identity.attempt, current.number + 1), now)
        return self.attempt.hello(hello, now), began


class Runs:
    """All runs that a daemon serves."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def of(self, identity: wire.Identity, now: float) -> Run:
        """The run that a rank belongs to; a new one at its first hello."""
        if identity.run_id not in self._runs:
            name = "".join(c if c.isprintable() else " " for c in identity.run)  # no orders to anybody's terminal
            self._runs[identity.run_id] = Run(name, identity.run_id, now)
        return self._runs[identity.run_id]

    def forget(self, run_id: str) -> None:
        """The run has ended, and nobody asks for it."""
        self._runs.pop(run_id, None)


def _rows(batch: wire.Batch, tables: Container[str]) -> list[tuple[int, _Reported]]:
    """Layers of a table that is not there yet are left out: nobody has looked whether they fit."""
    seqs, times = wire.packed("q", batch.seqs), wire.packed("d", batch.times)
    if len(seqs) != len(times):
        raise ProtocolError(f"a batch of {len(seqs)} steps with {len(times)} times")
    if seqs and not (min(seqs) >= 0 and max(seqs) <= FURTHEST):
        raise ProtocolError(f"a batch with steps {min(seqs)} to {max(seqs)}: they count from 0")
    whole: dict[str, array[float]] = {}
    partly: dict[str, tuple[array[int], array[float]]] = {}
    for name, column in batch.columns.items():
        values, rows = wire.packed("d", column.values), wire.packed("H", column.rows)
        if len(values) != (len(rows) if column.rows else len(seqs)) or (rows and max(rows) >= len(seqs)):
            present = len(rows) if column.rows else len(seqs)
            raise ProtocolError(f"column {name} has {len(values)} values for {present} of {len(seqs)} steps")
        if column.rows:
            partly[name] = rows, values
        else:
            whole[name] = values
    # Most columns are whole: put together by zip, at a tenth of what it costs value by value.
    if len(whole) == 1:  # the loss, in a loop that is fast
        ((name, values),) = whole.items()
        reported = [_Reported(time, {name: value}) for time, value in zip(times, values, strict=True)]
    else:
        rising = zip(*whole.values(), strict=True) if whole else itertools.repeat((), len(seqs))
        timed = zip(times, rising, strict=True)
        reported = [_Reported(time, dict(zip(whole, row, strict=True))) for time, row in timed]
    for name, (rows, values) in partly.items():
        for row, value in zip(rows, values, strict=True):
            reported[row].values[name] = value
    place = {seq: row for row, seq in enumerate(seqs)} if batch.layers else {}
    for block in batch.layers:
        if block.seq in place and block.table in tables:
            reported[place[block.seq]].layers = block
    return list(zip(seqs, reported, strict=True))


def _check(block: wire.LayerBlock, layers: int) -> None:
    """Raises ProtocolError where statistics are not those of a table of so many layers: once they are taken in, whoever
    closes the step would stumble over them, and that may be another rank."""
    rows = wire.packed("I", block.layers)
    values = len(rows) if rows else layers
    if any(len(column) != 4 * values for column in block.stats.values()) or max(rows, default=0) >= max(layers, 1):
        raise ProtocolError(f"layer statistics of step {block.seq} do not fit their table of {layers} layers")
