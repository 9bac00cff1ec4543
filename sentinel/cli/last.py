"""`sentinel last`: what came of the last runs, the worst first; and of one of them."""

from __future__ import annotations

import datetime
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
import msgspec

from sentinel.cli.client import list_runs
from sentinel.cli.history import explain_unknown, list_kept
from sentinel.cli.incidents import format_incidents
from sentinel.cli.options import json_option, parse_duration
from sentinel.cli.plain import echo
from sentinel.errors import ConfigError
from sentinel.store import History
from sentinel.store.retention import StoredHistory
from sentinel.supervise.telling import ending
from sentinel.text import UNRESOLVED, close_run, describe_incidents, format_count, format_duration, rank_severity
from sentinel.web import json

LOSS_STEPS = 64
"""The last of a run, in which its loss is looked for."""
OUTCOME_LETTERS = 40
_FAILED, _UNKNOWN = "failed", "unknown"


@click.command()
@click.argument("run", required=False)
@click.option(
    "--since", metavar="DURATION", callback=parse_duration, help="How far back: 12h, 7d. [default: since yesterday]"
)
@json_option()
@click.pass_context
def last(ctx: click.Context, run: str | None, since: float | None, as_json: bool) -> None:
    """Say what came of the last runs, live ones with them, the worst first: start, duration, outcome with the exit
    status or signal where it is known, last step, loss, incidents. With RUN (a name or an id): of its newest run, with
    its incidents.

    `sentinel history` lists what is kept of all runs, to export and delete it; `sentinel incidents` the incidents.

    Exit code 0, whatever came of them; 1: a history is damaged; 2: there is no run of that name.

    \b
    Example:  sentinel last
              sentinel last train_gpt
              sentinel last --since 7d --json
    """
    rows, cases, damaged = collect_outcomes(run, since)
    chosen = [max(rows, key=lambda row: row["began"] or 0.0)] if run is not None else rows
    if as_json:
        echo(json.text([row | {"cases": cases[row["run_id"]]} for row in chosen] if run is not None else rows))
    elif run is not None:
        echo(_closing(chosen[0]))
        if cases[chosen[0]["run_id"]]:
            echo(format_incidents(cases[chosen[0]["run_id"]], ""))
    else:
        when = "since yesterday" if since is None else f"in the last {format_duration(since)}"
        echo("\n".join(_format_rows(rows)) if rows else f"No run {when}.")
    for trouble in damaged:
        echo(f"sentinel: {trouble}", err=True)
    ctx.exit(1 if damaged else 0)


def collect_outcomes(
    run: str | None, since: float | None
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]], list[str]]:
    """What came of the runs that were written to in the last `since` seconds, or since yesterday; of one at any time.
    The worst first; with their incidents, by run id, and what is wrong with histories that cannot be read.

    Raises ConfigError where there is no run of that name.
    """
    live = {one["run_id"]: one for one in list_runs()}
    begin = 0.0 if run is not None and since is None else _yesterday() if since is None else time.time() - since
    rows, cases, damaged = list[dict[str, Any]](), dict[str, list[dict[str, Any]]](), list[str]()
    for one in (one for one in list_kept() if one.modified >= begin):
        try:
            with History(one.path) as kept:
                if run not in (None, kept.run, kept.run_id):
                    continue
                cases[kept.run_id] = kept.incidents() if kept.run_id in live else kept.final_incidents()
                rows.append(_row(kept, one, cases[kept.run_id], live.get(kept.run_id)))
        except ConfigError as error:
            damaged.append(str(error))
    if run is not None and not rows:
        raise ConfigError(explain_unknown(run) or f"no history of {run} in that time")
    return sorted(rows, key=_badness, reverse=True), cases, damaged


def _yesterday() -> float:
    """Its first moment."""
    today = datetime.datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)
    return (today - datetime.timedelta(days=1)).timestamp()


class _Ended(msgspec.Struct):
    """What is relied upon of the event of a process that ended."""

    status: int


class _Outcome(NamedTuple):
    state: str
    """`running`, `stalled`, `ended`, `stopped`, `failed` or `unknown`."""
    words: str
    status: int | None = None
    """The exit status as `subprocess` has it, a signal negative; None: not known."""


