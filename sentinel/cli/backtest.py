"""`sentinel rules backtest`: the alerts that rules would have raised in recorded runs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sentinel.cli import history as kept
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.errors import ConfigError, LogError
from sentinel.text import in_words, join_names

if TYPE_CHECKING:
    from sentinel.engine.backtest import Looked
    from sentinel.toolkit.backtest import Result, Terms
    from sentinel.toolkit.logs import LogFile

LISTED_RUNS = 20
"""Runs up to which all are listed; of more, only those with an alert, without a loss, or with unreadable lines."""

SHOWN_COLUMNS = 12
SHOWN_FILES = 5
"""Most names of files of a folder that were passed over, as most of them are no logs."""


@click.command(short_help="Replay recorded runs through the rules.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--rules", "rules", multiple=True, metavar="FILE", type=click.Path(exists=True, path_type=Path),
              help="Rule file or folder beside the stock rules; may be given again.")  # fmt: skip
@click.option("--alert", "alerts", multiple=True, metavar="NAME", help="Apply this rule only; may be given again.")
@click.option("--map", "names", multiple=True, metavar="COLUMN=METRIC", help="Take a column of the logs for a metric.")
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one a core, at most one a run]")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a picture (.svg).")  # fmt: skip
@json_option()
@click.pass_context
def backtest(
    ctx: click.Context,
    runs: tuple[str, ...],
    rules: tuple[Path, ...],
    alerts: tuple[str, ...],
    names: tuple[str, ...],
    jobs: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay recorded runs through the rules, and print the alerts they would have raised.

    RUN is a log file, a folder, a pattern, or the name of a run that is kept. A log may be of any format in
    docs/backtest.md, gzipped or not, such as JSON lines, CSV, TensorBoard's event files or what a trainer prints.

    Exit code 0: no alert; 1: an alert; 2: wrong use, or a log that cannot be read.

    \b
    Example:  sentinel rules backtest train_gpt --rules mine.yaml
              sentinel rules backtest runs/*.jsonl
              sentinel rules backtest metrics.csv --map my_loss=loss --plot picture.svg
              sentinel rules backtest tb/ --rules mine.yaml --alert RewardCollapse
    """
    from sentinel.toolkit import logs
    from sentinel.toolkit.backtest import Terms, rules_of
    from sentinel.web import json

    terms = Terms(rules=rules, alerts=alerts, names=_names(names), curves=plot is not None)
    if plot is not None and plot.suffix != ".svg":  # reported before a long replay
        name = plot.with_suffix(".svg") if plot.name else "picture.svg"
        raise ConfigError(f"--plot {plot}: the picture is written as SVG: name it {name}")
    rules_of(terms)  # a mistake in a rule file is reported before a long replay, and by one process only
    found = logs.find_logs(map(_resolve_run, runs))
    began = time.perf_counter()
    replayed = list(_follow_progress(found, terms, jobs or os.cpu_count() or 1))
    results = [result for result in replayed if not result.error]
    for failed in (result for result in replayed if result.error):
        echo(f"sentinel: {failed.error}", err=True)
    if not replayed:
        raise LogError(f"{', '.join(runs)}: no log that can be read in there")
    if passed_over := sorted({str(log.path) for log in found} - {result.path for result in replayed}):
        echo(f"no run that can be read, name one alone to see why: {join_names(passed_over, SHOWN_FILES)}", err=True)
    if as_json:
        echo(json.text({"runs": [_plain(result) for result in replayed]}))
    elif results:
        for line in _report(results, time.perf_counter() - began):
            echo(line)
    if plot is not None:
        from sentinel.cli import backtest_picture

        backtest_picture.draw(results, plot)
        echo(f"picture: {plot}", err=True)
    ctx.exit(_exit_code(replayed))


def _resolve_run(run: str) -> str:
    """Return `run` if it can be a file or a pattern, else the path of the history of the run of that name or id."""
    if os.path.exists(run) or set(run) & set("/*?["):
        return run
    try:
        return str(kept.find_history(run))
    except ConfigError as error:
        raise LogError(f"{run}: no such file or folder, and {error}") from None


