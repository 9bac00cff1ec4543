"""`sentinel rules backtest`: what rules would have said of recorded runs."""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sentinel.cli import history as kept
from sentinel.cli.options import json_option
from sentinel.errors import ConfigError, LogError
from sentinel.incident_states import in_words

if TYPE_CHECKING:
    from sentinel.backtesting import Result, Terms
    from sentinel.engine.backtest import Looked
    from sentinel.logs import Log

LISTED_RUNS = 20
"""With more, only the runs with an alert or with lines that could not be read are listed."""


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]}, short_help="Replay recorded runs through the rules."
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--rules", "rules", multiple=True, metavar="FILE", type=click.Path(exists=True, path_type=Path),
              help="Rule file or folder beside the stock rules; may be given again.")  # fmt: skip
@click.option("--alert", "alerts", multiple=True, metavar="NAME", help="Apply this rule only; may be given again.")
@click.option("--map", "names", multiple=True, metavar="COLUMN=METRIC", help="Take a column of the logs for a metric.")
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one a core, at most one a run]")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write a picture (.png, .svg or .pdf).")  # fmt: skip
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
    """Replay recorded runs through the rules, and print what would have been told.

    RUN is a log file, a folder, a pattern, or the name of a run that is kept: Sentinel's history (.sqlite), JSON lines,
    CSV (Lightning's metrics.csv), TensorBoard event files, Hugging Face's trainer_state.json, and what Megatron and
    DeepSpeed print; gzipped or not.

    Exit code 0: no alert; 1: an alert; 2: wrong use, or a log that cannot be read.

    \b
    Example:  sentinel rules backtest train_gpt --rules mine.yaml
              sentinel rules backtest runs/*.jsonl
              sentinel rules backtest metrics.csv --map my_loss=loss --plot picture.png
              sentinel rules backtest tb/ --rules mine.yaml --alert RewardCollapse
    """
    from sentinel import logs, plain_json
    from sentinel.backtesting import Terms, rules_of

    terms = Terms(rules=rules, alerts=alerts, names=_names(names), curves=plot is not None)
    draw = _painter(plot) if plot is not None else None
    rules_of(terms)  # a mistake in a rule file is told before a long replay, and by one process
    found = logs.found(map(_meant, runs))
    began = time.perf_counter()
    replayed = list(_followed(found, terms, jobs or os.cpu_count() or 1))
    results = [result for result in replayed if not result.error]
    for failed in (result for result in replayed if result.error):
        click.echo(f"sentinel: {failed.error}", err=True)
    if not replayed:
        raise LogError(f"{', '.join(runs)}: no log that can be read in there")
    if as_json:
        click.echo(plain_json.text({"runs": [_plain(result) for result in replayed]}))
    elif results:
        for line in _report(results, time.perf_counter() - began):
            click.echo(line)
    if plot is not None and draw is not None:
        draw(results, plot)
        click.echo(f"picture: {plot}", err=True)
    ctx.exit(_exit_code(replayed))


def _meant(run: str) -> str:
    """What can be a file stays as it is; else it is the history of the run of that name or id."""
    if os.path.exists(run) or set(run) & set("/*?["):
        return run
    try:
        return str(kept.found(run))
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


def _painter(path: Path) -> Callable[[list[Result], Path], None]:
    """What draws the picture; that it cannot is said before a long replay."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: a picture's name ends in .png, .svg or .pdf")
    try:
        from sentinel.cli.backtest_picture import draw
    except ModuleNotFoundError as error:
        raise ConfigError(f"--plot needs {error.name}: pip install 'training-sentinel[demo]'") from None
    return draw


def _followed(found: list[Log], terms: Terms, jobs: int) -> Iterator[Result]:
    """The results, with a bar on the terminal meanwhile."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from sentinel.backtesting import backtested

    console = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(found))
        for results in backtested(found, terms, jobs):
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
        if result.alerts or result.faults or len(results) <= LISTED_RUNS:
            yield from _told(result)
    yield from _could_not_look(results)
    yield _sum(results, seconds)


def _told(result: Result) -> Iterator[str]:
    outcome = "" if result.alerts else ": no alert"
    yield from _wrapped(f"{result.run}  {result.rows:,} rows of {result.format}{outcome}", "")
    renamed = ", ".join(f"{metric} is its {name}" for metric, name in sorted(result.columns.items()) if metric != name)
    yield from _wrapped(renamed, "  ") if renamed else ()
    for alert in result.alerts:
        over = "" if alert.over_step is None else f", {in_words(alert.state)} at {alert.over_step}"
        yield f"  step {alert.step:<8} {alert.severity:<9} {alert.alert}, since step {alert.first_step}{over}"
        yield from _wrapped(alert.summary, " " * 16)
    for fault in result.shown_faults:
        yield from _wrapped(fault, "  not read: ")
    if result.faults > len(result.shown_faults):
        yield f"  not read: {result.faults - len(result.shown_faults)} more lines"


def _reason(looked: Looked) -> str:
    lead = "does not apply: " if looked.state == "not applicable" else ""
    return f"{lead}no {', '.join(looked.missing)}" if looked.missing else looked.state


def _could_not_look(results: list[Result]) -> Iterator[str]:
    """A rule that saw nothing has not found the run well."""
    reasons = Counter((looked.rule, _reason(looked)) for result in results for looked in result.blind)
    reasons.update((name, "the log has no times") for result in results for name in result.untimed)
    if not reasons:
        return
    yield "could not look:" if len(results) == 1 else "could not look, and in how many runs:"
    for (rule, reason), count in sorted(reasons.items()):
        yield from _wrapped(reason, f"  {'' if len(results) == 1 else f'{count:>5} '}{rule:<20} ")


def _sum(results: list[Result], seconds: float) -> str:
    alerts = [alert for result in results for alert in result.alerts]
    severities = Counter(alert.severity for alert in alerts)
    told = ", ".join(f"{severities[name]} {name}" for name in ("critical", "warning", "info") if severities[name])
    rows = sum(result.rows for result in results)
    runs = sum(bool(result.alerts) for result in results)
    return (
        f"{runs} of {len(results)} runs with an alert ({told or 'none'}); "
        f"{rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s"
    )


def _wrapped(text: str, lead: str) -> list[str]:
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    after = " " * len(lead)
    return textwrap.wrap(
        text, width, initial_indent=lead, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
    )
