"""`sentinel replay`: judge runs that were recorded without a daemon."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sentinel.cli.incidents import format_incidents
from sentinel.cli.options import json_option, rules_option
from sentinel.cli.plain import echo
from sentinel.errors import ConfigError
from sentinel.node import paths as places
from sentinel.rulebook import loader
from sentinel.runs import Run
from sentinel.store import History, Store
from sentinel.web import json

if TYPE_CHECKING:
    from rich.progress import Progress

SOURCE = "replay"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@rules_option
@json_option()
@click.pass_context
def replay(ctx: click.Context, files: tuple[Path, ...], paths: tuple[Path, ...], as_json: bool) -> None:
    """Judge recorded runs as a daemon would have: print their incidents, and write a history.

    With SENTINEL_RECORD=FILE a run is recorded, and no daemon is started. Give the files of all ranks of
    a run together. A history that an earlier replay wrote is replaced.

    Exit code 0: nothing was found; 1: there are incidents.

    \b
    Example:  SENTINEL_RECORD=run.rec python train.py
              sentinel replay run.rec
    """
    from sentinel.daemon.replay import replay_records

    logger = logging.getLogger("sentinel")
    ctx.call_on_close(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.ERROR)
    book = loader.load(paths)
    for note in book.notes:
        raise ConfigError(note)
    with _bar() as bar:
        task = bar.add_task("replay", total=sum(path.stat().st_size for path in files if os.path.exists(path)))
        cases = replay_records(files, book.rules, _history, lambda nbytes: bar.advance(task, nbytes))
    found = [case.builtins() for case in cases]
    echo(json.text(found) if as_json else format_incidents(found, "No incidents."))
    ctx.exit(1 if found else 0)


def _history(run: Run) -> Store:
    path = places.state_directory() / "runs" / f"{run.run_id}.sqlite"
    if path.exists():
        with History(path) as history:
            if history.source != SOURCE:
                raise ConfigError(
                    f"{path}: the history of this run, by a daemon that watched it; "
                    "set SENTINEL_STATE to another directory to keep a replay beside it"
                )
        path.unlink()
    return Store(path, run=run.name, run_id=run.run_id, source=SOURCE)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("replaying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        yield bar
