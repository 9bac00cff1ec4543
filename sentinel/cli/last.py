"""`sentinel last`: the outcomes of the last runs, the worst first, or of one run."""

from __future__ import annotations

import datetime
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from sentinel.cli.client import list_runs
from sentinel.cli.history import complete_run, describe_stored, explain_unknown
from sentinel.cli.incidents import format_incidents
from sentinel.cli.options import json_option, parse_duration
from sentinel.cli.plain import echo, wrap_text
from sentinel.errors import ConfigError, DamageError
from sentinel.report.outcomes import FAILED, describe_found, describe_run, list_going_on, name_start, name_took
from sentinel.store import History, retention
from sentinel.text import (
    close_run,
    format_bytes,
    format_count,
    format_duration,
    format_moment,
    join_names,
    rank_severity,
)
from sentinel.web import json

OUTCOME_LETTERS = 40
_UNREAD = 3
"""The most unreadable histories that an error names."""


@click.command()
@click.argument("run", required=False)
@click.option(
    "--since", metavar="DURATION", callback=parse_duration, help="How far back: 12h, 7d. [default: since yesterday]"
)
@json_option()
@click.pass_context
def last(ctx: click.Context, run: str | None, since: float | None, as_json: bool) -> None:
    """Summarise the last runs, live ones included, the worst first: start, duration, outcome with the exit status or
    signal where it is known, last step, loss, incidents. With RUN (a name, an id or its beginning): only its newest
    run, with its incidents. For a damaged history: the file, and what is known of its run.

    `sentinel history` lists the stored histories, to export and delete them; `sentinel incidents` lists incidents.

    Exit code 0, however the runs ended; 1: a history is damaged; 2: there is no run of that name.

    \b
    Example:  sentinel last
              sentinel last train_gpt
              sentinel last --since 7d --json
    """
    rows, cases, damaged = collect_outcomes(run, since)
    chosen = [max(rows, key=lambda row: row["began"] or 0.0)] if run is not None and rows else rows
    if as_json:
        echo(json.text([row | {"cases": cases[row["run_id"]]} for row in chosen] if run is not None else rows))
    elif run is not None and chosen:
        closing = _closing(chosen[0])
        echo("\n".join(wrap_text("", closing)) if sys.stdout.isatty() else closing)
        if cases[chosen[0]["run_id"]]:
            echo(format_incidents(cases[chosen[0]["run_id"]], ""))
    elif run is None:
        when = "since yesterday" if since is None else f"in the last {format_duration(since)}"
        echo("\n".join(format_rows(rows)) if rows else f"No run {when}.")
    for trouble in damaged:
        echo(f"sentinel: {trouble}", err=True)
    ctx.exit(1 if damaged else 0)


def collect_outcomes(
    run: str | None, since: float | None
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]], list[str]]:
    """Return the outcomes of runs, their incidents by run id, and what is wrong with histories that cannot be read.

    The runs are those written to in the last `since` seconds, by default since yesterday, or `run`, by default at any
    time; the worst first. For a damaged history of `run`, the error has what is known of it.

    Raises ConfigError where there is no run of that name.
    """
    run = complete_run(run) if run is not None else None
    live = list_going_on(list_runs())
    begin = 0.0 if run is not None and since is None else _yesterday() if since is None else time.time() - since
    rows, cases, damaged = list[dict[str, Any]](), dict[str, list[dict[str, Any]]](), list[str]()
    is_damaged, unread = False, list[str]()
    for one in (one for one in retention.list_kept() if one.modified >= begin):
        try:
            with History(one.path) as kept:
                if run not in (None, kept.run, kept.run_id):
                    continue
                cases[kept.run_id] = kept.incidents() if kept.run_id in live else kept.final_incidents()
                rows.append(describe_run(kept, one, cases[kept.run_id], live.get(kept.run_id)))
        except ConfigError as error:
            stored = describe_stored(one)
            is_own = run in (stored["run"], stored["run_id"])
            explained = is_own and isinstance(error, DamageError)
            damaged.append(_explain_damage(stored, str(error)) if explained else str(error))
            is_damaged |= is_own
            unread += [] if stored["run_id"] else [str(error)]
    if run is not None and not rows and not is_damaged:
        perhaps = f". It may be one that cannot be read: {join_names(unread, _UNREAD)}" if unread else ""
        raise ConfigError((explain_unknown(run) or f"no history of {run} in that time") + perhaps)
    return sorted(rows, key=_badness, reverse=True), cases, damaged


