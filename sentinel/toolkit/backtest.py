"""Backtests of many recorded runs, in several processes: log files in, the alerts that rules would have raised out."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import msgspec

from sentinel.engine import Rule
from sentinel.engine.backtest import Alert, Looked, backtest
from sentinel.errors import ConfigError, LogError
from sentinel.rulebook import loader
from sentinel.text import did_you_mean, join_names
from sentinel.toolkit import logs
from sentinel.toolkit.logs import LogFile, Recording

CURVE_POINTS = 4000
"""Most points of a metric that are returned for a picture: twice its pixels. Extremes are kept."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What to apply to each run. Plain data, from which other processes make rules."""

    rules: tuple[Path, ...] = ()
    """Rule files in addition to the stock ones."""
    alerts: tuple[str, ...] = ()
    """Names of the rules to apply; empty: all."""
    names: Mapping[str, str] = {}
    """Metrics by column, beyond what `sentinel.naming` knows."""
    curves: bool = False
    """Whether to return metrics, for a picture."""


class Curve(msgspec.Struct, frozen=True):
    """A metric over the steps."""

    steps: list[int]
    values: list[float]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one replayed run, or why it could not be replayed."""

    run: str
    path: str
    format: str = ""
    rows: int = 0
    judged_from: int | None = None
    """First step that was judged, if a history has only some of the steps before it."""
    columns: dict[str, str] = {}
    """The log's names by metric."""
    rl_columns: tuple[str, ...] = ()
    """Columns by which the run is recognised as reinforcement learning; empty if it is not."""
    no_loss: tuple[str, ...] = ()
    """All names in the log, if rules read the loss and none of the names is known as one."""
    alerts: tuple[Alert, ...] = ()
    rules: tuple[Looked, ...] = ()
    untimed: tuple[str, ...] = ()
    """Rules that count seconds, and are not applied because the log has no times."""
    faults: int = 0
    """Number of lines that could not be read."""
    shown_faults: tuple[str, ...] = ()
    error: str = ""
    curves: dict[str, Curve] = {}

    @property
    def blind(self) -> list[Looked]:
        """Rules that made no judgement."""
        return [looked for looked in self.rules if not looked.judged]


def rules_of(terms: Terms) -> tuple[Rule, ...]:
    """Return the rules to apply. Raises RuleError or ConfigError for a mistake in a file or an unknown name."""
    stock = loader.stock_rules()
    for path in loader.files(terms.rules):
        loader.read(path, stock)  # a daemon goes on without a bad file; a backtest must report it
    book = loader.load(terms.rules)
    if book.notes:
        raise ConfigError(book.notes[0])
    known = {rule.name: rule for rule in book.rules}
    for name in terms.alerts:
        if name not in known:
            raise ConfigError(f"no rule is called {name}{did_you_mean(name, known)}")
    return tuple(rule for rule in book.rules if not terms.alerts or rule.name in terms.alerts)


def backtest_logs(found: Sequence[LogFile], terms: Terms, jobs: int) -> Iterator[list[Result]]:
    """Yield the results of each log, in order. A file in a folder that is no log gives none. Raises LogError where a
    process that replays logs was ended."""
    if jobs <= 1 or len(found) == 1:
        rules = rules_of(terms)
        yield from (_results(log, rules, terms) for log in found)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(found)), spawn, _start, (terms,)) as pool:
        try:
            yield from pool.map(_work, found)
        except BrokenProcessPool:
            raise LogError(
                "a process that replayed logs was ended, as the kernel does where memory runs out; no result of the "
                f"{len(found)} logs is printed: replay one at a time with --jobs 1, or name fewer logs"
            ) from None


_mine: list[Any] = []
"""The rules and terms of a worker process: rules are closures, which cannot be pickled."""


def _start(terms: Terms) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches each worker, too: its parent says so, once
    _mine[:] = [rules_of(terms), terms]


def _work(log: LogFile) -> list[Result]:
    return _results(log, *_mine)


def _results(log: LogFile, rules: Sequence[Rule], terms: Terms) -> list[Result]:
    try:
        recordings = logs.read(log.path)
    except LogError as error:
        return [Result(run=log.run, path=str(log.path), error=str(error))] if log.named else []
    return [_replay_recording(recording, recording.run or log.run, rules, terms) for recording in recordings]


def _replay_recording(recording: Recording, run: str, rules: Sequence[Rule], terms: Terms) -> Result:
    wanted: set[str] = set().union(*(rule.metrics for rule in rules))
    names = recording.choose_columns(sorted(wanted), terms.names)
    applied = [rule for rule in rules if recording.timed or not rule.timed]
    if not names:
        return Result(run=run, path=str(recording.path), error=_strange(recording))
    try:
        report = backtest(applied, recording.observations(names), run=run, step_offset=recording.step_offset)
    except ConfigError as error:  # a history is read again here, and further: with its ranks and layers
        return Result(run=run, path=str(recording.path), error=str(error))
    return Result(
        run=run,
        path=str(recording.path),
        format=recording.format,
        rows=report.steps,
        judged_from=recording.judged_from,
        columns=names,
        rl_columns=recording.rl_columns,
        no_loss=() if "loss" in names or "loss" not in wanted else tuple(recording.names),
        alerts=report.alerts,
        rules=report.rules,
        untimed=tuple(rule.name for rule in rules if rule not in applied),
        faults=recording.faults.count,
        shown_faults=tuple(recording.faults.shown),
        curves=_curves(recording, names) if terms.curves else {},
    )


def _strange(recording: Recording) -> str:
    return (
        f"{recording.path}: none of its columns is a metric that a rule reads; "
        f"name one with --map COLUMN=METRIC; there are: {join_names(recording.names, 12)}"
    )


def _curves(recording: Recording, names: Mapping[str, str]) -> dict[str, Curve]:
    return {metric: thin_curve(*recording.series(column)) for metric, column in names.items()}


def thin_curve(steps: Sequence[int], values: Sequence[float]) -> Curve:
    """Return a curve of at most some `CURVE_POINTS` points: the lowest and highest value of each piece."""
    stretch = math.ceil(len(values) / (CURVE_POINTS // 2))
    if stretch <= 2:
        return Curve(list(steps), list(values))
    kept: list[int] = []
    for start in range(0, len(values), stretch):
        finite = [i for i in range(start, min(start + stretch, len(values))) if math.isfinite(values[i])]
        ends = {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else {start}
        kept += sorted(ends)
    return Curve([steps[i] for i in kept], [values[i] for i in kept])