def _row(
    kept: History, stored: StoredHistory, cases: Sequence[dict[str, Any]], live: dict[str, Any] | None
) -> dict[str, Any]:
    """`live`: the run in a daemon's status, where one watches it."""
    attempts = kept.attempts()
    number, ended = (attempts[-1][0], attempts[-1][2]) if attempts else (0, None)
    began = _find_start(kept, *attempts[0][:2]) if attempts else None
    seq = kept.last_seq(number)
    step, loss = (seq + kept.step_offset(number) if seq >= 0 else None), _find_loss(kept, number, seq)
    outcome, until = _find_outcome(kept, number, cases), ended or stored.modified
    if live is not None:
        outcome, until = _describe_live(live), time.time()
        step, loss = live["step"] if live["step"] >= 0 else None, live["values"].get("loss", loss)
    worst = max(cases, key=lambda case: rank_severity(case["severity"]), default=None)
    return {
        "run": kept.run, "run_id": kept.run_id, "state": outcome.state, "outcome": outcome.words,
        "status": outcome.status, "began": began,
        "seconds": max(until - began, 0.0) if began else None, "attempts": len(attempts), "step": step, "loss": loss,
        "incidents": dict(Counter(case["severity"] for case in cases)),
        "open": sum(case["state"] in ("firing", UNRESOLVED) for case in cases),
        "worst": {key: worst[key] for key in ("id", "alert", "severity", "state", "step")} if worst else None,
        "snapshot": _find_snapshot(kept, number), "file": str(stored.path),
    }  # fmt: skip


def _find_start(kept: History, attempt: int, began: float) -> float:
    """Of a run whose daemon came late, when its first step ended."""
    first = next(kept.rows(attempt=attempt), None)
    return min(began, first[1]) if first is not None else began


def _find_loss(kept: History, attempt: int, last: int) -> float | None:
    found = [step.run["loss"] for step in kept.steps(attempt=attempt, after=last - LOSS_STEPS) if "loss" in step.run]
    return found[-1] if found else None


def _find_snapshot(kept: History, attempt: int) -> int | None:
    """The user's step of the newest snapshot on disk that no rollback made void."""
    newest: int | None = None
    for event in kept.events():
        if event.attempt != attempt:
            continue
        if event.kind == "snapshot on disk":
            newest = event.seq
        elif event.kind == "rollback" and event.detail.get("ok") and newest is not None and newest > event.detail["to"]:
            newest = None
    return newest + kept.step_offset(attempt) if newest is not None else None


def _describe_live(live: dict[str, Any]) -> _Outcome:
    standing = max((rank["stall"]["seconds"] for rank in live["ranks"] if rank["state"] == "stalled"), default=None)
    if standing is not None:
        return _Outcome("stalled", f"stalled for {format_duration(standing)}")
    return _Outcome("running", "running")


def _find_outcome(kept: History, attempt: int, cases: Sequence[dict[str, Any]]) -> _Outcome:
    """Of a run that nobody watches any more: by what its ranks said at their end, and what was seen of theirs."""
    ends, wanted = dict[int, dict[str, Any]](), 0
    statuses, of_command = dict[int, int](), None
    for event in kept.events():
        if event.attempt != attempt:
            continue
        rank = event.detail.get("rank", 0)
        if event.kind == "hello":
            ends.pop(rank, None)
            statuses.pop(rank, None)
        elif event.kind in ("goodbye", "lost"):
            ends[rank] = event.detail | {"kind": event.kind}
        elif event.kind == "process ended":
            statuses[rank] = msgspec.convert(event.detail, _Ended).status
        elif event.kind == "command ended":
            of_command = msgspec.convert(event.detail, _Ended).status
        elif event.kind == "end wanted":
            wanted = event.detail.get("signal", 0)
    ranks = len(kept.ranks(attempt))
    status = of_command if of_command is not None else _combine_statuses(statuses, ranks)
    lost = [case["diagnosis"]["cause"] for case in cases if case["alert"] == "RankLost"]
    outcome = _judge_ends(ends, ranks, status, wanted, lost[-1] if lost else "")
    said = outcome.state == "ended" or (lost and status in statuses.values())
    words = outcome.words if status is None or said else f"{outcome.words} ({ending(status)})"
    return outcome._replace(words=words, status=status)


