"""`sentinel silence`: mute an alert for a while."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.client import list_runs
from sentinel.cli.history import explain_unknown
from sentinel.cli.options import json_option, parse_duration
from sentinel.cli.plain import echo, plain
from sentinel.config import settings
from sentinel.errors import ConfigError, ProtocolError
from sentinel.node import paths
from sentinel.node.question import ask_daemon
from sentinel.notify import silences
from sentinel.notify.silences import Silence
from sentinel.rulebook import loader
from sentinel.text import did_you_mean, format_moment
from sentinel.web import json


@click.command()
@click.argument("alert", required=False)
@click.option("--run", default="", help="Name or id of a run. [default: all runs]")
@click.option(
    "--for", "seconds", metavar="DURATION", callback=parse_duration, help="How long the silence holds: 30m, 2h, 1d."
)
@click.option("--comment", default="", help="Why the alert is muted; shown in the list.")
@click.option("--list", "listing", is_flag=True, help="Show the active silences. Exit code 1: there are some.")
@click.option("--end", "ending", metavar="ID", help="End a silence now.")
@json_option()
@click.pass_context
def silence(
    ctx: click.Context,
    alert: str | None,
    run: str,
    seconds: float | None,
    comment: str,
    listing: bool,
    ending: str | None,
    as_json: bool,
) -> None:
    """Mute ALERT for a while on the training terminal, at the receivers and for on_alert.

    ALERT may be a pattern: 'Loss*', '*'. Incidents are still recorded, and actions of their rules still run: a
    rollback is not silenced. An incident that still fires when the silence ends is notified then; the end of one that
    was notified before is notified too. A running daemon applies the silence within a second.

    \b
    Example:  sentinel silence LossSpike --run train_gpt --for 2h --comment "new data"
              sentinel silence --list
              sentinel silence --end 3f9a1c
    """
    for text in filter(None, (alert, run, comment)):
        if not text.isprintable():
            raise click.UsageError(f"{text}: it has characters that cannot be printed.")
    if listing + bool(ending) + bool(alert) != 1:
        raise click.UsageError("name an alert (with --for), or use --list, or --end ID.")
    if listing:
        known = {one.id: one for one in [*silences.read(silences.file()), *_list_at_service()]}
        held = [one for one in known.values() if time.time() < one.until]
        _list(held, as_json)
        ctx.exit(1 if held else 0)
    if ending:
        _say(_end_silence(ending), "ended", as_json)
    elif alert:
        if seconds is None:
            raise click.UsageError("say how long: --for 2h.")
        if seconds <= 0:
            raise click.UsageError("--for: a silence of no time silences nothing; give a longer one, as 2h.")
        _warn(alert)
        if run and (said := explain_unknown(run)):
            echo(f"sentinel: the silence holds for a run of that name that begins later: {plain(said)}", err=True)
        _say(add_silence(alert, run, seconds, comment), "silenced", as_json)


def add_silence(alert: str, run: str, seconds: float, comment: str) -> Silence:
    """Begin a silence, in this user's file and at a node's service. Raises ConfigError where the service does not take
    it."""
    made = silences.add(silences.file(), alert=alert, run=run, seconds=seconds, comment=comment)
    try:
        _ask_service({"add": msgspec.to_builtins(made)})
    except (ConfigError, ProtocolError) as error:
        raise ConfigError(f"{error}; silence {made.id} holds for daemons of your own alone") from None
    return made


def _end_silence(identity: str) -> Silence:
    """End a silence that holds in this user's file, at a node's service, or at both. Raises ConfigError where it holds
    at neither, or the service does not answer."""
    path = silences.file()
    ended = silences.end(path, identity) if _find(silences.read(path), identity) else None
    try:
        if _find(_ask_service({}), identity):
            ended = next(one for one in _ask_service({"end": identity}) if one.id == identity)
    except (ConfigError, ProtocolError) as error:
        raise ConfigError(f"{error}; if that is a service, silence {identity} may hold for its runs") from None
    return ended or silences.end(path, identity)


def _find(known: list[Silence], identity: str) -> bool:
    return any(one.id == identity and time.time() < one.until for one in known)


def _list_at_service() -> list[Silence]:
    try:
        return _ask_service({})
    except (ConfigError, ProtocolError) as error:
        echo(f"sentinel: {error}", err=True)
        return []


def _ask_service(order: dict[str, Any]) -> list[Silence]:
    """Send an order to a node's service, which does not read this user's file, and return this user's silences there:
    none, if no service runs. Raises ConfigError or ProtocolError where it does not answer, or refuses."""
    socket = paths.address()
    if socket is None or not os.path.exists(socket):  # a daemon of one's own reads the file once it runs
        return []
    return msgspec.convert(ask_daemon(socket, "silence", order), list[Silence])


def _list(held: list[Silence], as_json: bool) -> None:
    if as_json:
        echo(json.text([msgspec.to_builtins(one) for one in held]))
    elif not held:
        echo("Nothing is silenced.")
    else:
        echo(f"{'id':<7} {'alert':<20} {'run':<20} {'until':<19} {'by':<10} comment")
        for one in held:
            what = f"{plain(one.alert)[:20]:<20} {plain(one.run or 'all')[:20]:<20} {format_moment(one.until):<19}"
            echo(f"{one.id:<7} {what} {plain(one.by)[:10]:<10} {plain(one.comment)}".rstrip())


def _say(one: Silence, what: str, as_json: bool) -> None:
    if as_json:
        echo(json.text(msgspec.to_builtins(one)))
    elif what == "ended":
        echo(f"{plain(one.alert)} of {plain(one.run or 'all runs')} is no longer silenced.")
    else:
        whose, until = plain(one.run or "all runs"), format_moment(one.until)
        echo(f"{plain(one.alert)} of {whose} is silenced until {until}; to end it: sentinel silence --end {one.id}")


def _warn(alert: str) -> None:
    """Warn of an alert that no rule has: it is most likely mistyped."""
    names = {rule.name for rule in loader.load(_settings_rules()).rules}
    names |= {rule["rule"] for run in list_runs() for rule in run["rules"]}
    if not set(alert) & set("*?[") and alert not in names:
        near = did_you_mean(alert, sorted(names))
        echo(f"sentinel: the silence holds for rules added later: none is called {alert!r} now{near}", err=True)


def _settings_rules() -> tuple[Path, ...]:
    try:
        return settings.load().daemon.rules
    except ConfigError:
        return ()
