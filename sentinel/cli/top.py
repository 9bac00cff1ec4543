"""`sentinel top`: show the runs of this node, live, in a terminal; a job over several nodes is shown whole."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from sentinel.cli.client import list_runs
from sentinel.cli.finite import Finite
from sentinel.cli.incidents import collect_live_incidents
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.cli.top_frame import Traces, frame
from sentinel.web import json


@click.command()
@click.option(
    "--interval", type=Finite(0.2, 3600), default=1.0, show_default=True, help="Seconds between two refreshes."
)
@click.option("--once", is_flag=True, help="Print one frame and exit, as without a terminal.")
@json_option("Print status and incidents as JSON, once.")
@click.pass_context
def top(ctx: click.Context, /, interval: float, once: bool, as_json: bool) -> None:
    """Show the runs of this node, live: step, loss and gradient norm, phases, ranks, GPUs, incidents. `q` ends it.
    Of a job over several nodes it shows all nodes, and the incidents of all.

    Exit code 0: all is well; 1: an incident is open, or nothing is watched.

    \b
    Example:  sentinel top
              sentinel top --once | head -20
    """
    runs, cases, unasked = _read()
    if as_json:
        echo(json.text({"runs": runs, "incidents": cases, "not_asked": unasked}))
    elif once or not sys.stdout.isatty():
        traces = Traces()
        traces.add(runs)
        echo("\n".join(line.text for line in frame(runs, cases, traces, 80, 1000, unasked)))
    else:
        runs, cases = _live(interval)
    live = {run["run_id"] for run in runs}
    ctx.exit(0 if live and not any(case["state"] == "firing" and case["run_id"] in live for case in cases) else 1)


def _read() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return the runs, their incidents, and which nodes could not be asked for theirs, in words."""
    runs = list_runs()
    return runs, *collect_live_incidents(runs)


def _live(interval: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Show the runs until `q` or an interrupt. Returns their last state, and their incidents."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    traces = Traces()
    runs, cases, unasked = _read()

    def picture() -> Group:
        width, height = console.size
        lines = frame(runs, cases, traces, width, height, unasked)
        return Group(*(Text(line.text, style=line.style, no_wrap=True, overflow="crop") for line in lines))

    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            traces.add(runs)
            live.update(picture(), refresh=True)
            if _read_key(interval) in ("q", "Q", "\x1b"):
                break
            runs, cases, unasked = _read()
    return runs, cases


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys one by one, without echo. Where stdin is no terminal, there are none."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _read_key(seconds: float) -> str:
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""
