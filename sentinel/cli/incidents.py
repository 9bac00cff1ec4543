"""`sentinel incidents`: what went wrong, in live and in ended runs."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click

from sentinel.cli import stacks
from sentinel.cli.client import ask_daemons, list_runs
from sentinel.cli.history import complete_option, explain_unknown
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, wrap_text
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.notify.outbox import list_undelivered
from sentinel.store import History
from sentinel.text import UNRESOLVED, format_clock, format_moment, in_words
from sentinel.web import json

TEXT_COLUMN = 14
FRAME_INDENT = "  "
"""Beginning of evidence that is a frame of a stack: left out where the stacks are shown whole."""

_OF_JOB = re.compile(r"n(\d+)-(.+)")
"""Id of a job's incident: the node that opened it, and that node's id of the case."""

_RUN = click.option(
    "--run", callback=complete_option, help="Name or id of a run, or the beginning of its id. [default: all runs]"
)


@click.group(invoke_without_command=True)
@_RUN
@json_option()
@click.pass_context
def incidents(ctx: click.Context, run: str | None, as_json: bool) -> None:
    """List the incidents of live and ended runs, the newest last.

    Exit code 0: there are none; 1: there are some; 2: there is no run of that name, or its history cannot be read.

    \b
    Example:  sentinel incidents --run train_gpt
              sentinel incidents show 0.1 --run train_gpt
    """
    if ctx.invoked_subcommand is not None:
        return
    cases = collect_incidents(run)
    _must_be_known(run, cases)
    nothing = "No incidents." if run is None else f"No incidents of run {run}."
    echo(json.text(cases) if as_json else format_incidents(cases, nothing))
    ctx.exit(1 if cases else 0)


def format_incidents(cases: list[dict[str, Any]], nothing: str) -> str:
    """Return a row per case; on a terminal those of a run below its name, with their summaries. `nothing`: the text
    where there is no case."""
    if not cases:
        return nothing
    if sys.stdout.isatty():
        return "\n".join(line for run, own in itertools.groupby(cases, _whose) for line in (run, *_in_terminal(own)))
    wide = max(3, *(len(case["run_id"]) for case in cases))
    rows = [
        f"{'run':<{wide}} {'id':<5} {'fired':<19} {'alert':<20} {'severity':<9} {'state':<12} {'since step':>10}"
        "  summary"
    ]
    rows += [
        f"{case['run_id']:<{wide}} {case['id']:<5} {format_moment(case['time']):<19} {_name(case)[:20]:<20} "
        f"{case['severity']:<9} {_state(case):<12} {case['first_step']:>10}  {case['summary']}"
        for case in cases
    ]
    return "\n".join(rows)


def _name(case: dict[str, Any]) -> str:
    """Return the alert's name, indented for a consequence."""
    return ("  " if case.get("parent") else "") + str(case["alert"])


def _whose(case: dict[str, Any]) -> str:
    return f"{case['run']} ({case['run_id']})"


def _in_terminal(cases: Iterable[dict[str, Any]]) -> Iterator[str]:
    for case in cases:
        yield f"  {case['id']:<5} {_name(case):<22} {case['severity']:<9} {_state(case)}"
        told = f"{format_clock(case['time'])}, since step {case['first_step']}: {case['summary']}"
        yield from wrap_text(" " * 8, told)


@incidents.command()
@click.argument("identity", metavar="ID")
@_RUN
@json_option()
def show(identity: str, run: str | None, as_json: bool) -> None:
    """Show one incident whole: evidence, cause, what to do, what was done.

    Exit code 0; 2: there is no such incident.

    \b
    Example:  sentinel incidents show 0.1 --run train_gpt
    """
    case = find_incident(identity, run)
    echo(json.text(case) if as_json else _text(case) + stacks.format_stacks(case.get("stacks", {})))


def find_incident(identity: str, run: str | None) -> dict[str, Any]:
    """Return the newest incident of this id. Raises ConfigError where there is none."""
    cases = collect_incidents(run)
    _must_be_known(run, cases)
    found = [case for case in cases if case["id"] == identity]
    found = found or [case for case in cases if identity in case.get("own", ())]  # this node's own id of the case
    if not found:
        where = f" in run {run}" if run else ""
        raise ConfigError(f"no incident {identity}{where}; see `sentinel incidents`{_say_where(identity)}")
    whole = [case for answer in ask_jobs(list_runs(), found[-1]["id"]) for case in answer["cases"]]
    return next((case for case in whole if case["run_id"] == found[-1]["run_id"]), found[-1])


def _say_where(identity: str) -> str:
    """Return which nodes keep an incident of a job that has ended; empty for other ids."""
    if (named := _OF_JOB.fullmatch(identity)) is None:
        return ""
    node, case = named.groups()
    return f". The job's coordinator, node 0 as a rule, keeps the incidents of all nodes; node {node} has it as {case}"