def _explain_damage(stored: dict[str, Any], trouble: str) -> str:
    """Return the error for the damaged history of the requested run. `stored`: its row of `sentinel history`."""
    known = [f"its name is {stored['run']}"] if stored["run_id"] else []
    known += [f"it began {format_moment(stored['began'])}"] if stored["began"] is not None else []
    known += [f"step {stored['step']:,} is kept"] if stored["step"] is not None else []
    known += [f"the file has {format_bytes(stored['bytes'])}, last written {format_moment(stored['modified'])}"]
    do = "restore the file from a backup, where there is one"
    if stored["step"] is not None:
        do += f"; its steps may be readable: sentinel history export {stored['run_id']}"
    run = stored["run_id"] or stored["run"]
    return (
        f"{run}: the history of this run is damaged, and its outcome not known. {trouble}\n"
        f"  known   {', '.join(known)}\n"
        f"  to do   {do}. The file is left as it is; other runs are not affected"
    )


def _yesterday() -> float:
    """Return the first moment of yesterday, in unix seconds."""
    today = datetime.datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)
    return (today - datetime.timedelta(days=1)).timestamp()


def _badness(row: dict[str, Any]) -> tuple[int, float]:
    """Return a sort key, higher for worse: by severity, where a failed run counts as critical, then open incidents."""
    worst = rank_severity(row["worst"]["severity"]) if row["worst"] else 0
    failed = rank_severity("critical") if row["state"] in (FAILED, "stopped", "stalled") else 0
    return 2 * max(worst, failed) + bool(row["open"]), row["began"] or 0.0


def _closing(row: dict[str, Any]) -> str:
    reached = f"at step {row['step']:,}" if row["step"] is not None else "without a step"
    found = describe_found(row) + (
        "" if row["snapshot"] is None else f"; newest snapshot on disk: step {row['snapshot']:,}"
    )
    if row["loss"] is not None:
        found += f"; loss {row['loss']:.4g}"
    how = "" if row["state"] == "ended" and row["outcome"] == "ended" else row["outcome"]
    if row["state"] in ("running", "stalled"):
        return f"run {row['run']!r} is {how}, {reached}, for {name_took(row)}: {found}"
    return f"{name_start(row)}  " + close_run(
        row["run"], "", reached, seconds=row["seconds"] or 0.0, how=how, found=found
    )


def format_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table, one line per run; in a terminal too narrow for it, some lines per run with the whole outcome."""
    table = [("run", "started", "took", "outcome", "step", "loss", "incidents")]
    for row in rows:
        outcome = row["outcome"]
        if len(outcome) > OUTCOME_LETTERS:
            outcome = outcome[: OUTCOME_LETTERS - 3] + "..."
        step, loss = _name_step(row), _name_loss(row)
        table.append((row["run_id"], name_start(row), name_took(row), outcome, step, loss, describe_found(row)))
    wide = [max(len(line[column]) for line in table) for column in range(6)]
    right = {4, 5}
    cells = [
        [text.rjust(w) if at in right else text.ljust(w) for at, (text, w) in enumerate(zip(line, wide, strict=False))]
        for line in table
    ]
    lines = [f"{'  '.join(cell)}  {line[-1]}" for cell, line in zip(cells, table, strict=True)]
    if sys.stdout.isatty() and max(map(len, lines)) > shutil.get_terminal_size().columns:
        lines = [line for row in rows for line in _format_block(row)]
    return [*lines, f"{format_count(len(rows), 'run')}; of one: sentinel last RUN"]


def _format_block(row: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a run: its outcome and incidents, then how far it got."""
    yield from wrap_text("", f"{row['run_id']}  {row['outcome']}")
    yield from wrap_text("    ", describe_found(row))
    reached = f"step {_name_step(row)}, loss {_name_loss(row)}"
    yield from wrap_text("    ", f"{reached}; started {name_start(row)}, took {name_took(row)}")


def _name_step(row: dict[str, Any]) -> str:
    return "-" if row["step"] is None else f"{row['step']:,}"


def _name_loss(row: dict[str, Any]) -> str:
    return "-" if row["loss"] is None else f"{row['loss']:.4g}"
