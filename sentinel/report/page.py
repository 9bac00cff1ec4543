"""The HTML of a report, which needs no other files. Everything that comes from a run is escaped."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

import msgspec

from sentinel.report import interactive
from sentinel.report.chart import Band, Drawn, Mark, Plot, chart, readable
from sentinel.report.content import Report, ReportPanel, find_unit
from sentinel.report.heatmap import heat_map
from sentinel.report.markup import escape
from sentinel.report.ranks import RankRow
from sentinel.text import format_count, format_duration, format_moment, in_words
from sentinel.web import charts as library

_FACTS = (
    "judged_as",
    "model",
    "parameters",
    "parameters_trainable",
    "total_steps",
    "optimizer",
    "dtypes",
    "devices",
    "scaler",
    "torch",
    "python",
)
_STYLES = 5
_SHOWN_CASES = 50
_RANKS = 64
"""Number of ranks above which the table of medians is folded; the matrix above it has those that differ most."""
GOODPUT = "time in steps that count"
"""Name of the goodput on the page."""
TITLES = {
    GOODPUT: " title='Of all the time since the first attach, what the steps that count take at the median time of a "
    "step. The rest: start, evaluations, checkpoints, stalls, restarts, steps that were undone or done again.'"
}
"""HTML attributes with the explanation of a figure whose name needs one."""
CHART_WIDTH = 480
"""Width of a chart in SVG units: two or three fit beside each other, and their words can be read on a phone."""


def page(reports: Sequence[Report], version: str) -> str:
    """Return the HTML file of one run, or of two side by side."""
    reports = tell_apart(reports)
    title = " against ".join(report.run for report in reports)
    scripts = [library.read_library(), library.SCRIPT, _DRAW] if library.is_present() else []
    return _PAGE.substitute(
        title=escape(title),
        body=body(reports),
        version=escape(version),
        style=library.read_style(),
        tools=library.TOOLS if scripts else "",
        scripts="".join(f"<script>{script}</script>" for script in scripts),
        policy=_write_policy(scripts),
    )


def _write_policy(scripts: Sequence[str]) -> str:
    """Return a policy that allows these scripts, by their hashes, and no others: none can come from a run."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"


def tell_apart(reports: Sequence[Report]) -> Sequence[Report]:
    """Number runs of the same name, as runs of one script are; the table has their ids."""
    names = [report.run for report in reports]
    if len(set(names)) == len(names):
        return reports
    return [msgspec.structs.replace(one, run=f"{one.run} ({at})") for at, one in enumerate(reports, 1)]


def body(reports: Sequence[Report], zoom: tuple[float, float] | None = None) -> str:
    """Return the content without the frame. `zoom`: steps shown in more detail."""
    first = reports[0]
    parts = [
        summary(reports),
        *(incidents(report, len(reports) > 1, report is first) for report in reports),
        *charts(reports, zoom),
        *(layers(report) for report in reports[:1]),
        *(ranks(report) for report in reports),
        *(devices(report) for report in reports),
        facts(reports),
    ]
    return "\n".join(parts)


def summary(reports: Sequence[Report]) -> str:
    """Return the summary table, with a column per run."""
    rows: list[tuple[str, list[str]]] = [
        ("id", [report.run_id for report in reports]),
        ("began", [_format_time(report.began) for report in reports]),
        ("lasted", [format_duration(report.seconds) for report in reports]),
        ("steps", [f"{report.first:,} to {report.last:,}" for report in reports]),
        ("attempts", [str(report.attempts) for report in reports]),
        ("loss, last 20 steps", [format_number(_find_final_loss(report)) for report in reports]),
        ("median step", [_unit(report.step_seconds, "seconds") for report in reports]),
        (GOODPUT, [f"{report.goodput:.0%}" if math.isfinite(report.goodput) else "-" for report in reports]),
        ("incidents", [_count_incidents(report) for report in reports]),
        ("rollbacks", [_undone(report) for report in reports]),
    ]
    if any(report.outcome for report in reports):
        rows.insert(3, ("outcome", [report.outcome or "not over" for report in reports]))
    if any(report.job for report in reports):
        rows.append(("job", ["; ".join(report.job) or "on one node" for report in reports]))
    head = "".join(f"<th>{escape(report.run)}</th>" for report in reports)
    lines = "".join(
        f"<tr{TITLES.get(name, '')}><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows
        if name != GOODPUT or set(cells) != {"-"}
    )
    return f"<table class='summary'><thead><tr><th></th>{head}</tr></thead><tbody>{lines}</tbody></table>"


