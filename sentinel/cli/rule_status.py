"""`sentinel rules status`: where each rule stands now, and what it looks at."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from sentinel.cli.client import all_asked
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.web import json

ORDER = ("firing", "pending", "nonfinite", "warming", "no data", "not applicable", "inactive")
"""What wants to be seen comes first."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, short_help="Show where each rule stands.")
@click.option("--run", help="Name or id of a run. [default: all runs]")
@json_option()
@click.pass_context
def status(ctx: click.Context, run: str | None, as_json: bool) -> None:
    """Show where each rule stands: firing, warming up, without data, with its current numbers.

    Exit code 0: none fires; 1: one fires, or nothing is watched.

    \b
    Example:  sentinel rules status --run train_gpt
    """
    runs = [found for answer in all_asked("status") for found in answer["runs"]]
    chosen = [found for found in runs if run in (None, found["run"], found["run_id"])]
    if as_json:
        echo(json.text([{key: found[key] for key in ("run", "run_id", "rules")} for found in chosen]))
    elif not chosen:
        echo("No run is watched on this node." if run is None else f"No run {run} is watched on this node.")
    else:
        for found in chosen:
            echo(f"{found['run']}  ({found['run_id']})  step {found['step']}")
            for line in lines(found["rules"]):
                echo(line)
    fires = any(rule["state"] == "firing" for found in chosen for rule in found["rules"])
    ctx.exit(0 if chosen and not fires else 1)


def lines(rules: list[dict[str, Any]]) -> Iterator[str]:
    """A line a rule and state. Of many ranks or layers in one state the first is shown, and how many they are."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rule in rules:
        found.setdefault((rule["state"], rule["rule"]), []).append(rule)
    width = max((len(rule["rule"]) for rule in rules), default=0)
    for state, name in sorted(found, key=lambda key: (ORDER.index(key[0]), key[1])):
        mine = found[state, name]
        lead = f"  {state:<14} {name:<{width}}  "
        columns = min(shutil.get_terminal_size((80, 24)).columns, 100)
        yield from textwrap.wrap(
            _format_rules(mine) or "-",
            columns,
            initial_indent=lead,
            subsequent_indent=" " * len(lead),
            break_long_words=False,
        )


def _format_rules(rules: list[dict[str, Any]]) -> str:
    first = rules[0]
    scope, entity = first["entity"]
    who = f"{scope} {entity}{f' and {len(rules) - 1} more' if len(rules) > 1 else ''}: " if entity else ""
    if first["lacking"]:
        return f"{who}no {', '.join(first['lacking'])}"
    return who + ", ".join(f"{name} {_number(value)}" for name, value in first["values"].items())


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
