"""`sentinel doctor`: check the environment and a training script for known mistakes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from sentinel.cli.finite import Finite
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.toolkit.doctor import environment, loop, model
from sentinel.toolkit.doctor.command import Examined, examine_command
from sentinel.toolkit.doctor.finding import DoctorFinding, describe_finding, sort_findings
from sentinel.web import json


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--steps", type=click.IntRange(1, 1000), default=3, show_default=True, help="Optimizer steps to watch.")
@click.option(
    "--timeout",
    type=Finite(1, 86_400),
    default=300,
    show_default=True,
    help="Seconds the script may take for these steps.",
)
@json_option()
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.pass_context
def doctor(ctx: click.Context, /, steps: int, timeout: float, as_json: bool, command: tuple[str, ...]) -> None:
    """Check the environment, and the first steps of a training script, for known mistakes.

    The script really runs, writes its files, and is ended after the last of these steps. It is not changed, and no
    daemon is started.

    Exit code 0: nothing, or hints only; 1: a warning or worse.

    \b
    Example:  sentinel doctor
              sentinel doctor -- python train.py --lr 3e-4
              sentinel doctor --steps 10 -- torchrun --nproc-per-node 2 train.py
    """
    found = check_environment()
    if command:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as at Ctrl-C, the script is ended
        try:
            seen = examine_command(command, steps=steps, seconds=timeout)
        finally:
            signal.signal(signal.SIGTERM, before)
        found += judge_ranks(seen)
    found = sort_findings(found)
    if as_json:
        echo(json.text({"findings": msgspec.to_builtins(found)}))
    else:
        echo("\n".join(_page(found, bool(command))))
    ctx.exit(1 if any(finding.severity != "info" for finding in found) else 0)


def check_environment() -> list[DoctorFinding]:
    """Return the known mistakes in this machine's environment, the worst first."""
    return sort_findings(environment.findings(environment.machine()))


def judge_ranks(seen: Examined) -> list[DoctorFinding]:
    """Return the findings about each rank and about all ranks together, and why the steps were not completed."""
    found = [finding for facts in seen.ranks for finding in _judge_rank(facts, len(seen.ranks))]
    found += model.across(seen.ranks)
    if seen.timed_out:
        found.append(describe_finding("no-step/time", last=_quote_last(seen.output)))
    elif not any(facts["steps"] for facts in seen.ranks):
        error = next((facts["error"] for facts in seen.ranks if facts["error"]), "")
        reason = error or "no optimizer took a step"
        found.append(describe_finding("no-step", reason=reason, last=_quote_last(seen.output)))
    return found


def _judge_rank(facts: dict[str, Any], ranks: int) -> Iterator[DoctorFinding]:
    facts = {**facts, "ranks_here": ranks}
    yield from model.findings(facts)
    yield from loop.findings(facts)
    if facts["error"] and facts["steps"]:
        yield describe_finding("error", steps=len(facts["steps"]), error=facts["error"])


def _quote_last(errors: str) -> str:
    """Return the last line of stderr that says something: torchrun ends its warnings with lines of stars."""
    written = (line.rstrip() for line in reversed(errors.splitlines()))
    last = next((line for line in written if line and not line.endswith("****")), "")
    return f"its last line on stderr: {last[:200]}" if last else "it wrote nothing to stderr"


def _page(found: list[DoctorFinding], ran: bool) -> list[str]:
    lines = []
    for finding in found:
        lines += wrap_text(f"{finding.severity:<9} ", f"{finding.what} ({finding.name})")
        lines += wrap_text("  why     ", finding.why)
        lines += wrap_text("  write   ", finding.line)
        lines += wrap_text("  source  ", finding.source)
    if not found:
        lines.append("Nothing to fix" + (" in the environment and the script." if ran else " in the environment."))
    if not ran:
        lines.append("Model and loop: sentinel doctor -- python train.py")
    return lines
