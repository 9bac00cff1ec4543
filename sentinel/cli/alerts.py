"""`sentinel alerts test`: send a test alert to the receivers."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import click
import msgspec

from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.config import settings
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.errors import ConfigError
from sentinel.notify import Delivery, Message, Origin, Route, attempt, silences
from sentinel.notify.routes import make_origin, make_routes
from sentinel.web import json


@click.group()
def alerts() -> None:
    """Test the receivers of alerts.

    \b
    Example:  sentinel alerts test ops
    """


@alerts.command(short_help="Send a test alert to the receivers.")
@click.argument("receiver", required=False)
@click.option("--config", "file", type=click.Path(path_type=Path), help="Settings file. [default: the one in force]")
@json_option()
@click.pass_context
def test(ctx: click.Context, receiver: str | None, file: Path | None, as_json: bool) -> None:
    """Send a test alert, SentinelTest, and its resolution to RECEIVER; without RECEIVER, to all in the settings.

    Each delivery is tried once, by this command: the daemon is not involved.

    Exit code 0: all were delivered; 1: at least one was not.

    \b
    Example:  sentinel alerts test ops
    """
    loaded = settings.load(file)
    routes, notes = make_routes(loaded)
    for note in notes:
        echo(f"sentinel: {note}", err=True)
    chosen = [route for route in routes if receiver in (None, route.name)]
    if not chosen:
        where = settings.path(file) or f"{settings.home() / settings.FILE} (which `sentinel init` writes)"
        known = "; there are: " + ", ".join(route.name for route in routes) if routes else ""
        raise ConfigError(
            f"no receiver {receiver or ''} in {where}{known}; add one under [[receivers]]".replace("  ", " ")
        )
    results = asyncio.run(_send(chosen, loaded))
    if as_json:
        found = [{"receiver": name, **msgspec.to_builtins(delivery)} for name, delivery in results.items()]
        echo(json.text(found))
    else:
        for name, delivery in results.items():
            echo(f"{name}: " + ("delivered" if delivery.fault is None else f"not delivered: {delivery.detail}"))
    ctx.exit(1 if notes or any(delivery.fault for delivery in results.values()) else 0)


async def _send(routes: list[Route], loaded: settings.Settings) -> dict[str, Delivery]:
    deliveries = await asyncio.gather(*(_try_route(route, loaded) for route in routes))
    return dict(zip([route.name for route in routes], deliveries, strict=True))


async def _try_route(route: Route, loaded: settings.Settings) -> Delivery:
    case, over = _case(now := time.time()), _case(now, over=True)
    origin = make_origin(loaded, case.run, case.run_id, os.getuid())
    delivery = await attempt.attempt(route, _message(case, origin))
    if delivery.fault is None:
        delivery = await attempt.attempt(route, _message(over, origin, delivery.reference))
    await attempt.close(route)
    return delivery


def _message(case: Case, origin: Origin, reference: str = "") -> Message:
    return Message(
        run=case.run, run_id=case.run_id, alert=case.alert, cases=(case,), reference=reference, origin=origin
    )


def _case(now: float, *, over: bool = False) -> Case:
    what = f"a test by {silences.user()} on {socket.gethostname()}: nothing is wrong"
    return Case(
        id="0.0",
        run="sentinel-alerts-test",
        run_id=f"test-{int(now)}",
        attempt=0,
        alert="SentinelTest",
        severity="info",
        state="resolved" if over else "firing",
        first_step=0,
        first_seq=0,
        step=0,
        time=now,
        resolved_step=0 if over else None,
        resolved_time=now + 1 if over else None,
        members=(),
        summary=what,
        diagnosis=Finding(cause="`sentinel alerts test`", confidence="high", evidence=(), remedy="nothing to do"),
    )
