"""`sentinel rules status`: where each rule stands now, and what it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from sentinel.cli.client import list_runs
from sentinel.cli.history import complete_option
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.engine.judging.judgement import STATES
from sentinel.web import json


@click.command(short_help="Show where each rule stands.")
@click.option(
    "--run", callback=complete_option, help="Name or id of a run, or the beginning of its id. [default: all runs]"
)
@json_option()
@click.pass_context
def status(ctx: click.Context, run: str | None, as_json: bool) -> None:
    """Show where each rule stands: firing, warming up, without data, with its current numbers.

    Exit code 0: none fires; 1: one fires, or nothing is watched.

    \b
    Example:  sentinel rules status --run train_gpt
    """
    chosen = find_runs(run)
    if as_json:
        echo(json.text(pick_rules(chosen)))
    elif not chosen:
        echo("No run is watched on this node." if run is None else f"No run {run} is watched on this node.")
    else:
        for found in chosen:
            echo(f"{found['run']}  ({found['run_id']})  step {found['step']}")
            for line in lines(found["rules"]):
                echo(line)
    fires = any(rule["state"] == "firing" for found in chosen for rule in found["rules"])
    ctx.exit(0 if chosen and not fires else 1)


def find_runs(run: str | None) -> list[dict[str, Any]]:
    """Return the runs of this name or id that are watched now; without one, all."""
    return [found for found in list_runs() if run in (None, found["run"], found["run_id"])]


def pick_rules(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each run, its name, its id and where its rules stand."""
    return [{key: found[key] for key in ("run", "run_id", "rules")} for found in runs]


def lines(rules: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per rule and state. Of many ranks or layers in one state it shows the first and their number."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rule in rules:
        found.setdefault((rule["state"], rule["rule"]), []).append(rule)
    width = max((len(rule["rule"]) for rule in rules), default=0)
    for state, name in sorted(found, key=lambda key: (STATES.index(key[0]), key[1])):
        mine = found[state, name]
        lead = f"  {state:<14} {name:<{width}}  "
        yield from wrap_text(lead, _format_rules(mine) or "-")


def _format_rules(rules: list[dict[str, Any]]) -> str:
    first = rules[0]
    scope, entity = first["entity"]
    who = f"{scope} {entity}{f' and {len(rules) - 1} more' if len(rules) > 1 else ''}: " if entity else ""
    if first["lacking"]:
        return f"{who}no {', '.join(first['lacking'])}"
    return who + ", ".join(f"{name} {_number(value)}" for name, value in first["values"].items())


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
