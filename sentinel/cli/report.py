"""`sentinel report`: write one offline HTML file about a run, or about two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel._version import __version__
from sentinel.cli.client import list_runs
from sentinel.cli.history import find_history
from sentinel.cli.incidents import collect_live_incidents
from sentinel.cli.job_status import describe_node, describe_shrink
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.node import small_files
from sentinel.report.content import Report
from sentinel.report.content import report as read
from sentinel.report.page import page
from sentinel.store import History
from sentinel.web import json


@click.command()
@click.argument("run")
@click.argument("other", required=False)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="File. [default: sentinel-RUN.html]")
@json_option("Print the figures as JSON, and write no file.")
def report(run: str, other: str | None, output: Path | None, as_json: bool) -> None:
    """Write one HTML file about RUN (a name, an id or its beginning, or a history file), which needs no network: curves
    with the incidents on them, their cases, layers, ranks, GPUs, rollbacks. With OTHER, both runs side by side. Of a
    job over several nodes that still runs, it has the incidents of all nodes, and the curves of this one.

    Exit code 0; 2: there is no such run, or the file cannot be written.

    \b
    Example:  sentinel report train_gpt
              sentinel report train_gpt train_gpt_lower_lr --output compared.html
    """
    reports = read_reports((run,) if other is None else (run, other))
    if as_json:
        echo(json.text([list_figures(one) for one in reports]))
        return
    path = output or Path("-against-".join(f"sentinel-{one.run_id}" for one in reports) + ".html")
    small_files.write_whole(path, page(reports, __version__))
    echo(f"{path}: {path.stat().st_size / 1024:.0f} kB, open it in any browser")


def read_reports(runs: Sequence[str]) -> list[Report]:
    """Read the reports of these runs (names, ids or files) from their histories. Raises ConfigError."""
    reports, live = [], {one["run_id"]: one for one in list_runs()}
    for name in runs:
        with History(find_history(name)) as history:
            one = read(history, over=history.run_id not in live)
        watched = live.get(one.run_id, {})
        reports.append(_add_job(one, watched) if watched.get("job") else one)
    return reports


def _add_job(one: Report, run: dict[str, Any]) -> Report:
    """Return the report of a node's run with the incidents of its job. `run`: what `sentinel status` shows of it."""
    job = run["job"]
    cases, unasked = collect_live_incidents([run], one.run_id)
    own = [case for case in cases if case["run_id"] == one.run_id]
    others = [
        f"node {node['node']} ({describe_node(job, node)})" for node in job["nodes"] if node["node"] != job["node"]
    ]
    said = [
        f"this is node {job['node']} of {job['expected']}: curves and ranks are its own; `sentinel report` on another "
        "node has those of its ranks",
        *filter(None, [describe_shrink(job)]),
        *others,
        *unasked,
    ]
    return msgspec.structs.replace(one, incidents=tuple(sorted(own, key=_find_time)), job=tuple(said))


def _find_time(case: dict[str, Any]) -> float:
    return float(case["time"])


def list_figures(one: Report) -> dict[str, Any]:
    """Return what `sentinel report --json` prints of a run."""
    return {
        "run": one.run,
        "run_id": one.run_id,
        "attempts": one.attempts,
        "first_step": one.first,
        "last_step": one.last,
        "seconds": one.seconds,
        "final_loss": one.final_loss,
        "incidents": list(one.incidents),
        "rollbacks": [{"to": undone.to, "at": undone.at} for undone in one.rollbacks],
        "job": list(one.job),
    }
