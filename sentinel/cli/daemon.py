"""`sentinel daemon`: serve runs in the foreground."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sentinel.cli.options import json_option, rules_option
from sentinel.daemon import signal_handlers

if TYPE_CHECKING:
    from sentinel.config import settings as config

DESCRIPTORS = 65536


@click.command()
@click.option("--directory", type=click.Path(path_type=Path), help="Directory of the socket. [default: your own]")
@rules_option
@click.option(
    "--config",
    "settings_file",
    type=click.Path(path_type=Path),
    help="Settings file. [default: $SENTINEL_CONFIG, ~/.config/sentinel/sentinel.toml, /etc/sentinel/sentinel.toml]",
)
@click.option(
    "--service", is_flag=True, help="Serve all users of this node, each their own runs, at /run/sentinel. Root only."
)
@click.option("--stay", is_flag=True, help="Wait for the next run when all runs have ended.")
@click.option(
    "--nice", type=click.IntRange(0, 19), default=10, show_default=True, help="Niceness of the daemon's process."
)
@json_option("Log JSON lines instead of text, to stderr, too.")
@click.option("--started-by", type=int, hidden=True, help="Process that started it: without a hello, its end is ours.")
def daemon(
    directory: Path | None,
    paths: tuple[Path, ...],
    settings_file: Path | None,
    service: bool,
    stay: bool,
    nice: int,
    as_json: bool,
    started_by: int | None,
) -> None:
    """Run a daemon in the foreground. `attach` starts one by itself; use this command to see it start.

    Exit code 0: all runs have ended, or it was asked to exit; 2: wrong use, or it cannot serve there.

    \b
    Example:  sentinel daemon --stay --directory /tmp/watch
              SENTINEL_ADDRESS=unix:/tmp/watch/sentinel.sock python train.py

    
    A node's service, with the histories of all users in $SENTINEL_STATE or
    /var/lib/sentinel:
              sudo sentinel daemon --service
    """
    signal_handlers.hold_back()  # before the other imports, which take most of the start
    from sentinel.cli.log_format import JsonLines, LineFormatter, Sparing
    from sentinel.daemon.tenancy.tenants import service_directory
    from sentinel.node import paths as places

    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else LineFormatter())
    handler.addFilter(Sparing())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    settings, notes = _settings(settings_file, by_hand=started_by is None)
    _widen()
    if service:
        where = service_directory(directory or places.SERVICE_SOCKET.parent)
    else:
        where = places.private_directory(directory or places.run_directory("service"))
    for note in notes:
        logging.getLogger(__name__).error("%s", note)

    asyncio.run(
        _serve(
            where, settings_file, paths, settings, nice=nice, stay=stay, service=service, notes=notes,
            starter=started_by,
        )
    )  # fmt: skip


def _settings(file: Path | None, *, by_hand: bool) -> tuple[config.Settings, tuple[str, ...]]:
    """Return the settings, and notes about them. A mistake is an error for a user who types the command. A run that
    starts its daemon is still watched, with the defaults, and gets a note."""
    from sentinel.config import settings as config
    from sentinel.errors import ConfigError

    try:
        return config.load(file), ()
    except ConfigError as error:
        if by_hand:
            raise
        return config.Settings(), (f"settings not used: {error}",)


def _widen() -> None:
    """Raise the limit of open files, usually 1,024. A rank takes four: its connection, its process, two files in
    memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    directory: Path,
    settings_file: Path | None,
    rules: tuple[Path, ...],
    settings: config.Settings,
    *,
    nice: int,
    stay: bool,
    service: bool,
    notes: tuple[str, ...],
    starter: int | None,
) -> None:
    from sentinel.cli.mcp import make_server
    from sentinel.daemon.app import ConfigFiles, Daemon

    # Created inside the loop, because its events belong to the loop.
    daemon = Daemon(
        directory, ConfigFiles(settings_file, rules), settings, stay=stay, service=service, notes=notes,
        starter=starter,
        # The tools read the histories of the user who runs them, not those that a service keeps.
        make_assistants=None if service else make_server,
    )  # fmt: skip
    # Not earlier: on a busy node the daemon would start so slowly that a run which breaks in its first steps is over
    # by then. Not later: threads that exist already keep their priority.
    os.nice(nice)
    # All objects made so far stay until the end. The garbage collector, which stops everything for 25 ms to scan them,
    # must not do so again and again.
    gc.collect()
    gc.freeze()
    await daemon.serve()
