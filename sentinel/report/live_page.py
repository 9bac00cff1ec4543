"""The part of the live page that changes: one run's curves, incidents, layers, ranks, GPUs and rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sentinel.report.content import Report
from sentinel.report.page import charts, devices, incidents, layers, ranks, summary

_ORDER = ("firing", "pending", "nonfinite", "warming", "no data", "not applicable", "inactive")
_MARKS = {"live": ("o", "live"), "silent": ("s", "silent"), "lost": ("X", "lost"), "gone": ("-", "gone")}


def fragment(report: Report | None, status: Mapping[str, Any], runs: Sequence[tuple[str, str]]) -> str:
    """HTML of one run, with a button for each of `runs` (id, name). `status`: the run's, as the API has it."""
    if report is None:
        return "<h1>Sentinel</h1><p>No run is watched.</p>"
    buttons = "".join(
        f'<button type="button" data-run="{escape(run_id)}"{" aria-current=true" if run_id == report.run_id else ""}>'
        f"{escape(name)}</button>"
        for run_id, name in runs
    )
    opened = status["open_incidents"]
    state = (
        f'<p class="alarm">{opened} incident{"s" * (opened != 1)} open</p>' if opened else "<p>No incident is open.</p>"
    )
    parts = [
        f'<nav aria-label="runs">{buttons}</nav>' if len(runs) > 1 else "",
        f"<h1>{escape(report.run)}, step {status['step']:,}</h1>",
        state,
        _matrix(status["ranks"]),
        *charts([report]),
        incidents(report, False),
        layers(report),
        ranks(report),
        devices(report),
        _rules(status["rules"]),
        summary([report]),
    ]
    return "\n".join(filter(None, parts))


def _matrix(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A cell a rank: its state as a letter, too, so that it reads without colour."""
    if len(ranks) < 2:
        return ""
    cells = "".join(
        f'<span class="rank {word}" title="rank {rank["rank"]}: {word}, step {rank["step"]}">{letter}</span>'
        for rank in ranks
        for letter, word in [_MARKS.get(rank["state"], ("?", "unknown"))]
    )
    return f'<h2>Ranks</h2><p class="matrix">{cells}</p><p class="muted">o live, s silent, X lost, - gone</p>'


def _rules(rules: Sequence[Mapping[str, Any]]) -> str:
    rows = sorted(rules, key=lambda rule: (_ORDER.index(rule["state"]) if rule["state"] in _ORDER else 9, rule["rule"]))
    cells = "".join(
        f"<tr><td>{escape(rule['rule'])}</td><td>{escape(str(rule['entity'][1]))}</td><td>{escape(rule['state'])}</td>"
        f"<td>{escape(_values(rule))}</td></tr>"
        for rule in rows[:400]
    )
    head = "<tr><th>rule</th><th>of</th><th>state</th><th>numbers</th></tr>"
    return f"<h2>Rules</h2><table><thead>{head}</thead>{cells}</table>" if rows else ""


def _values(rule: Mapping[str, Any]) -> str:
    if rule["lacking"]:
        return "no " + ", ".join(rule["lacking"])
    return ", ".join(f"{name} {value:.4g}" for name, value in list(rule["values"].items())[:4])
