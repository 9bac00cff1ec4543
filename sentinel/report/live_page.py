"""The part of the live page that changes: one run's curves, incidents, layers, ranks, GPUs and rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sentinel.engine.judging.judgement import STATES
from sentinel.errors import ConfigError
from sentinel.report.content import Report
from sentinel.report.markup import escape
from sentinel.report.page import body, charts, devices, facts, incidents, layers, ranks, summary, tell_apart
from sentinel.report.run_header import run_header
from sentinel.runs import RANK_MARKS
from sentinel.text import describe_node_state, format_count, name_ranks

_ROWS = 400
"""Most rows of the table of rules: those that need attention come first."""
_APART = frozenset({"firing", "pending", "nonfinite"})
"""States in which each entity has a row of its own."""


def fragment(report: Report, status: Mapping[str, Any], gpus: str = "now") -> str:
    """Return the HTML of one run. `status`: the run's part of the API's status. `gpus`: what its readings are."""
    shown = {
        "curves": "".join(charts([report])),
        "incidents": incidents(report, False),
        "layers": layers(report)
        or _nothing("Gradient norm by layer", "No statistics of layers yet: they are sampled."),
        "ranks": _nodes(status.get("job")) + _states(status["ranks"]) + ranks(report),
        "gpus": devices(report, gpus)
        or _nothing("GPUs", "None is read: the run trains on a CPU, or the driver is silent."),
        "rules": _rules(status["rules"]),
        "run": f"<h2>About</h2>{summary([report])}{facts([report])}",
    }
    views = [f'<section data-view="{name}">{content}</section>' for name, content in shown.items()]
    return "\n".join([run_header(report, status), *views])


def whole(reports: Sequence[Report], zoom: tuple[float, float] | None = None) -> str:
    """Return the HTML of a run's whole history, or of two side by side. `zoom`: steps shown in more detail."""
    names = " against ".join(report.run for report in tell_apart(reports))
    heading = "<h1>Runs side by side</h1>" if len(reports) > 1 else ""
    return f"<header data-title='{escape(names)}'>{heading}</header>{body(tell_apart(reports), zoom)}"


def trouble(error: ConfigError) -> str:
    """Return HTML that replaces what cannot be read."""
    return f"<p class='alarm'>{escape(str(error))}</p>"


def _nothing(title: str, why: str) -> str:
    return f"<h2>{title}</h2><p class='muted'>{why}</p>"


def _nodes(job: Mapping[str, Any] | None) -> str:
    """Return the table of the job's nodes, silent ones first."""
    if job is None:
        return ""
    stale = job["view"] in ("local view", "alone")
    absence = escape(job.get("absence") or "the coordinator is not heard")  # an earlier version has no `absence`
    missing = job["expected"] - len(job["nodes"])
    notes = [f"{absence[0].upper()}{absence[1:]}: what other nodes do is not known."] if stale else []
    notes += [f"{missing} of {format_count(job['expected'], 'node')} not heard yet."] if missing > 0 else []
    notes += [f"{escape(job['shrunk'])}."] if job.get("shrunk") else []
    order = sorted(job["nodes"], key=lambda node: (node["state"] != "silent", node["node"]))
    rows = "".join(_node(node, job, stale and node["node"] != job["node"]) for node in order)
    head = "<tr><th>node</th><th>host</th><th>state</th><th>step</th><th>ranks</th><th>incidents</th></tr>"
    words = "".join(f"<p class='alarm'>{note}</p>" for note in notes)
    return f"<h2>Nodes</h2>{words}<table class='names'><thead>{head}</thead>{rows}</table>"


def _node(node: Mapping[str, Any], job: Mapping[str, Any], unknown: bool) -> str:
    """Return a node's row of the table. `unknown`: its state is that of when it was last heard."""
    ranks = name_ranks(sorted(map(int, node["ranks"]))) if node["ranks"] else ""
    count = job.get("blame", {}).get(str(node["node"]), 0)
    blame = f"{count} of {job['blamed_incidents']}" if count else ""
    shown = describe_node_state(node, stale=unknown)
    cells = (str(node["node"]), node["hostname"], shown, f"{node['step']:,}", ranks, blame)
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"


def _states(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return the states of ranks: one letter per rank, readable without colour, and one line per node.

    Empty for a run read from its history, which has no connected ranks.
    """
    if not ranks:
        return ""
    nodes = itertools.groupby(ranks, lambda rank: (rank.get("node", 0), rank.get("hostname", "")))
    lines = [(f"node {node}" + (f" ({host})" if host else ""), _letters(own)) for (node, host), own in nodes]
    said = lines if len(lines) > 1 else [("", letters) for _, letters in lines]
    rows = "".join(
        f'<p class="matrix">{f"<span>{escape(place)}</span> " if place else ""}{letters}</p>' for place, letters in said
    )
    legend = ", ".join(f"{letter} {word}" for word, letter in RANK_MARKS.items())
    return f'<h2>State of ranks</h2><div class="nodes">{rows}</div><p class="muted">{legend}</p>'


def _letters(ranks: Iterable[Mapping[str, Any]]) -> str:
    return "".join(
        f'<span class="rank {word}" title="rank {rank["rank"]}: {word}, step {rank["step"]}">{RANK_MARKS[word]}</span>'
        for rank in ranks
        for word in [str(rank["state"])]
    )


def _rules(rules: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of rules: a row per entity for those in `_APART`; otherwise entities in the same state share a
    row."""
    if not rules:
        return _nothing("Rules", "They are judged while the run goes on.")
    alike: dict[tuple[int, str, str, Any], list[Mapping[str, Any]]] = {}
    for rule in rules:
        order = STATES.index(rule["state"]) if rule["state"] in STATES else len(STATES)  # from another version's daemon
        apart = rule["entity"][1] if rule["state"] in _APART else None
        alike.setdefault((order, rule["rule"], rule["entity"][0], apart), []).append(rule)
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_entities(several))}</td><td>{escape(several[0]['state'])}</td>"
        f"<td>{escape(_values(several))}</td></tr>"
        for (_, name, _, _), several in sorted(alike.items(), key=lambda one: one[0][:2])[:_ROWS]
    )
    hidden = len(alike) - _ROWS
    rest = f"<p>And {hidden:,} more rows: <code>sentinel rules status</code></p>" if hidden > 0 else ""
    head = "<tr><th>rule</th><th>of</th><th>state</th><th>numbers</th></tr>"
    reload = '<button type="button" id="reload">Read the rule files again</button>'
    return f"<h2>Rules</h2>{reload}<table class='names'><thead>{head}</thead>{cells}</table>{rest}"


def _entities(rules: Sequence[Mapping[str, Any]]) -> str:
    scope, name = rules[0]["entity"]
    if len(rules) > 1:
        return f"{len(rules):,} {scope}s"
    return "run" if scope == "run" else f"{scope} {name}"


def _values(rules: Sequence[Mapping[str, Any]]) -> str:
    """Return the first four values in words; for several entities, from the lowest to the highest."""
    if rules[0]["lacking"]:
        return "no " + ", ".join(rules[0]["lacking"])
    said = []
    for name in list(rules[0]["values"])[:4]:
        values = [rule["values"][name] for rule in rules if name in rule["values"]]
        low, high = f"{min(values):.4g}", f"{max(values):.4g}"
        said.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    return ", ".join(said)