def _combine_statuses(statuses: dict[int, int], ranks: int) -> int | None:
    """Of the ranks' processes, in order of time: the first that is not 0; 0 where all have it."""
    return next(filter(None, statuses.values()), 0 if len(statuses) == ranks > 0 else None)


def _judge_ends(ends: dict[int, dict[str, Any]], ranks: int, status: int | None, wanted: int, lost: str) -> _Outcome:
    """`ends`: by rank, in order of time. `wanted`: the signal that was to end the run; 0: none. `lost`: why a rank
    was, as its alert says."""
    by_signal = wanted in signal.valid_signals()
    for end in ends.values():  # the others may have ended because of the first
        if end["kind"] == "lost":
            if by_signal:
                return _Outcome("ended", f"ended by {signal.Signals(wanted).name}")
            return _Outcome(_FAILED, f"failed: {lost or 'its connection was lost'}")
        if end["reason"] == "exception":
            return _Outcome(_FAILED, f"failed: {end.get('detail') or 'an exception'}")
        if end["reason"] == "stopped":
            return _Outcome("stopped", f"stopped by Sentinel: {end.get('detail', '')}".rstrip(": "))
    if status and by_signal:
        return _Outcome("ended", f"ended by {signal.Signals(wanted).name}")
    if len(ends) == ranks > 0:
        return _Outcome(_FAILED, "failed") if status else _Outcome("ended", "ended")
    return _Outcome(_UNKNOWN, "not known: its daemon did not see its end")


def _badness(row: dict[str, Any]) -> tuple[int, float]:
    """Higher is worse: open and critical first, then what failed."""
    worst = rank_severity(row["worst"]["severity"]) if row["worst"] else 0
    failed = rank_severity("critical") if row["state"] in (_FAILED, "stopped", "stalled") else 0
    return 2 * max(worst, failed) + bool(row["open"]), row["began"] or 0.0


def _closing(row: dict[str, Any]) -> str:
    reached = f"at step {row['step']:,}" if row["step"] is not None else "without a step"
    found = _describe_found(row) + (
        "" if row["snapshot"] is None else f"; newest snapshot on disk: step {row['snapshot']:,}"
    )
    if row["loss"] is not None:
        found += f"; loss {row['loss']:.4g}"
    how = "" if row["state"] == "ended" and row["outcome"] == "ended" else row["outcome"]
    if row["state"] in ("running", "stalled"):
        return f"run {row['run']!r} is {how}, {reached}, for {_took(row)}: {found}"
    return f"{_start(row)}  " + close_run(row["run"], "", reached, seconds=row["seconds"] or 0.0, how=how, found=found)


def _describe_found(row: dict[str, Any]) -> str:
    worst = f"{row['worst']['alert']} at step {row['worst']['step']:,}" if row["worst"] else ""
    return describe_incidents(row["incidents"], worst)


def _start(row: dict[str, Any]) -> str:
    if row["began"] is None:
        return "-"
    began = datetime.datetime.fromtimestamp(row["began"])
    return began.strftime("%H:%M" if began.date() == datetime.date.today() else "%b %d %H:%M")


def _took(row: dict[str, Any]) -> str:
    return format_duration(row["seconds"]) if row["seconds"] is not None else "-"


def _format_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line each, the incidents at its end: they are what a narrow terminal cuts."""
    table = [("run", "started", "took", "outcome", "step", "loss", "incidents")]
    for row in rows:
        step = "-" if row["step"] is None else f"{row['step']:,}"
        loss = "-" if row["loss"] is None else f"{row['loss']:.4g}"
        outcome = row["outcome"]
        if len(outcome) > OUTCOME_LETTERS:
            outcome = outcome[: OUTCOME_LETTERS - 3] + "..."
        table.append((row["run_id"], _start(row), _took(row), outcome, step, loss, _describe_found(row)))
    wide = [max(len(line[column]) for line in table) for column in range(6)]
    right = {4, 5}
    cells = [
        [text.rjust(w) if at in right else text.ljust(w) for at, (text, w) in enumerate(zip(line, wide, strict=False))]
        for line in table
    ]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    lines = [f"{'  '.join(cell)}  {line[-1]}"[:columns].rstrip() for cell, line in zip(cells, table, strict=True)]
    return [*lines, f"{format_count(len(rows), 'run')}; of one: sentinel last RUN"]