def collect_incidents(run: str | None) -> list[dict[str, Any]]:
    """Return the cases of live daemons, and of the histories of all other runs; for a job over several nodes, the
    job's. Nodes that could not be asked, and histories that cannot be read, are named on stderr. Raises ConfigError
    where the history of `run` cannot be read."""
    runs = list_runs()
    live = {run["run_id"] for run in runs}
    cases, unasked = collect_live_incidents(runs, run)
    for said in unasked:
        echo(f"sentinel: {said}", err=True)
    for path in paths.histories():
        if path.stem in live:
            continue
        try:
            with History(path) as history:
                cases += history.final_incidents()
                if run in (None, history.run, history.run_id):
                    _print_undelivered(history)
        except ConfigError as error:
            if path.stem == run:  # that it has no incidents is not known
                raise
            echo(f"sentinel: {error}", err=True)
    chosen = [case for case in cases if run is None or run in (case["run"], case["run_id"])]
    return sorted(chosen, key=lambda case: case["time"])


def collect_live_incidents(
    runs: Iterable[dict[str, Any]], run: str | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the cases of live daemons (for a job over several nodes, the job's), and which nodes could not be asked,
    in words. `run`: name or id of the only run for which nodes are asked."""
    jobs = [job for job in ask_jobs(runs) if run in (None, job["run"], job["run_id"])]
    joined = {job["run_id"] for job in jobs}
    cases = [case for answer in ask_daemons("incidents") for case in answer if case["run_id"] not in joined]
    cases += {(case["run_id"], case["id"], case["time"]): case for job in jobs for case in job["cases"]}.values()
    unasked = dict.fromkeys(f"run {job['run']}: not asked: {words}" for job in jobs for words in job["not_asked"])
    return cases, list(unasked)


def ask_jobs(runs: Iterable[dict[str, Any]], identity: str = "") -> list[dict[str, Any]]:
    """Return the incidents of the jobs over several nodes that `runs` are part of; with an id, that one with its
    evidence."""
    if not any(run.get("job") for run in runs):
        return []
    return [job for answer in ask_daemons("job_incidents", {"id": identity} if identity else None) for job in answer]


def _must_be_known(run: str | None, cases: list[dict[str, Any]]) -> None:
    """Raise ConfigError where no run has this name: a mistyped name must not look like a run without incidents."""
    if run is not None and not cases and (said := explain_unknown(run)):
        raise ConfigError(said)


def _print_undelivered(history: History) -> None:
    """Print on stderr what a daemon that has ended could not deliver."""
    for entry in list_undelivered(history.path):
        why = f" ({entry.trouble})" if entry.trouble else ""
        echo(f"sentinel: run {history.run}: {entry.alert} was not delivered to {entry.receiver}{why}", err=True)


def _text(case: dict[str, Any]) -> str:
    diagnosis = case["diagnosis"]
    lines = [
        f"{case['alert']}  {case['severity']}, {_state(case)}" + (" of its run" if case["state"] == UNRESOLVED else ""),
        f"  run         {case['run']} ({case['run_id']}), attempt {case['attempt']}",
        f"  fired       at step {case['step']}, {format_moment(case['time'])}",
        f"  first sign  at step {case['first_step']}",
        f"  what        {case['summary']}",
        f"  cause       {diagnosis['cause']} (confidence: {diagnosis['confidence']})",
    ]
    if case.get("parent"):
        lines.append(f"  follows     {case['parent']}: part of the same problem, with one page for both")
    facts = [fact for fact in diagnosis["evidence"] if not (case.get("stacks") and fact.startswith(FRAME_INDENT))]
    lines += [f"  evidence    {fact}" for fact in facts]
    lines += [f"  layer       {_layer(layer)}" for layer in case["layers"]]
    lines += [
        f"  member      {member['scope']} {member['name']}{_on_node(member)} since step {member['first_step']}"
        for member in case["members"]
        if member["scope"] != "run" or member.get("node")
    ]
    lines += [f"  to do       {diagnosis['remedy']}"] if diagnosis["remedy"] else []
    lines += [f"  confirm     {diagnosis['confirm']}"] if diagnosis.get("confirm") else []
    lines += [f"  missing     {missing}" for missing in diagnosis["missing"]]
    lines += [f"  to know     {diagnosis['command']}"] if diagnosis.get("command") else []
    lines += [f"  done        {done}" for done in case["done"]]
    if case.get("silenced"):
        lines.append(f"  silenced    by {case['silenced']}; see `sentinel silence --list`")
    if case["resolved_step"] is not None:
        lines.append(f"  over        at step {case['resolved_step']}{_remark(case)}")
    if case["runbook"]:
        lines.append(f"  runbook     sentinel explain {case['alert']}")
    title, *rows = lines
    return "\n".join([title, *(part for row in rows for part in wrap_text(row[:TEXT_COLUMN], row[TEXT_COLUMN:]))])


def _state(case: dict[str, Any]) -> str:
    return "silenced" if case["state"] == "firing" and case.get("silenced") else in_words(case["state"])


def _remark(case: dict[str, Any]) -> str:
    return f": {case['leaves']}" if case.get("leaves") else ""


def _on_node(member: dict[str, Any]) -> str:
    return f" on node {member['node']}" if member.get("node") else ""


def _layer(layer: dict[str, Any]) -> str:
    if layer["nonfinite"]:
        elements = "element" if layer["nonfinite"] == 1 else "elements"
        return f"{layer['name']}: {layer['nonfinite']} non-finite {elements} in one gradient"
    return f"{layer['name']}: gradient norm {layer['norm']:.4g}, usually {layer['usual']:.4g}"
