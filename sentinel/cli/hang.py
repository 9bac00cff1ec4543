"""`sentinel hang`: where the ranks of a job stand, live or from what it left behind."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.client import ask_daemons
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.text import name_ranks
from sentinel.web import json

SURVEY_SECONDS = 2.0
"""Seconds that ranks get to answer: they dump stacks in milliseconds, unless another thread holds the GIL."""
LOOK_SECONDS = 0.05
"""Seconds between two questions to the daemons."""
APART = 4
"""Ranks of a node up to which each has a line; of more, ranks in the same place share one."""


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@json_option()
@click.pass_context
def hang(ctx: click.Context, /, paths: tuple[Path, ...], as_json: bool) -> None:
    """Say which rank is missing in which collective, and why.

    Without PATHS: for the runs that are watched on this node now; for a job whose nodes are connected, with the ranks
    of all nodes. With PATHS: for a job that has ended, from files or folders of flight-recorder dumps (pickle or JSON),
    torchrun's error files, and logs whose lines begin with the rank (`7: `, `[rank7]:`) or whose names end with it.
    Nothing in them is run.

    Exit code 0: nothing hangs; 1: a cause, or that none is known, is printed.

    \b
    Example:  sentinel hang
              sentinel hang /tmp/nccl_trace_rank_* slurm-4711.out
    """
    if paths:
        ctx.exit(1 if _offline(paths, as_json) else 0)
    runs = survey_runs()
    if as_json:
        echo(json.text(runs))
    elif not runs:
        echo("No run is watched on this node. For a job that has ended: sentinel hang PATHS")
    else:
        echo("\n".join(line for run in runs for line in _live(run)))
    ctx.exit(1 if any(run["cause"] for run in runs) else 0)


def survey_runs() -> list[dict[str, Any]]:
    """Return where the ranks of the watched runs stand, as soon as all have answered or the time is up."""
    deadline, answers = time.monotonic() + SURVEY_SECONDS, ask_daemons("hang")
    while not all(run["answered"] for answer in answers for run in answer) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        answers = ask_daemons("hang", {"again": True})
    return [run for answer in answers for run in answer]


def _offline(paths: tuple[Path, ...], as_json: bool) -> bool:
    """Print what the files show. Returns whether there is a cause, or one that is not known."""
    from sentinel.toolkit.postmortem.files import remains
    from sentinel.toolkit.postmortem.verdict import verdict

    found = remains(paths)
    finding = verdict(found)
    if as_json:
        body: dict[str, Any] = msgspec.to_builtins(finding)
        echo(json.text(body | {"ranks": found.ranks, "unread": found.unread}))
        return bool(finding.cause)
    lines = [("read", f"{len(found.ranks)} ranks: {', '.join(map(str, found.ranks[:16]))}")]
    if finding.cause:
        lines += [("cause", f"{finding.cause} (confidence: {finding.confidence})")]
    else:
        lines += [("state", "all groups are complete: no rank stands in a collective")]
    lines += [("evidence", fact) for fact in finding.evidence]
    lines += [("to do", finding.remedy)] if finding.remedy else []
    lines += [("missing", each) for each in finding.missing]
    lines += [("to know", finding.command)] if finding.command else []
    lines += [("not read", each) for each in found.unread[:8]]
    echo("\n".join(line for row in lines for line in _label(*row)))
    return bool(finding.cause)


def _live(run: dict[str, Any]) -> list[str]:
    lines = [f"{run['run']}  ({run['run_id']})"]
    nodes = itertools.groupby(run["ranks"], lambda rank: (rank.get("node", 0), rank.get("hostname", "")))
    of_nodes = [(node, list(ranks)) for node, ranks in nodes]
    for (node, host), ranks in of_nodes:
        if len(of_nodes) > 1:
            lines += _label(f"node {node}", host)
        lines += _list_ranks(ranks)
    lines += [line for words in run.get("not_asked", ()) for line in _label("not asked", words)]
    if run["cause"]:
        rows = [("cause", f"{run['cause']} (confidence: {run['confidence']})")]
        rows += [("evidence", fact) for fact in run["evidence"]]
        rows += [("to do", run["remedy"])] if run["remedy"] else []
        rows += [("missing", each) for each in run["missing"]]
        rows += [("to know", run["command"])] if run.get("command") else []
        lines += [line for row in rows for line in _label(*row)]
    return lines


def _list_ranks(ranks: list[dict[str, Any]]) -> list[str]:
    """Return lines about what a node's ranks do; of many ranks, those that do the same in the same place share one."""
    alike: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for rank in ranks:
        doing = rank["kind"] or ("makes progress" if rank["quiet_seconds"] < 2 else "is beyond the loop, or in a phase")
        state = doing if rank["state"] == "live" else rank["state"]
        apart = rank["rank"] if len(ranks) <= APART else None
        alike.setdefault((state, rank["at"], apart), []).append(rank)
    lines = []
    for (state, at, _), several in alike.items():
        steps, quiet = [rank["step"] for rank in several], max(rank["quiet_seconds"] for rank in several)
        step = f"step {steps[0]}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
        lines += _label(name_ranks([rank["rank"] for rank in several]), f"{state}; {step}, quiet for {quiet:.0f} s")
        lines += _label("", f"at {at}") if at else []
    return lines


def _label(label: str, text: str) -> list[str]:
    return wrap_text(f"  {label:<11} ", text)