def charts(reports: Sequence[Report], zoom: tuple[float, float] | None = None) -> list[str]:
    """Return the curves, with the incidents of the first run. `zoom`: steps shown in more detail."""
    span = (min(report.first for report in reports), max(report.last for report in reports))
    titles = list(dict.fromkeys(panel.title for report in reports for panel in report.panels))
    marks = [mark for report in reports[:1] for mark in _marks(report)]
    bands = [
        Band(undone.to, undone.at, f"rolled back from step {undone.at} to step {undone.to}")
        for undone in reports[0].rollbacks
    ]
    drawn = []
    for title in titles:
        panels = [next((p for p in report.panels if p.title == title), None) for report in reports]
        unit = next(panel.unit for panel in panels if panel is not None)
        plot = Plot(title, unit, _list_drawn(reports, panels), span, marks, bands, width=CHART_WIDTH)
        drawn.append(interactive.figure(plot, zoom) if library.is_present() else chart(plot))
    whose = f" of {escape(reports[0].run)}" if len(reports) > 1 else ""
    note = f"<p class='muted'>Numbered lines are incidents{whose}; shaded steps were rolled back.</p>"
    shared = f" {interactive.grid(span, marks, bands)}" if library.is_present() else ""
    missing = "" if library.is_present() else f"<p class='muted'>{library.MISSING}</p>"
    return [
        "<h2>Curves</h2>",
        missing,
        note if marks or bands else "",
        f'<div class="charts"{shared}>',
        *drawn,
        "</div>",
    ]


def _list_drawn(reports: Sequence[Report], panels: Sequence[ReportPanel | None]) -> list[Drawn]:
    """Return the lines of a chart: all of one run; of two, only the first of each, in its own colour and dash."""
    if len(reports) == 1:
        return [
            Drawn(line, line.name, at % _STYLES) for panel in panels if panel for at, line in enumerate(panel.lines)
        ]
    return [
        Drawn(panel.lines[0], f"{report.run}: {panel.lines[0].name}", at)
        for at, (report, panel) in enumerate(zip(reports, panels, strict=True))
        if panel is not None
    ]


def _marks(report: Report) -> list[Mark]:
    return [
        Mark(case["step"], str(number), case["severity"], f"{case['alert']} at step {case['step']}: {case['summary']}")
        for number, case in _list_shown(report)
    ]


def _list_shown(report: Report) -> list[tuple[int, dict[str, Any]]]:
    """Return (number, case) of the newest incidents, in the order in which they fired. The run's first is number 1."""
    return [*enumerate(report.incidents, 1)][-_SHOWN_CASES:]


def is_shown(report: Report, number: int) -> bool:
    """Whether the incident of this number is among those whose cases are shown."""
    return number > len(report.incidents) - _SHOWN_CASES


def incidents(report: Report, several: bool, marked: bool = True) -> str:
    """Return the cases, the newest first, each with its consequences.

    `several`: the headline has the run's name. `marked`: they are marked on the curves, which link to them.
    """
    title = f"Incidents of {report.run}" if several else "Incidents"
    if not report.incidents:
        return f"<h2>{escape(title)}</h2><p>None.</p>"
    shown = {case["id"]: (number, case) for number, case in _list_shown(report)}
    following: dict[str, list[str]] = {}
    for number, case in shown.values():
        if case.get("parent") in shown:
            following.setdefault(case["parent"], []).append(_case(number, case, marked))
    cases = "".join(
        _case(number, case, marked, following.get(identity, ()))
        for identity, (number, case) in reversed(shown.items())
        if case.get("parent") not in shown
    )
    hidden = len(report.incidents) - _SHOWN_CASES
    rest = f"<p>And {hidden} before these: sentinel incidents --run {escape(report.run_id)}</p>" if hidden > 0 else ""
    return f"<h2>{escape(title)}</h2>{cases}{rest}"


