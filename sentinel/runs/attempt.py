"""One start of a run: its ranks, what they report, and the steps that are closed from their reports."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sentinel import wire
from sentinel.errors import ProtocolError
from sentinel.runs.devices import Devices
from sentinel.runs.rank import Rank
from sentinel.runs.rank_set import RankSet
from sentinel.runs.replica_checks import differing
from sentinel.runs.reported import Reported, check_layers, list_reported_steps
from sentinel.runs.step_alignment import Alignment
from sentinel.runs.steps import LayerStats, RunStep, combine_layers, combine_ranks
from sentinel.signals import SIGNALS

RECENT_STEPS = 2048
RECENT_LAYER_STATS = 256
RELAXED_STEPS = 64
"""Steps of which at least one has all signals, in the fastest loops (`hooks/core/governor.py`)."""
RECENT_RARE = 16
"""Number of steps with rare samples (tier 3) that are kept: 256 consecutive steps may contain none."""
_RARE = frozenset(name for name, signal in SIGNALS.items() if signal.scope == "layer" and signal.tier == 3)
RECENT_DIFFERING = 64
RECENT_VALUES = 4 * 1024 * 1024
"""Numbers in the recent steps, at most, at 50 bytes each: 2,048 steps of 16 ranks with 120 signals."""
LAYER_VALUES = 16 * 1024 * 1024
"""Numbers in the recent layer statistics, at most, at 4 bytes each: 256 steps of 4,000 layers with 16 statistics."""
STAGES = 1024
TABLE_LAYERS = 1 << 18
"""Layers in all layer tables of an attempt, at most; above it the oldest tables are forgotten."""
SIGNALS_OF_A_RANK = 4096
"""Column names of a rank, at most: `monitor.log` takes 1,024 in a process, and each start of it may bring others."""
AWAITED_RANKS = 4096
"""Ranks of the world, at most, that are waited for before they have said hello: no node has more."""
ARRIVAL_SECONDS = 10.0
"""How long to wait for ranks of the world that have not said hello. Rank 0 may be the only one attached, and those of
other nodes have daemons of their own."""


class Stage(NamedTuple):
    """A stage that `monitor.stage` announced: from step `seq` on the task or the data differ, on purpose."""

    seq: int
    name: str


class Attempt(RankSet):
    """One start of a run: from the first hello of its ranks to the last goodbye."""

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.began = now
        super().__init__()
        self.tables: dict[str, wire.LayerTable] = {}
        self.recent: deque[RunStep] = deque(maxlen=RECENT_STEPS)
        self.recent_layers: deque[tuple[int, LayerStats]] = deque(maxlen=RECENT_LAYER_STATS)
        self._values = self._layer_values = 0
        """How many numbers `recent` and `recent_layers` hold."""
        self._rare_layers: deque[tuple[int, LayerStats]] = deque(maxlen=RECENT_RARE)
        self.recent_differing: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=RECENT_DIFFERING)
        """(seq, layers) of steps at which ranks that should hold the same parameters did not, with the layers that
        differed."""
        self.before_alert: dict[int, list[RunStep]] = {}
        """Incident -> the recent steps at the time when it fired, for incidents whose evidence takes long to arrive."""
        self.stages: list[Stage] = []
        """Stages in the order in which they were announced."""
        self.withheld_by: tuple[str, ...] = ()
        """Rules for which no snapshot is taken now, as they may be about to roll back."""
        self.devices = Devices()
        """GPUs and host of this node, as they were read last."""
        self.clock_shift = 0.0
        """Seconds to add to a time of the rules to get the wall-clock time, for people."""
        self._alignment = Alignment[Reported]()
        self._awaited: set[int] = set()
        self._added: dict[int, dict[int, dict[str, float]]] = {}
        """Seq of an open step -> rank -> values that the rank sent for the step after it had reported it."""

    def has(self, rank: Rank) -> bool:
        """Return whether the rank belongs to this attempt: one of a former attempt may still be connected."""
        return self.ranks.get(rank.identity.rank) is rank

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the run from the hello of its first rank."""
        return min(self.ranks.items())[1].hello.facts if self.ranks else {}

    @property
    def layers(self) -> Sequence[wire.Layer]:
        """All parameters of the first optimizer and its models, from the newest layer table."""
        return next((table.layers for table in reversed(self.tables.values()) if table.stream == 0), ())

    @property
    def layer_samples(self) -> list[tuple[int, LayerStats]]:
        """(seq, statistics) of the last steps that have any, after those of earlier steps with rare samples."""
        oldest = self.recent_layers[0][0] if self.recent_layers else 0
        return [*(pair for pair in self._rare_layers if pair[0] < oldest), *self.recent_layers]

    def find_end(self) -> float:
        """Return the Unix seconds of the last goodbye, or of the last sign from a rank that is lost; now, while a rank
        is live."""
        now, moment = time.time(), time.monotonic()
        if self.live or not self.ranks:
            return now
        ends = [one.goodbye.time if one.goodbye else now - (moment - one.heard) for one in self.ranks.values()]
        return min(max(ends), now)

    def step_seconds(self) -> float:
        """Return the median time in seconds of the last 20 steps; 0.1 s where that is not known."""
        last = itertools.islice(reversed(self.recent), 20)
        times = sorted(
            seconds for step in last if math.isfinite(seconds := step.run.get("step_seconds", math.nan)) and seconds > 0
        )
        return times[len(times) // 2] if times else 0.1

    def present(self) -> dict[str, float]:
        """Return the run's newest values. In a fast loop not all of them are from the last step."""
        return {name: value for step in self._last() for name, value in step.run.items()}

    def _last(self) -> list[RunStep]:
        return [*itertools.islice(reversed(self.recent), RELAXED_STEPS)][::-1]

    def latest(self, signal: str) -> float | None:
        """Return the run's newest value of a signal; sampled signals are not in every step."""
        return next((step.run[signal] for step in reversed(self.recent) if signal in step.run), None)

    def latest_logged(self, most: int) -> dict[str, float]:
        """Return the run's newest values of the first `most` signals that are not Sentinel's own: `monitor.log`'s."""
        names = (name for rank in self.ranks.values() for name in rank.hello.signals if name in rank.signals)
        wanted = dict.fromkeys(itertools.islice(dict.fromkeys(names), most), math.nan)
        missing = set(wanted)
        for step in reversed(self.recent):
            for name in missing & step.run.keys():
                wanted[name] = step.run[name]
                missing.discard(name)
            if not missing:
                break
        return {name: value for name, value in wanted.items() if name not in missing}

    def latest_of_ranks(self, signal: str) -> dict[int, float]:
        """Return the ranks' newest values of a signal, from the last steps."""
        found: dict[int, float] = {}
        for step in itertools.islice(reversed(self.recent), RELAXED_STEPS):
            if signal in step.run and len(found) < len(self.ranks):
                for number, values in step.ranks.items():
                    if signal in values:
                        found.setdefault(number, values[signal])
        return found

    def silent(self) -> frozenset[int]:
        """Return the ranks that are connected and do not report steps as the others do."""
        return self._alignment.silent

    def resume(self, ranks: Mapping[int, Rank], steps: Iterable[RunStep], closed_to: int) -> None:
        """Go on where another daemon stopped: with its ranks, which are waited for again, and its closed steps."""
        self.ranks.update(ranks)
        for step in steps:
            self._remember(step)
        self._alignment = Alignment(closed_to=closed_to)
        self._awaited = {number for number, rank in ranks.items() if rank.state == "lost"}
        self._alignment.join_all(self._awaited, closed_to + 1)

    def hello(self, hello: wire.Hello, now: float) -> Rank:
        """Add a rank, or take it back after its connection broke."""
        number = hello.identity.rank
        known = self.ranks.get(number)
        if known is None:
            self.ranks[number] = known = Rank(hello, now)
        else:
            known.hello, known.state, known.heard, known.goodbye = hello, "live", now, None
            known.snapshots = set(hello.snapshots)
        if len(self.ranks) == 1:
            self._awaited = set(range(min(hello.identity.world_size, AWAITED_RANKS))) - {number}
            self._alignment.join_all(self._awaited)
        self._awaited.discard(number)
        self._alignment.join(number, hello.next_seq)
        return known

    def lose(self, number: int, goodbye: wire.Goodbye | None) -> None:
        """Mark a rank as gone or lost: its connection ended, with a goodbye or without."""
        rank = self.ranks[number]
        rank.state, rank.goodbye = ("gone", goodbye) if goodbye else ("lost", None)
        self._alignment.leave(number)

    def take(self, rank: Rank, batch: wire.Batch, now: float) -> list[RunStep]:
        """Take in a batch. Raises ProtocolError where its columns do not fit together, or its layers their table.

        Steps of other optimizers than the first are ignored. Returns what the batch adds to steps that are closed,
        namely what was logged after the last one. It is not judged.
        """
        rank.heard, rank.pace = now, batch.pace or rank.pace
        rank.dropped, rank.skipped = batch.dropped, batch.skipped
        if batch.stream:
            return []
        rank.signals.update(batch.columns)
        if len(rank.signals) > SIGNALS_OF_A_RANK:
            raise ProtocolError(f"more than {SIGNALS_OF_A_RANK} signals from one rank")
        for block in batch.layers:
            if block.table in self.tables:
                check_layers(block, len(self.tables[block.table].layers))
        rows, added = list_reported_steps(batch, self.tables), list[RunStep]()
        self._alignment.report_all(rank.identity.rank, rows, now)
        for seq, sample in rows:
            if seq <= rank.last_seq and (more := self._add_values(rank.identity.rank, seq, sample.take_values())):
                added.append(more)
            rank.last_seq = max(rank.last_seq, seq)
        return added

    def _add_values(self, number: int, seq: int, values: Mapping[str, float]) -> RunStep | None:
        """Add values that a rank had not sent for a step that it reported before. Return them as a step if that step is
        closed."""
        if seq > self.closed_to:
            self._added.setdefault(seq, {}).setdefault(number, {}).update(values)
            return None
        at = next((at for at in reversed(range(len(self.recent))) if self.recent[at].seq <= seq), -1)
        if at < 0 or (step := self.recent[at]).seq != seq:
            return None
        known = step.ranks.get(number, {})
        names = values.keys() - known.keys()
        if not names:  # sent again, after the connection broke
            return None
        ranks = {**step.ranks, number: {**known, **{name: values[name] for name in names}}}
        apart = {rank: {name: own[name] for name in names & own.keys()} for rank, own in ranks.items()}
        more = RunStep(seq, step.time, apart, combine_ranks(apart.values()))
        self.recent[at] = msgspec.structs.replace(step, ranks=ranks, run={**step.run, **more.run})
        return more

    def take_closed(self, now: float) -> Iterator[RunStep]:
        """Yield the steps of the first optimizer that closed since the last call. Each is closed and remembered when it
        is handed out: if the caller stops in between, the next call yields the others, and an alert looks back from its
        own step, not from the last."""
        if self._awaited and (now - self.began > ARRIVAL_SECONDS or self._has_ended()):
            for number in self._awaited:
                self._alignment.leave(number)
            self._awaited.clear()
        for seq, reported in self._alignment.take_closed(now):
            step = self._step(seq, reported)
            self._remember(step)
            yield step

    def _has_ended(self) -> bool:
        """Whether each rank that said hello has said goodbye, or its process has ended: a daemon ends then, and judges
        what it has."""
        return all(rank.goodbye is not None or rank.ending is not None for rank in self.ranks.values())

    @property
    def closed_to(self) -> int:
        """The last closed step of the first optimizer; -1 before the first."""
        return self._alignment.closed_to

    def add_table(self, table: wire.LayerTable) -> None:
        """Add a layer table that a rank sent. Above `TABLE_LAYERS` layers the oldest tables are forgotten."""
        self.tables[table.digest] = table
        layers = sum(len(known.layers) for known in self.tables.values())
        while layers > TABLE_LAYERS and len(self.tables) > 1:
            layers -= len(self.tables.pop(next(iter(self.tables))).layers)

    def announce_stage(self, stage: Stage) -> bool:
        """Add a stage that a rank announced; return whether it is new. All ranks announce it, at the same step as a
        rule, and again to a daemon that takes over; the first announcement counts. At most `STAGES` are kept."""
        if stage in self.stages or (self.stages and stage.name == self.stages[-1].name) or len(self.stages) >= STAGES:
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
        self._values = sum(map(_values, self.recent))
        self._layer_values = sum(_layer_values(layers) for _, layers in self.recent_layers)

    def _remember(self, step: RunStep) -> None:
        """Add a step to the recent ones, and drop the oldest above `RECENT_STEPS` steps or `RECENT_VALUES` numbers."""
        # Layers are kept apart: at every step they would be 100 times the scalars.
        if step.layers is not None:
            self._remember_layers(step.seq, step.layers)
            step = msgspec.structs.replace(step, layers=None)
        self._values += _values(step)
        while self.recent and (len(self.recent) >= RECENT_STEPS or self._values > RECENT_VALUES):
            self._values -= _values(self.recent.popleft())
        self.recent.append(step)

    def _remember_layers(self, seq: int, layers: LayerStats) -> None:
        self._layer_values += _layer_values(layers)
        recent = self.recent_layers
        while recent and (len(recent) >= RECENT_LAYER_STATS or self._layer_values > LAYER_VALUES):
            self._layer_values -= _layer_values(recent.popleft()[1])
        recent.append((seq, layers))
        if not _RARE.isdisjoint(layers.stats):
            self._rare_layers.append((seq, layers))

    def _step(self, seq: int, reported: Mapping[int, Reported]) -> RunStep:
        added = self._added.pop(seq, {})
        ranks = {number: {**added.get(number, {}), **sample.take_values()} for number, sample in reported.items()}
        if len(reported) == 1:
            ((number, sample),) = reported.items()
            if sample.layers is None:  # the common case in a fast loop
                return RunStep(seq, sample.time, ranks, combine_ranks((ranks[number],)))
        blocks = [sample.layers for sample in reported.values() if sample.layers is not None]
        known = [(self.tables[block.table], block) for block in blocks if block.table in self.tables]
        if len(blocks) < len(reported) and any(table.sharded for table, _ in known):
            known = []  # not every rank sampled this step, and a layer without one of its shards is a different layer
        if apart := differing(known):
            self.recent_differing.append((seq, apart))
        return RunStep(
            seq=seq,
            time=max([sample.time for sample in reported.values()]),
            ranks=ranks,
            run=combine_ranks(ranks.values()),
            layers=combine_layers(known) if known else None,
        )


def _values(step: RunStep) -> int:
    return len(step.run) + sum(map(len, step.ranks.values()))


def _layer_values(layers: LayerStats) -> int:
    return len(layers.names) * len(layers.stats)
