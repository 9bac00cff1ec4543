"""`sentinel page`: the addresses of live pages, and the page of a run that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import webbrowser
from html import escape
from pathlib import Path
from typing import Any

import click

from sentinel.cli.client import ask_daemons
from sentinel.cli.history import complete_run, find_history
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.store import History, retention
from sentinel.web import json as plain_json

_REDIRECT = "page.html"


@click.command()
@click.argument("run", required=False)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser of this machine.")
@json_option()
@click.pass_context
def page(ctx: click.Context, /, run: str | None, opens: bool, as_json: bool) -> None:
    """Print the address of each daemon's page: a list of all runs, live and ended, and of each its curves with
    incidents, layers, ranks, GPUs, rules.

    If there are several, each is followed by the names of its live runs. With RUN (a name, an id or its beginning, or
    a history file), the address of that run. Where no daemon watches it, or there is none, the page is served from the
    histories until Ctrl-C.

    The address holds a token: anyone who has it may read. From another machine, forward the port first:
    ssh -L 9477:127.0.0.1:9477 NODE.

    Exit code 0; 1: no daemon of yours serves a page, and no history is kept; 2: there is no such run.

    \b
    Example:  sentinel page
              sentinel page train_gpt --open
    """
    watched = {answer["pid"]: answer["runs"] for answer in ask_daemons("status")}
    rows = [_row(state, watched.get(state["pid"], [])) for state in list_served()]
    if run is not None:
        run = complete_run(run)
        ids = {
            pid: one["run_id"] for pid, runs in watched.items() for one in runs if run in (one["run"], one["run_id"])
        }
        if not ids:
            return _serve_stored(find_history(run), opens=opens, as_json=as_json)
        rows = [row | {"page": f"{row['page']}&run={ids[row['pid']]}"} for row in rows if row["pid"] in ids]
        if not rows:
            raise ConfigError(f"the daemon that watches {run} serves no page to you: sentinel report {run}")
    elif not rows and not watched and retention.list_kept():
        return _serve_stored(None, opens=opens, as_json=as_json)
    if as_json:
        echo(plain_json.text(rows))
    elif rows:
        echo("\n".join(_line(row, alone=len(rows) == 1) for row in rows))
    else:
        echo("No daemon of yours serves a page on this node, and no history of a run is kept.")
    if opens and rows:
        _open(rows[0]["page"])
    ctx.exit(0 if rows else 1)


def list_served() -> list[dict[str, Any]]:
    """Return the state of this user's daemons that serve HTTP: `pid`, `http` (the address) and `token`."""
    return [state for path in paths.live_sockets() if (state := _state(path.parent / paths.STATE))]


def _serve_stored(file: Path | None, *, opens: bool, as_json: bool) -> None:
    """Serve the page from the histories until SIGINT or SIGTERM: the run of `file`, or the list of runs. Raises
    ConfigError."""
    from sentinel.report.stored_runs import StoredRuns
    from sentinel.web import http

    name = run_id = ""
    if file is not None:
        with History(file) as history:
            name, run_id = history.run, history.run_id
    try:
        listening = http.listener(0)
    except OSError as error:
        raise ConfigError(f"no port on 127.0.0.1 for the page ({error.strerror}): sentinel report {run_id}") from None
    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = http.HttpServer(http.application(StoredRuns(file), token))
    row = _row({"pid": os.getpid(), "http": address, "token": token}, [{"run": name}] if name else [])
    row["page"] += f"&run={run_id}" if run_id else ""
    ended = f"{name} has ended" if name else "no daemon is here"

    async def serve() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.end)
        echo(plain_json.text([row]) if as_json else f"{row['page']}\n{ended}; Ctrl-C ends the page")
        opening = [asyncio.to_thread(_open, str(row["page"]))] if opens else []  # some browsers block until closed
        await asyncio.gather(server.serve(listening), *opening)

    with contextlib.closing(listening):
        asyncio.run(serve())


def _row(state: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = sorted({str(run["run"]) for run in runs})
    return {"pid": state["pid"], "page": f"{state['http']}/#{state['token']}", "runs": names}


def _line(row: dict[str, Any], *, alone: bool) -> str:
    """Return the address; where there are several, with the names of its runs."""
    return str(row["page"]) if alone or not row["runs"] else f"{row['page']}  {', '.join(row['runs'])}"


def _open(address: str) -> None:
    """Open the address through a file that only its owner can read: all users can see the browser's command line."""
    file = paths.private_directory(paths.runtime_root()) / _REDIRECT
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as redirect:
        redirect.write(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(address)}">\n')
    if not webbrowser.open(file.as_uri()):
        echo("No browser could be started here: open the address yourself.", err=True)


def _state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, already gone, or another user's
        return None
    return state if isinstance(state, dict) and state.get("http") else None