def _case(number: int, case: dict[str, Any], marked: bool, consequences: Sequence[str] = ()) -> str:
    diagnosis = case.get("diagnosis") or {}
    layers = [layer.get("name", "") for layer in case.get("layers", ())]
    rows = [
        ("since", f"step {case['first_step']}" + _describe_end(case)),
        ("when", _describe_time(case)),
        ("where", ", ".join(layers[:5]) or ", ".join(map(_describe_member, case.get("members", ())[:8]))),
        ("why", f"{diagnosis.get('cause', 'not known')} (confidence: {diagnosis.get('confidence', 'low')})"),
        ("evidence", "; ".join(diagnosis.get("evidence", ()))),
        ("missing", "; ".join(diagnosis.get("missing", ()))),
        ("to know", diagnosis.get("command", "")),
        ("do", diagnosis.get("remedy", "")),
        ("done", "; ".join(case.get("done", ()))),
    ]
    lines = "".join(f"<tr><th>{name}</th><td>{escape(str(text))}</td></tr>" for name, text in rows if text)
    stacks = "".join(
        f"<details><summary>stacks of rank {escape(str(rank))}</summary><pre>{escape(str(text))}</pre></details>"
        for rank, text in (case.get("stacks") or {}).items()
    )
    target = f" id='case-{number}' tabindex='-1'" if marked else ""
    state = escape(str(case["state"]))
    severity = case["severity"] if case["severity"] in ("critical", "warning", "info") else "info"
    return (
        f"<article class='case {severity}' data-state='{state}'{target}>"
        f"<h3><b>{number}</b> {escape(case['alert'])} "
        f"<small>{escape(case['severity'])}, {escape(in_words(str(case['state'])))}, step {case['step']}</small></h3>"
        f"<p>{escape(case['summary'])}</p><table>{lines}</table>{stacks}{_fold(consequences)}</article>"
    )


def _describe_member(member: Mapping[str, Any]) -> str:
    return f"{member['scope']} {member['name']}" + (f" on node {member['node']}" if member.get("node") else "")


def _fold(consequences: Sequence[str]) -> str:
    if not consequences:
        return ""
    count = format_count(len(consequences), "consequence")
    return f"<details><summary>{count}</summary>{''.join(consequences)}</details>"


def _describe_end(case: dict[str, Any]) -> str:
    if case.get("resolved_step") is None:
        return ""
    return f", over at step {case['resolved_step']}" + (f": {case['leaves']}" if case.get("leaves") else "")


def _describe_time(case: Mapping[str, Any]) -> str:
    """Return when a case fired, by the clock, and for how long."""
    fired, resolved = float(case["time"]), case.get("resolved_time")
    if not fired:
        return ""
    over = resolved if resolved is not None else time.time() if case["state"] == "firing" else None
    if over is None:
        return _format_time(fired)
    return f"{_format_time(fired)}, {'for' if resolved is not None else 'open for'} {format_duration(over - fired)}"


def _format_time(when: float) -> str:
    """Return date and time of day with the time zone: a report is read elsewhere, and a page through a tunnel."""
    return format_moment(when) + (time.strftime(" %Z", time.localtime(when)) if when else "")


def layers(report: Report) -> str:
    """Return the heat map of layers; "" if there is none."""
    if report.heat is None:
        return ""
    hidden = f" {report.heat.hidden} layers that moved less are left out." if report.heat.hidden else ""
    return (
        f"<h2>Gradient norm by layer</h2><p class='muted'>A row a tensor, a column a sampled step.{hidden}</p>"
        + heat_map(report.heat, "gradient norm of layers over steps")
    )


def ranks(report: Report) -> str:
    """Return the matrix and the medians of ranks, if there are several."""
    if len(report.ranks) < 2:
        return ""
    names = ("rank", "samples", "loss", "step time", "data wait", "resident set")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead>{''.join(_rank(row) for row in report.ranks)}</table>"
    many = len(report.ranks) > _RANKS
    medians = (
        f"<details><summary>Medians of {len(report.ranks)} ranks</summary>{table}</details>"
        if many
        else f"<p class='muted'>Medians.</p>{table}"
    )
    return f"<h2>Ranks of {escape(report.run)}</h2>{_matrix(report)}{medians}"


