"""`sentinel daemon`: serve runs in the foreground."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import click

from sentinel import places, rulebook
from sentinel.daemon.app import Daemon


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--directory", type=click.Path(path_type=Path), help="Where the socket is made. [default: your own]")
@click.option(
    "--rules",
    "paths",
    type=click.Path(path_type=Path),
    multiple=True,
    envvar="SENTINEL_RULES",
    help="Rule file or folder beside the stock rules; repeat. A rule of the same name replaces the stock one.",
)
@click.option("--stay", is_flag=True, help="Wait for the next run when one has gone.")
@click.option("--nice", type=click.IntRange(0, 19), default=10, show_default=True, help="Yield to the training.")
@click.option("--started-by", type=int, hidden=True, help="Process that started it: without a hello, its end is ours.")
def daemon(directory: Path | None, paths: tuple[Path, ...], stay: bool, nice: int, started_by: int | None) -> None:
    """Serve runs in the foreground. `attach` starts one by itself; use this to watch one start.

    \b
    Example:  sentinel daemon --stay --directory /tmp/watch
              SENTINEL_ADDRESS=unix:/tmp/watch/sentinel.sock python train.py
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(nice)
    where = places.private_directory(directory or places.run_directory("service"))
    book = rulebook.load(paths)
    for note in book.notes:
        logging.getLogger(__name__).error("%s", note)
    asyncio.run(_serve(where, book, stay, started_by))


async def _serve(directory: Path, book: rulebook.Rulebook, stay: bool, starter: int | None) -> None:
    # Made inside the loop: its events belong to it.
    await Daemon(directory, book.rules, stay=stay, notes=book.notes, starter=starter).serve()
