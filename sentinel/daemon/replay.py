"""Judges records afterwards: the frames of `SENTINEL_RECORD` files take the same path as those of a live run.

The clock is that of the record: each frame arrives at the end of its last step, and the files of several ranks are
merged by that time. No notice is sent, and nothing is rolled back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from sentinel import wire
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.case import Case
from sentinel.engine import Rule
from sentinel.errors import ConfigError, ProtocolError
from sentinel.notify.notifier import Notifier
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers.terminal import Terminal
from sentinel.notify.silences import Silences
from sentinel.runs import Attempt, NoRanks, Rank, Run, Runs
from sentinel.store import Store

_READ = 1 << 20
_FLUSH_EVERY = 100
"""Frames between two writes of the history."""


class Arrival(NamedTuple):
    """One recorded message."""

    time: float
    """Unix seconds."""
    file: int
    """Index of the file."""
    message: wire.FromRank


def replay_records(
    paths: Sequence[Path],
    rules: Sequence[Rule],
    history: Callable[[Run], Store],
    progress: Callable[[int], None] = lambda _: None,
) -> list[Case]:
    """Return the cases of the runs in these records, in the order in which they fired.

    `history` opens the file that a run is stored in; `progress` is called with the number of bytes of each read. Raises
    ConfigError if a file is no record, or has another protocol.
    """
    replay = _Replay(rules, history)
    arrivals = heapq.merge(*(_arrivals(number, path, progress) for number, path in enumerate(paths)), key=_moment)
    try:
        for arrival in arrivals:
            replay.take(arrival)
    finally:
        replay.end()
    found = [case for watch in replay.watches.values() for case in watch.incidents.log.cases.values()]
    return sorted(found, key=lambda case: case.time)


class _Replay:
    def __init__(self, rules: Sequence[Rule], history: Callable[[Run], Store]) -> None:
        self.watches: dict[str, WatchedRun] = {}
        self._rules, self._history = rules, history
        self._runs = Runs()
        self._ranks: dict[int, tuple[WatchedRun, Rank]] = {}
        self._now, self._taken = 0.0, 0

    def take(self, arrival: Arrival) -> None:
        self._now = arrival.time
        self._taken += 1
        if isinstance(arrival.message, wire.Hello):
            self._hello(arrival.file, arrival.message)
        elif arrival.file in self._ranks:
            watch, rank = self._ranks[arrival.file]
            watch.ingest.message(rank, arrival.message, self._now)
            if isinstance(arrival.message, wire.Goodbye):
                watch.ingest.drop_rank(rank, self._now)
                del self._ranks[arrival.file]
        for watch in self.watches.values():
            watch.tick(self._now)
            if watch.store and self._taken % _FLUSH_EVERY == 0:
                watch.store.write()

    def _hello(self, file: int, hello: wire.Hello) -> None:
        # A rollback would wait for promises that no rank gives.
        hello = msgspec.structs.replace(hello, rollback=None, promise=0)
        run = self._runs.find_run(hello.identity, self._now)
        watch = self.watches.get(run.run_id)
        if watch is None:
            context = RunContext(run, self._history(run), NoRanks())
            watch = WatchedRun(context, make_silent_notifier(context), self._rules)
            self.watches[run.run_id] = watch
        self._ranks[file] = watch, watch.ingest.hello(hello, self._now)

    def end(self) -> None:
        """End the runs at the end of the files; a rank that said no goodbye was killed there."""
        ends = {run_id: _find_end(watch.run.attempt) for run_id, watch in self.watches.items()}
        for watch, rank in self._ranks.values():
            watch.ingest.drop_rank(rank, self._now)
        for run_id, watch in self.watches.items():
            if watch.store:
                watch.store.records.end_attempt(watch.run.attempt.number, ends[run_id])
                watch.store.close()


def _find_end(attempt: Attempt) -> float:
    """Return the Unix seconds of the last sign of an attempt's ranks: by the clock of the record, not by the node's."""
    return max(rank.goodbye.time if rank.goodbye is not None else rank.heard for rank in attempt.ranks.values())


def make_silent_notifier(context: RunContext) -> Notifier:
    """Return a notifier without receivers and without a terminal."""
    pipeline = Pipeline(context.run.name, context.run.run_id, (), outbox=Outbox(None))
    return Notifier(Terminal(context.print_notice, frozenset()), pipeline, Silences(None), context.record_case)


def _moment(arrival: Arrival) -> float:
    return arrival.time


def _arrivals(file: int, path: Path, progress: Callable[[int], None]) -> Iterator[Arrival]:
    """Yield the messages of one file. A message without a time, such as a hello, gets that of the next that has one."""
    now, untimed = 0.0, list[wire.FromRank]()
    for message in _messages(path, progress):
        untimed.append(message)
        if (time := _time(message)) is not None:
            now = max(now, time)
            yield from (Arrival(now, file, one) for one in untimed)
            untimed.clear()
    yield from (Arrival(now, file, one) for one in untimed)


def _time(message: wire.FromRank) -> float | None:
    if isinstance(message, wire.Batch):
        times = wire.unpack_column("d", message.times)
        return float(times[-1]) if times else None
    return message.time if isinstance(message, wire.PhaseChanged | wire.StageBegan | wire.SnapshotTaken) else None


def _messages(path: Path, progress: Callable[[int], None]) -> Iterator[wire.FromRank]:
    frames, first = wire.Frames(), True
    for chunk in _chunks(path):
        progress(len(chunk))
        try:
            for body in frames.feed(chunk):
                if first and (theirs := wire.opening_protocol(body)) != wire.PROTOCOL:
                    raise ConfigError(
                        f"{path}: recorded with protocol {theirs}, this version replays {wire.PROTOCOL}; "
                        "replay it with the version of training-sentinel that recorded it"
                    )
                first = False
                yield wire.from_rank(body)
        except ProtocolError as error:
            raise ConfigError(f"{path}: no record of Sentinel's, or damaged ({error})") from None
    if first:
        raise ConfigError(f"{path}: no record of Sentinel's: there is no whole message in it")


def _chunks(path: Path) -> Iterable[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_READ):
                yield chunk
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
