"""`sentinel status`: show the runs that are watched now."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import click

from sentinel.cli import device_status, job_status, rule_status
from sentinel.cli.client import ask_daemons
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.notify import undelivered
from sentinel.runs import snapshot_age
from sentinel.signals import OPENING_STEPS, TIERS
from sentinel.text import format_moment, join_names
from sentinel.web import json

_OPENING = (
    f"for now more, and at a higher cost: the first {OPENING_STEPS} steps are examined whole, some of those up to 512"
)
"""Shown as long as the opening examination (hooks/core/opening.py) is on, or part of the measured cost."""


@click.command()
@json_option()
@click.option("--rules", "with_rules", is_flag=True, help="Show each rule's state and current numbers.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, with_rules: bool) -> None:
    """Show the runs that are watched now: step, loss, ranks, rules, rollback.

    Exit code 0: no incident is open, also where nothing is watched; 1: one is.

    \b
    Example:  sentinel status --rules
    """
    answers = ask_daemons("status")
    runs = [run for answer in answers for run in answer["runs"]]
    if as_json:
        echo(json.text(runs))
    elif not runs:
        echo("No run is watched on this node. `sentinel last` shows ended runs.")
    if not as_json:
        for line in _list_undelivered():
            echo(line)
        for answer in answers:
            for run in answer["runs"]:
                _show(run, with_rules)
            _show_daemon(answer)
    ctx.exit(1 if any(run["open_incidents"] for run in runs) else 0)


def _list_undelivered() -> list[str]:
    """Return what daemons that have ended could not deliver; the next one shows it on the training terminal too."""
    try:
        return undelivered.describe_left(undelivered.read(paths.state_directory()))
    except ConfigError:
        return []


def _show(run: dict[str, Any], with_rules: bool) -> None:
    """Print a run. Keys that a daemon of an earlier version does not send are read with `get`."""
    parts = (
        _describe_now(run),
        *(_describe_rank(rank) for rank in run["ranks"]),
        _describe_sampling(run),
        job_status.lines(run["job"]) if run.get("job") else (),
        device_status.lines(run["gpus"], run["host"]),
        _describe_watch(run),
        describe_rollback(run["rollback"]),
        _describe_alerts(run),
        rule_status.lines(run["rules"]) if with_rules else (),
    )
    for line in itertools.chain.from_iterable(parts):
        echo(line)


def _describe_now(run: dict[str, Any]) -> Iterator[str]:
    attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
    yield f"{run['run']}  ({run['run_id']}{attempt})  step {run['step']}"
    values = run["values"]
    shown = [name for name in ("loss", "grad_norm", "learning_rate", "loss_scale", "step_seconds") if name in values]
    yield "  now       " + "   ".join(f"{name} {values[name]:.4g}" for name in shown)
    if run.get("judged_as"):
        yield f"  judged    as {run['judged_as']}"


def _describe_rank(rank: dict[str, Any]) -> Iterator[str]:
    parts = [_state(rank), f"step {rank['step']}", rank["phase"] and f"phase {rank['phase']}", _describe_wanted(rank)]
    if rank["dropped"]:
        parts.append(f"{rank['dropped']} steps dropped")
    if rank.get("skipped"):
        parts.append(f"{rank['skipped']} samples skipped")
    yield f"  rank {rank['rank']:<4} " + ", ".join(part for part in parts if part)
    if rank["costs"]:
        split = ", ".join(f"{part} {share:.2%}" for part, share in rank["costs"].items())
        yield f"            costs {sum(rank['costs'].values()):.2%} of the loop's time: {split}"


def _describe_sampling(run: dict[str, Any]) -> Iterator[str]:
    given: Iterator[dict[str, int]] = (rank["spacing"] for rank in run["ranks"] if rank["spacing"])
    spacing = next(given, {})  # the daemon gives all ranks the same spacing
    for title, line in zip(("samples", *3 * ("",)), _list_samples(spacing), strict=False):
        yield f"  {title:<9} {line}"
    if "opening_step" in run["values"]:
        yield f"            {_OPENING}"


def _describe_watch(run: dict[str, Any]) -> Iterator[str]:
    """Yield what is not seen, what costs more than it could, and what the first steps showed."""
    for what in sorted({unseen for rank in run["ranks"] for unseen in rank["unseen"]}):
        yield f"  not seen  {what}"
    for why in sorted({rank["kernel_missing"] for rank in run["ranks"]} - {""}):
        yield f"  slower    no compiled kernel reads the gradients ({why})"
    if opening := run.get("opening"):  # absent until the opening is over
        yield f"  opening   {opening['text']}"


def _describe_alerts(run: dict[str, Any]) -> Iterator[str]:
    yield f"  incidents {run['open_incidents']} open, {run['incidents']} in all"
    for silence in run["silences"]:
        yield f"  silenced  {_silence(silence)}"
    for receiver in run["notifications"]:
        yield f"  notifies  {_receiver(receiver)}"
    for trouble in filter(None, (run["trouble"], run["notifications_trouble"])):
        yield f"  trouble   {trouble}"
    if dropped := run.get("history_dropped"):
        yield "  history   lacks " + ", ".join(f"{rows:,} rows of {kind}" for kind, rows in dropped.items())


def _state(rank: dict[str, Any]) -> str:
    if rank["state"] != "stalled":
        return str(rank["state"])
    at = f" at {rank['stall']['at']}" if rank["stall"]["at"] else ""
    return f"stalled for {rank['stall']['seconds']:.0f} s{at}"


def _describe_wanted(rank: dict[str, Any]) -> str:
    """Return the spacings that a rank would choose alone; empty where they are those in use."""
    if all(rank["wanted"].get(tier, every) == every for tier, every in rank["spacing"].items()):
        return ""
    every = ", ".join(f"{steps:,}" for _, steps in sorted(rank["wanted"].items()))
    return f"alone it would sample tiers 0 to 3 every {every} steps"


def _list_samples(spacing: dict[str, int]) -> Iterator[str]:
    """Yield which tiers are sampled how often."""
    taken = {"": 1, **spacing}
    for every, tiers in itertools.groupby(sorted(taken), taken.__getitem__):
        names = join_names([f"{TIERS[int(tier)]} (tier {tier})" if tier else "the loss" for tier in tiers], len(taken))
        yield f"{'every step' if every == 1 else f'every {every:,} steps'}: {names}"


def _show_daemon(answer: dict[str, Any]) -> None:
    http = f"http://{answer['http']}/metrics" if answer["http"] else "no HTTP"
    echo(f"daemon {answer['pid']}, version {answer['version']}, {http}")
    if (heartbeat := answer.get("heartbeat")) is not None:
        trouble = f": {heartbeat['trouble']}" if heartbeat["trouble"] else ""
        echo(f"  heartbeat {heartbeat['sent']} sent, {heartbeat['withheld']} withheld{trouble}")
    for signal, counts in answer.get("otlp", {}).items():
        trouble = f": {counts['trouble']}" if counts["trouble"] else ""
        echo(f"  otlp      {signal}: {counts['sent']} requests sent, {counts['failed']} failed{trouble}")
    for trouble in answer["trouble"]:
        echo(f"  trouble   {trouble}")


def describe_rollback(rollback: dict[str, Any]) -> Iterator[str]:
    """Yield lines: whether rollback is armed, and which snapshots it can restore."""
    if not rollback["armed"]:
        yield "  rollback  not armed"
        return
    held = ", ".join(str(step) for step in rollback["held"]) or "none yet"
    yield f"  rollback  armed, snapshots of steps {held}; {len(rollback['done'])} done"
    if said := snapshot_age.in_words(rollback):
        yield f"            {said}"
    if disk := rollback.get("disk"):
        own = "none yet" if disk["newest"] is None else f"step {disk['newest']:,}"
        common = "not known" if disk["newest_on_all"] is None else f"step {disk['newest_on_all']:,}"
        yield f"            on disk: this node's newest part {own}, newest of all nodes {common}, in {disk['where']}"


def _silence(silence: dict[str, Any]) -> str:
    comment = f" ({silence['comment']})" if silence["comment"] else ""
    return (
        f"{silence['alert']} until {format_moment(silence['until'])}{comment}; sentinel silence --end {silence['id']}"
    )


def _receiver(receiver: dict[str, Any]) -> str:
    parts = [f"{receiver['receiver']}: {receiver['sent']} sent"]
    words = (("pending", "waiting"), ("held", "held back by a rate limit"), ("given_up", "given up"))
    parts += [f"{receiver[key]} {word}" for key, word in words if receiver[key]]
    return ", ".join(parts) + (f": {receiver['trouble']}" if receiver["trouble"] else "")
