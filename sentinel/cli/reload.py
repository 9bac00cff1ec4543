"""`sentinel reload`: have the daemons read rule files and settings again."""

from __future__ import annotations

from typing import Any

import click
import httpx2

from sentinel.cli.options import json_option
from sentinel.cli.page import list_served
from sentinel.cli.plain import echo
from sentinel.web import json

SECONDS = 10.0
"""Seconds that a daemon has to answer."""


@click.command()
@json_option()
@click.pass_context
def reload(ctx: click.Context, as_json: bool) -> None:
    """Make your daemons read rule files and settings again, as SIGHUP does. If any has a mistake, nothing changes.

    `--json` lists `{"daemon", "ok", "answer"}`, the daemon by its process id. A service reloads on
    `systemctl reload sentinel`.

    Exit code 0: all did, or no daemon of yours runs; 1: at least one did not.

    \b
    Example:  sentinel rules check my_rules.yaml && sentinel reload
    """
    found = reload_daemons()
    if as_json:
        echo(json.text(found))
    elif not found:
        echo("No daemon of yours serves HTTP on this node: rules and settings are read when one starts.")
    else:
        echo("\n".join(f"daemon {one['daemon']}: {one['answer']}" for one in found))
    ctx.exit(0 if all(one["ok"] for one in found) else 1)


def reload_daemons() -> list[dict[str, Any]]:
    """Have each daemon of this user reload. Returns their answers: `reloaded`, or the mistakes."""
    found = []
    for state in list_served():
        try:
            answer = httpx2.post(
                f"{state['http']}/-/reload", headers={"Authorization": f"Bearer {state['token']}"}, timeout=SECONDS,
                trust_env=False,  # a proxy must not get the token, and does not reach this machine's loopback
            )  # fmt: skip
            ok, text = answer.is_success, answer.text.strip()
        except httpx2.HTTPError as error:
            ok, text = False, f"it does not answer ({type(error).__name__})"
        found.append({"daemon": state["pid"], "ok": ok, "answer": text})
    return found
