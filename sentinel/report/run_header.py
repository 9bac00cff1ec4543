"""The first lines of the live page: whether the run goes on, where it is, and the worst of its open incidents."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sentinel.diagnose import folding
from sentinel.report.content import Report
from sentinel.report.markup import escape
from sentinel.report.outcomes import list_severities
from sentinel.report.page import GOODPUT, TITLES, format_number, is_shown, list_values
from sentinel.report.ranks import median
from sentinel.runs import snapshot_age
from sentinel.text import UNRESOLVED, format_count, format_duration, name_ranks

_OPEN = ("firing", UNRESOLVED)
_RECENT = 20
"""Number of last steps from which the present speed is taken."""


def run_header(report: Report, status: Mapping[str, Any]) -> str:
    """Return HTML. `status`: the run's part of the API's status; for a run read from its history, without ranks."""
    state, said = _describe_state(report, status["ranks"])
    cases = [case for case in report.incidents if case["state"] in _OPEN]
    total = report.facts.get("total_steps")
    figures = {
        "step": f"{status['step']:,}",
        "loss": format_number(_find_loss(report, status)),
        "steps/s": _format_speed(report, state),
        "elapsed": format_duration(report.seconds),
    }
    if math.isfinite(report.goodput):
        figures[GOODPUT] = f"{report.goodput:.0%}"
    if total:
        done = status["step"] + 1
        figures["done"] = f"{done:,} of {total:,}"
        if state != "ended":
            figures["left"] = _format_rest(report, total - done)
    cells = "".join(
        f"<div{TITLES.get(name, '')}><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in figures.items()
    )
    snapshot = snapshot_age.in_words(status["rollback"])
    marked = f"({len(cases)}!) {report.run}" if cases else report.run
    return (
        f'<header data-id="{escape(shlex.quote(report.run_id))}" data-state="{state}" data-title="{escape(marked)}">'
        f'<h1>{escape(report.run)} <span class="state {state}">{escape(said)}</span></h1><dl>{cells}</dl>'
        f"{_describe_open(report, cases, state)}{f'<p>{escape(snapshot)}</p>' if snapshot else ''}"
        f"{_describe_end(report) if state == 'ended' else ''}</header>"
    )


def _describe_state(report: Report, ranks: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the state of a run as one word, and in words."""
    states = {str(rank["state"]) for rank in ranks}
    if states <= {"gone"}:
        outcome = "ended" if report.outcome in ("", "ended") else f"{report.outcome}; last seen"
        return "ended", f"{outcome} at {_format_end(report)}"
    if states <= {"gone", "lost"}:
        return "lost", f"no rank is connected since {_format_end(report)}"
    for state in ("lost", "silent"):
        odd = [int(rank["rank"]) for rank in ranks if rank["state"] == state]
        if odd:
            return state, f"{name_ranks(odd)} {state}"
    stalls = [rank["stall"] for rank in ranks if rank["state"] == "stalled"]
    if stalls:
        stall = max(stalls, key=lambda stall: float(stall["seconds"]))
        return "stalled", f"stalled for {stall['seconds']:.0f} s" + (f" at {stall['at']}" if stall["at"] else "")
    return "running", "running"


def _format_end(report: Report) -> str:
    """Return the time of day of a run's end, with the time zone; with the date if it was another day."""
    end = datetime.datetime.fromtimestamp(report.began + report.seconds).astimezone()
    return end.strftime("%H:%M:%S %Z" if end.date() == datetime.date.today() else "%Y-%m-%d %H:%M:%S %Z")


def _find_loss(report: Report, status: Mapping[str, Any]) -> float | None:
    """Return the newest loss; None without one. The status has only the last steps, which may not have sampled it."""
    loss = status.get("values", {}).get("loss", next(reversed(list_values(report, "loss")), None))
    return None if loss is None else float(loss)


def _format_speed(report: Report, state: str) -> str:
    """Return the steps per second, of the last steps, or of all steps of a run that has ended."""
    if state == "stalled":
        return "0"
    recent = median(list_values(report, "step_seconds")[-_RECENT:])
    seconds = report.step_seconds if state == "ended" else recent
    speed = 1 / seconds if seconds > 0 else math.nan
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}" if speed > 0 else "-"


def _format_rest(report: Report, steps: int) -> str:
    """Return how long this many steps take at the speed of the last ones."""
    seconds = median(list_values(report, "step_seconds")[-_RECENT:]) * max(steps, 0)
    return format_duration(seconds) if math.isfinite(seconds) else "-"


def _describe_open(report: Report, cases: Sequence[Mapping[str, Any]], state: str) -> str:
    when = " at the end" if state == "ended" else ""
    if not cases:
        return f"<p>No incident {'was' if when else 'is'} open{when}.</p>"
    worst = folding.find_worst(list_severities(sorted(cases, key=lambda case: float(case["time"]))))
    number, origin = next((at, case) for at, case in enumerate(report.incidents, 1) if case["id"] == worst.id)
    words = f"{origin['alert']}, {worst.severity}, step {origin['step']}"
    link = f'<a href="#case-{number}">{escape(words)}</a>' if is_shown(report, number) else escape(words)
    which = "" if len(cases) == 1 else "the worst is "
    return f'<p class="alarm">{format_count(len(cases), "incident")} open{when}: {which}{link}</p>'


def _describe_end(report: Report) -> str:
    run = escape(shlex.quote(report.run_id))
    return (
        f"<p>All of it stays in its history: <code>sentinel page {run}</code>, "
        f"or as one file <code>sentinel report {run}</code>.</p>"
    )
