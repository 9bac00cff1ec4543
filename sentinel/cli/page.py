"""`sentinel page`: the address of the live page."""

from __future__ import annotations

import json
from typing import Any

import click

from sentinel.cli.client import all_asked
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.node import paths
from sentinel.web import json as plain_json


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@json_option()
@click.pass_context
def page(ctx: click.Context, /, as_json: bool) -> None:
    """Print the address of each daemon's live page: curves with incidents, layers, ranks, GPUs, rules.

    If there are several, each is followed by the names of its runs. The address holds the daemon's token: whoever
    has it may read. From another machine, forward the port first: ssh -L 9477:127.0.0.1:9477 NODE.

    Exit code 0; 1: no daemon of yours serves a page.

    \b
    Example:  sentinel page
    """
    found = [state for path in paths.live_sockets() if (state := _state(path.parent / paths.STATE))]
    runs = {answer["pid"]: sorted({str(run["run"]) for run in answer["runs"]}) for answer in all_asked("status")}
    rows = [
        {"pid": state["pid"], "page": f"{state['http']}/#{state['token']}", "runs": runs.get(state["pid"], [])}
        for state in found
    ]
    if as_json:
        echo(plain_json.text(rows))
    elif rows:
        echo("\n".join(_line(row, alone=len(rows) == 1) for row in rows))
    else:
        echo("No daemon of yours serves a page on this node.")
    ctx.exit(0 if rows else 1)


def _line(row: dict[str, Any], *, alone: bool) -> str:
    """The address, and where there are several, whose it is."""
    return str(row["page"]) if alone or not row["runs"] else f"{row['page']}  {', '.join(row['runs'])}"


def _state(path: Any) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not yet there, no longer, or another user's
        return None
    return state if isinstance(state, dict) and state.get("http") else None