def _names(pairs: Iterable[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        column, equals, metric = pair.rpartition("=")
        if not equals or not column or not metric:
            raise click.BadParameter(f"{pair!r}: write COLUMN=METRIC, as in train/loss=loss", param_hint="--map")
        found[column] = metric
    return found


def _follow_progress(found: list[LogFile], terms: Terms, jobs: int) -> Iterator[Result]:
    """Yield the results, with a progress bar on the terminal meanwhile."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from sentinel.toolkit.backtest import backtest_logs

    console = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(found))
        for results in backtest_logs(found, terms, jobs):
            bar.advance(task)
            yield from results


def _exit_code(results: list[Result]) -> int:
    if any(result.error for result in results):
        return 2
    return 1 if any(result.alerts for result in results) else 0


def _plain(result: Result) -> dict[str, Any]:
    import msgspec

    content = msgspec.to_builtins(result)
    del content["curves"]
    assert isinstance(content, dict)
    return content


def _report(results: list[Result], seconds: float) -> Iterator[str]:
    for result in results:
        if result.alerts or result.faults or result.no_loss or len(results) <= LISTED_RUNS:
            yield from _format_result(result)
    yield from _could_not_look(results)
    yield _sum(results, seconds)


def _format_result(result: Result) -> Iterator[str]:
    outcome = "" if result.alerts else ": no alert"
    if result.no_loss:
        outcome = f": no loss was read: columns are {join_names(result.no_loss, SHOWN_COLUMNS)}; name it with "
        outcome += "--map COLUMN=loss"
    yield from wrap_text("", f"{result.run}  {result.rows:,} rows of {result.format}{outcome}")
    if result.judged_from is not None:
        kept = f"judged from step {result.judged_from:,} on: of the steps before, only some are kept"
        yield from wrap_text("  ", kept)
    renamed = ", ".join(f"{metric} is its {name}" for metric, name in sorted(result.columns.items()) if metric != name)
    yield from wrap_text("  ", renamed) if renamed else ()
    if result.rl_columns:
        judged = f"judged as reinforcement learning, by {join_names(result.rl_columns, 4)}"
        yield from wrap_text("  ", judged)
    for alert in result.alerts:
        over = "" if alert.over_step is None else f", {in_words(alert.state)} at {alert.over_step}"
        yield f"  step {alert.step:<8} {alert.severity:<9} {alert.alert}, since step {alert.first_step}{over}"
        yield from wrap_text(" " * 16, alert.summary)
    for fault in result.shown_faults:
        yield from wrap_text("  not read: ", fault)
    if result.faults > len(result.shown_faults):
        yield f"  not read: {result.faults - len(result.shown_faults)} more lines"


def _reason(looked: Looked) -> str:
    lead = "does not apply: " if looked.state == "not applicable" else ""
    return f"{lead}no {', '.join(looked.missing)}" if looked.missing else looked.state


def _could_not_look(results: list[Result]) -> Iterator[str]:
    """Yield which rules saw no data, and why: that they raised no alert does not mean that the run is well."""
    reasons = Counter((looked.rule, _reason(looked)) for result in results for looked in result.blind)
    reasons.update((name, "the log has no times") for result in results for name in result.untimed)
    if not reasons:
        return
    yield "could not look:" if len(results) == 1 else "could not look, and in how many runs:"
    for (rule, reason), count in sorted(reasons.items()):
        yield from wrap_text(f"  {'' if len(results) == 1 else f'{count:>5} '}{rule:<20} ", reason)


def _sum(results: list[Result], seconds: float) -> str:
    alerts = [alert for result in results for alert in result.alerts]
    severities = Counter(alert.severity for alert in alerts)
    told = ", ".join(f"{severities[name]} {name}" for name in ("critical", "warning", "info") if severities[name])
    rows = sum(result.rows for result in results)
    runs = sum(bool(result.alerts) for result in results)
    lossless = sum(bool(result.no_loss) for result in results)
    return (
        (f"no loss was read in {lossless} of {len(results)} runs; " if lossless else "")
        + f"{runs} of {len(results)} runs with an alert ({told or 'none'}); "
        f"{rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s"
    )