def _matrix(report: Report) -> str:
    """Return the heat map of each rank's own time; "" if there is none."""
    if report.matrix is None:
        return ""
    hidden = f" {report.matrix.hidden} ranks that differ less are left out." if report.matrix.hidden else ""
    note = "A row a rank: its step less its backward pass, in which all wait for the slowest."
    return f"<p class='muted'>{note}{hidden}</p>{heat_map(report.matrix, 'time of each rank for itself, over steps')}"


def _rank(row: RankRow) -> str:
    cells = (
        str(row.rank),
        f"{row.samples:,}",
        format_number(row.loss),
        _unit(row.step_seconds, "seconds"),
        _unit(row.data_seconds, "seconds"),
        _unit(row.rss_bytes, "bytes"),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def devices(report: Report, when: str = "highest") -> str:
    """Return the table of devices: a row per signal, a column per device."""
    if not report.devices:
        return ""
    names = "".join(f"<th>{escape(name)}</th>" for name, _ in report.devices)
    rows = "".join(
        f"<tr><td>{escape(signal)}</td>"
        + "".join(f"<td>{_reading(signal, values)}</td>" for _, values in report.devices)
        + "</tr>"
        for signal in dict.fromkeys(signal for _, values in report.devices for signal in values)
    )
    head = f"<tr><th>{when}</th>{names}</tr>"
    return f"<h2>GPUs of {escape(report.run)}</h2><table class='names'><thead>{head}</thead>{rows}</table>"


def _reading(signal: str, values: Mapping[str, float]) -> str:
    if signal not in values:
        return "-"
    unit = find_unit(signal)
    return f"{values[signal]:.0%}" if unit == "ratio" else escape(readable(values[signal], unit))


def facts(reports: Sequence[Report]) -> str:
    """Return the table of the runs' facts, with a column per run; with two, differences are bold."""
    rows = []
    for name in _FACTS:
        said = [_plain(report.facts.get(name)) for report in reports]
        if any(said):
            mark = "b" if len(set(said)) > 1 else "span"
            rows.append(
                f"<tr><th>{name}</th>{''.join(f'<td><{mark}>{escape(word)}</{mark}></td>' for word in said)}</tr>"
            )
    head = "".join(f"<th>{escape(report.run)}</th>" for report in reports)
    titles = f"<thead><tr><th></th>{head}</tr></thead>" if len(reports) > 1 else ""
    return f"<h2>What was trained</h2><table>{titles}{''.join(rows)}</table>" if rows else ""


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _count_incidents(report: Report) -> str:
    severe = sum(case["severity"] == "critical" for case in report.incidents)
    return f"{len(report.incidents)}, {severe} critical" if report.incidents else "none"


def _undone(report: Report) -> str:
    return ", ".join(f"{undone.at} to {undone.to}" for undone in report.rollbacks) or "none"


def _find_final_loss(report: Report) -> float | None:
    return report.final_loss if list_values(report, "loss") else None


def list_values(report: Report, signal: str) -> Sequence[float]:
    """Return the values of a signal at the steps that are shown; none if it was not reported."""
    return next((line.values for p in report.panels for line in p.lines if line.name == signal), ())


def _unit(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    words = readable(value, unit)
    return f"{words} s" if unit == "seconds" and not words.endswith("ms") else words


def format_number(value: float | None) -> str:
    """Return a number with four digits; a dash for None, which was not reported."""
    return "-" if value is None else f"{value:.4g}" if math.isfinite(value) else "not finite"


_DRAW = "drawCharts(document.querySelector('main'));"
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title: Sentinel report</title>
<style>
$style</style>
</head>
<body>
<h1>$title</h1>
$tools
<main>
$body
</main>
<p class="muted">Sentinel $version. This file needs no network.</p>
$scripts
</body>
</html>
""")
