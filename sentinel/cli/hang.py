"""`sentinel hang`: where the ranks of a job stand, live or from what it left behind."""

from __future__ import annotations

import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.client import all_asked
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.web import json

SURVEY_SECONDS = 2.0
"""Seconds that ranks get to answer: they dump stacks in milliseconds, unless another thread holds the GIL."""
LOOK_SECONDS = 0.05
_COLUMN = 14


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@json_option()
@click.pass_context
def hang(ctx: click.Context, /, paths: tuple[Path, ...], as_json: bool) -> None:
    """Say which rank is missing in which collective, and why.

    Without PATHS: for the runs that are watched on this node now. With PATHS: for a job that has ended, from
    files or folders of flight-recorder dumps (pickle or JSON), torchrun's error files, and logs whose lines begin with
    the rank (`7: `, `[rank7]:`) or whose names end with it. Nothing in them is run.

    Exit code 0: nothing hangs; 1: a cause, or that none is known, is printed.

    \b
    Example:  sentinel hang
              sentinel hang /tmp/nccl_trace_rank_* slurm-4711.out
    """
    if paths:
        ctx.exit(1 if _offline(paths, as_json) else 0)
    runs = _survey_runs()
    if as_json:
        echo(json.text(runs))
    elif not runs:
        echo("No run is watched on this node. For a job that has ended: sentinel hang PATHS")
    else:
        echo("\n".join(line for run in runs for line in _live(run)))
    ctx.exit(1 if any(run["cause"] for run in runs) else 0)


def _survey_runs() -> list[dict[str, Any]]:
    """What the ranks say of themselves, as soon as all have, or time is up."""
    deadline, answers = time.monotonic() + SURVEY_SECONDS, all_asked("hang")
    while not all(run["answered"] for answer in answers for run in answer) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        answers = all_asked("hang", {"again": True})
    return [run for answer in answers for run in answer]


def _offline(paths: tuple[Path, ...], as_json: bool) -> bool:
    """Whether there is something to look at: a cause, or that it is not known."""
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
    lines += [("not read", each) for each in found.unread[:8]]
    echo("\n".join(_wrap_text(*line) for line in lines))
    return bool(finding.cause)


def _live(run: dict[str, Any]) -> list[str]:
    lines = [f"{run['run']}  ({run['run_id']})"]
    for rank in run["ranks"]:
        doing = rank["kind"] or ("makes progress" if rank["quiet_seconds"] < 2 else "is beyond the loop, or in a phase")
        state = doing if rank["state"] == "live" else rank["state"]
        lines.append(
            _wrap_text(f"rank {rank['rank']}", f"{state}; step {rank['step']}, quiet for {rank['quiet_seconds']:.0f} s")
        )
        if rank["at"]:
            lines.append(_wrap_text("", f"at {rank['at']}"))
    if run["cause"]:
        lines.append(_wrap_text("cause", f"{run['cause']} (confidence: {run['confidence']})"))
        lines += [_wrap_text("evidence", fact) for fact in run["evidence"]]
        lines += [_wrap_text("to do", run["remedy"])] if run["remedy"] else []
        lines += [_wrap_text("missing", each) for each in run["missing"]]
    return lines


def _wrap_text(label: str, text: str) -> str:
    columns = max(shutil.get_terminal_size().columns, 60)
    first = f"  {label:<{_COLUMN - 2}}"
    return textwrap.fill(
        text,
        columns - 1,
        initial_indent=first,
        subsequent_indent=" " * _COLUMN,
        break_long_words=False,
        break_on_hyphens=False,
    )
