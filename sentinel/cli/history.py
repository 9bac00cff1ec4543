"""`sentinel history`: lists the stored runs, exports their numbers for other programs, and deletes old ones."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import click

from sentinel.cli.client import list_runs
from sentinel.cli.options import json_option, parse_duration
from sentinel.cli.plain import echo
from sentinel.config import settings
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.store import RUN, History, retention
from sentinel.text import did_you_mean, format_bytes, format_count, format_moment, join_names, spell_controls
from sentinel.web import json as plain_json

_NUMBER = click.IntRange(0, 2**31 - 1)
KEYS = ("attempt", "step", "time")
"""The first columns of an export's rows."""
_CANDIDATES = 5
"""The most ids that an error names."""
_OTHERS = 27
"""Width in characters of the list's columns `last written` and `size`, and of the spaces."""


def _size(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    try:
        return None if text is None else settings.size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.group(invoke_without_command=True)
@json_option()
@click.pass_context
def history(ctx: click.Context, as_json: bool) -> None:
    """List the runs whose history is kept, the newest last: they can be exported and deleted. How they ended is in
    `sentinel last`.

    Exit code 0; 1: a history is damaged.

    \b
    Example:  sentinel history
              sentinel history export train_gpt --format csv > run.csv
              sentinel history prune --older-than 14d --dry-run
    """
    if ctx.invoked_subcommand is not None:
        return
    rows = [describe_stored(one) for one in retention.list_kept()]
    if as_json:
        echo(plain_json.text(rows))
    else:
        echo("\n".join(format_rows(rows)) if rows else "No history is kept on this node.")
    ctx.exit(1 if any(row["trouble"] for row in rows) else 0)


@history.command(short_help="Write a run's numbers as JSON lines or CSV.")
@click.argument("run")
@click.option("--format", "kind", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True)
@json_option("The same as --format jsonl.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write. [default: stdout]")
@click.option("--attempt", type=_NUMBER, help="One attempt only. [default: all]")
@click.option("--rank", type=_NUMBER, help="One rank's values. [default: the run's]")
@click.option("--layers", is_flag=True, help="Statistics of layers instead: one row per layer and sampled step.")
def export(
    run: str, kind: str, as_json: bool, output: Path | None, attempt: int | None, rank: int | None, layers: bool
) -> None:
    """Write the numbers of RUN (a name, an id or its beginning, or a file), one row per step: attempt, step,
    time and its signals.

    Of several runs of a name the newest is taken. NaN and infinities are written "NaN", "+Inf" and "-Inf".
    `sentinel rules backtest` reads what was written.

    Exit code 0; 2: it has no history, or the file cannot be written.

    \b
    Example:  sentinel history export train_gpt --format csv --output run.csv
              sentinel history export train_gpt --layers | head
    """
    if as_json and kind == "csv":
        raise click.UsageError("--json is --format jsonl: leave out one of --json and --format csv.")
    if layers and rank is not None:
        raise click.UsageError("--layers is of the run: its ranks' shards are put together. Leave out --rank.")
    with History(find_history(run)) as kept:
        numbers = [number for number, _, _ in kept.attempts()] if attempt is None else [attempt]
        names = _names(kept, numbers, RUN if rank is None else rank, layers=layers)
        of = RUN if rank is None else rank
        rows = (row for number in numbers for row in read_rows(kept, number, of, layers=layers))
        first = next(rows, None)
        if first is None:
            raise ConfigError(f"{run}: nothing is kept of " + _what(attempt, rank, layers))
        try:
            with _open_output(output) as file:
                _write(itertools.chain([first], rows), names, kind, file)
                file.flush()
        except BrokenPipeError:
            os._exit(0)  # `| head` has closed the pipe: nothing can be flushed
        except OSError as error:
            raise ConfigError(f"{output or 'what it prints'}: cannot be written ({error.strerror})") from None


@history.command(short_help="Delete histories that are over the limits.")
@click.option(
    "--older-than", metavar="DURATION", callback=parse_duration, help="Delete runs not written to for this long: 14d."
)
@click.option(
    "--keep-size", metavar="SIZE", callback=_size, help="Then delete the oldest, until the rest is this small: 2GB."
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@json_option()
def prune(older_than: float | None, keep_size: float | None, dry_run: bool, as_json: bool) -> None:
    """Delete histories that are over the limits; by default those of the settings, [history] max_age and max_size.

    Daemons do the same when they start. A history that is open is kept; so is a history written to in the last hour,
    unless it is too old.

    Exit code 0, whatever was deleted; 2: wrong use.

    \b
    Example:  sentinel history prune --dry-run
              sentinel history prune --older-than 14d --keep-size 2GB
    """
    if older_than is None and keep_size is None:
        limits = settings.load().history
        older_than, keep_size = limits.max_age, limits.max_size
    now, gone = time.time(), list[dict[str, Any]]()
    for folder in paths.history_folders():
        for one in retention.list_doomed(
            retention.list_histories(folder),
            max_age=math.inf if older_than is None else older_than,
            max_bytes=math.inf if keep_size is None else keep_size,
        ):
            deleted = not dry_run and retention.remove(one.kept.path)
            gone.append(
                {
                    "file": str(one.kept.path),
                    "bytes": one.kept.bytes,
                    "days": (now - one.kept.modified) / 86400,
                    "why": one.why,
                    "deleted": deleted,
                }
            )
    if as_json:
        echo(plain_json.text(gone))
        return
    for row in gone:
        word = "deleted" if row["deleted"] else "would be deleted" if dry_run else "stays: it is open"
        echo(f"{row['file']}: {format_bytes(row['bytes'])}, {row['days']:.0f} days old, {word}")
    freed = sum(row["bytes"] for row in gone if row["deleted"] or dry_run)
    echo(f"{format_bytes(freed)} {'would be ' if dry_run else ''}freed" if gone else "Nothing is over the limits.")


def _open_output(output: Path | None) -> AbstractContextManager[IO[str]]:
    if output is None:
        return nullcontext(sys.stdout)
    return output.open("w", encoding="utf-8", newline="")


def complete_run(run: str) -> str:
    """Return the run as it was named or, where no run has that name or id, the only id that begins with it. Raises
    ConfigError where several do. Prints a completed id on stderr."""
    ids = dict[str, None]()
    for name, run_id in _list_named():
        if run in (name, run_id):
            return run
        if run and run_id.startswith(run):
            ids[run_id] = None
    if len(ids) > 1:
        raise ConfigError(f"several runs have an id that begins with {run}: {join_names(list(ids), _CANDIDATES)}")
    if not ids:
        return run
    (found,) = ids
    echo(f"sentinel: {run} is taken for {found}", err=True)
    return found


def complete_option(ctx: click.Context, parameter: click.Parameter, run: str | None) -> str | None:
    """Do what `complete_run` does, as the callback of a click option. Raises ConfigError."""
    return complete_run(run) if run is not None else None


def _list_named() -> Iterator[tuple[str, str]]:
    """Yield (name, id) of the watched runs, then of the stored ones, the newest first. For a history that cannot be
    read, both are its file's name: a call for it must not get another run."""
    yield from ((one["run"], one["run_id"]) for one in list_runs())
    for one in reversed(retention.list_kept()):
        try:
            with History(one.path) as kept:
                yield kept.run, kept.run_id
        except ConfigError:
            yield (_read_id(one.path),) * 2


def find_history(run: str) -> Path:
    """Return the history of a run, given as a file, a name, an id, or the beginning of an id. Raises ConfigError."""
    if not run.endswith(".sqlite"):
        run = complete_run(run)
    path, known = _search_history(run)
    if path is None:
        raise ConfigError(f"no history of {run}{_suggest_run(run, known) or '; no run is kept on this node'}")
    return path


def _search_history(run: str) -> tuple[Path | None, list[str]]:
    """Return the history of a run, and the names of newer runs; if there is none, None and the names of all runs.
    Raises ConfigError where it is damaged."""
    if run.endswith(".sqlite") and Path(run).is_file():
        return Path(run), []
    known: dict[str, None] = {}
    for one in reversed(retention.list_kept()):
        try:
            with History(one.path) as kept:
                if run in (kept.run, kept.run_id):
                    return one.path, list(known)
                known[kept.run] = None
        except ConfigError:
            if one.path.stem == run:
                raise
    return None, list(known)


def explain_unknown(run: str) -> str:
    """Return a sentence on a run that has neither a daemon nor a history; empty: the run is known."""
    live = list_runs()
    if any(run in (one["run"], one["run_id"]) for one in live):
        return ""
    try:
        path, kept = _search_history(run)
    except ConfigError:
        return ""  # there is one, and it is damaged
    if path is not None:
        return ""
    known = list(dict.fromkeys([*(one["run"] for one in live), *kept]))
    return f"no run is called {run}{_suggest_run(run, known) or '; no run is known on this node'}"


def _suggest_run(run: str, known: Sequence[str]) -> str:
    """Return the end of a sentence with the nearest name, or all names; empty where no run is known."""
    return (did_you_mean(run, known) or f"; there are: {', '.join(known)}") if known else ""


def _read_id(path: Path) -> str:
    """Return the id of a run from the name of its history, which may be a damaged one that was moved aside."""
    return path.name.partition(".sqlite")[0]


def describe_stored(one: retention.StoredHistory) -> dict[str, Any]:
    """Return a row of `sentinel history --json`; for a damaged history, with what could be read, and the error."""
    row: dict[str, Any] = {
        "run": _read_id(one.path), "run_id": "", "attempts": 0, "step": None, "began": None,
        "modified": one.modified, "incidents": 0, "bytes": one.bytes, "file": str(one.path), "trouble": "",
    }  # fmt: skip
    try:
        with History(one.path) as kept:
            row |= {"run": kept.run, "run_id": kept.run_id}
            attempts = kept.attempts()
            row |= {"attempts": len(attempts), "incidents": kept.incident_count()}
            if attempts:
                row["began"], number = attempts[0][1], attempts[-1][0]
                seq = kept.last_seq(number)
                row["step"] = seq + kept.step_offset(number) if seq >= 0 else None
    except ConfigError as error:
        row["trouble"] = str(error)
    return row


def format_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the list. Ids are whole, as other commands need them, unless a terminal is too narrow."""
    run = min(21, max(len(row["run"]) for row in rows))
    steps = ["step", *("-" if row["step"] is None else str(row["step"]) for row in rows)]
    step = max(map(len, steps))
    room = shutil.get_terminal_size().columns - run - step - _OTHERS if sys.stdout.isatty() else 1000
    name = max(min(room, max(len(row["run_id"]) for row in rows)), 2)
    lines = [f"{'run':<{run}} {'id':<{name}} {'last written':<16} {'step':>{step}} {'size':>7}"]
    for row, at in zip(rows, steps[1:], strict=True):
        who = f"{row['run'][:run]:<{run}} {row['run_id'][:name]:<{name}}"
        lines.append(f"{who} {format_moment(row['modified'])[:-3]} {at:>{step}} {format_bytes(row['bytes']):>7}")
        if row["trouble"]:
            lines.append(f"  damaged: {row['trouble']}")
    total = f"{format_count(len(rows), 'run')}, {format_bytes(sum(row['bytes'] for row in rows))}"
    return [*lines, f"{total}; when they began and how they ended: sentinel last --since 30d"]


def _names(kept: History, numbers: list[int], rank: int, *, layers: bool) -> list[str]:
    if layers:
        found = dict.fromkeys(
            name for number in numbers for _, stats in kept.layers(attempt=number) for name in stats.stats
        )
        return [*KEYS, "layer", *found]
    return [*KEYS, *dict.fromkeys(name for number in numbers for name in kept.signals(attempt=number, rank=rank))]


def read_rows(kept: History, number: int, rank: int, *, layers: bool) -> Iterator[dict[str, Any]]:
    """Yield an export's rows of an attempt: one per step; with `layers`, one per layer and sampled step."""
    offset = kept.step_offset(number)
    if not layers:
        for seq, at, values in kept.rows(attempt=number, rank=rank):
            yield {"attempt": number, "step": seq + offset, "time": at, **values}
        return
    for seq, stats in kept.layers(attempt=number):
        for name, values in stats.items():
            yield {"attempt": number, "step": seq + offset, "layer": name, **values}


def _write(rows: Iterator[dict[str, Any]], names: list[str], kind: str, file: IO[str]) -> None:
    if kind == "jsonl":
        for row in rows:
            file.write(json.dumps(plain_json.spell_nonfinite(row)) + "\n")
        return
    table = csv.writer(file, lineterminator="\n")
    table.writerow(map(spell_controls, names))
    for row in rows:
        values = plain_json.spell_nonfinite(row)
        table.writerow([spell_controls(str(values.get(name, ""))) for name in names])


def _what(attempt: int | None, rank: int | None, layers: bool) -> str:
    parts = ["layers" if layers else "steps"]
    parts += [f"attempt {attempt}"] if attempt is not None else []
    parts += [f"rank {rank}"] if rank is not None else []
    return ", ".join(parts)
