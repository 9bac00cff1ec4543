"""The page's start view: all runs, the live ones first, then the newest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sentinel.report.markup import escape
from sentinel.report.outcomes import describe_found, name_start, name_took
from sentinel.report.page import format_number
from sentinel.text import format_count, name_worst

_LIVE = ("running", "stalled")
_COLUMNS = ("", "run", "state", "step", "loss", "incidents", "began", "took")


def run_list(rows: Sequence[dict[str, Any]], hidden: int, damaged: Sequence[str]) -> str:
    """Return HTML. `rows`: as in `sentinel last --json`. `hidden`: number of older runs that are left out. `damaged`:
    why histories could not be read."""
    live = sum(row["state"] in _LIVE for row in rows)
    ordered = sorted(rows, key=lambda row: (row["state"] in _LIVE, row["began"] or 0.0), reverse=True)
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    older = f"<p>And {hidden:,} older ones: <code>sentinel last --since 30d</code></p>" if hidden else ""
    troubles = "".join(f"<p class='alarm'>{escape(trouble)}</p>" for trouble in damaged)
    if not rows:
        return f"<header><h1>Runs</h1><p>No run is watched or kept on this node.</p></header>{troubles}"
    return (
        f"<header data-title='Sentinel: {live} live'><h1>Runs</h1><p>{format_count(len(rows), 'run')}, {live} live. "
        "<a id='compare'>Compare</a> <span class='muted'>two: tick them.</span></p></header>"
        f"<table class='runs'><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, ordered))}</tbody></table>"
        f"{older}{troubles}"
    )


def _row(row: dict[str, Any]) -> str:
    name, identity, outcome = escape(row["run"]), escape(row["run_id"]), escape(row["outcome"])
    worst = row["worst"]["severity"] if row["worst"] else ""
    alert = name_worst(row["worst"]["alert"], row["worst"]["step"], grew=row["worst"]["grew"]) if row["worst"] else ""
    found = describe_found(row) if row["incidents"] or not row["open"] else f"{row['open']} open"
    cells = (
        f"<input type='checkbox' data-pick='{identity}' aria-label='compare {name}'>",
        f"<a data-run='{identity}'>{name}</a> <small>{identity if identity != name else ''}</small>",
        f"<span class='state {escape(row['state'])}' title='{outcome}'>{outcome}</span>",
        "-" if row["step"] is None else f"{row['step']:,}",
        format_number(row["loss"]),
        f"<span class='{escape(worst)}' title='{escape(alert)}'>{escape(found)}</span>",
        name_start(row),
        name_took(row),
    )
    shown = "".join(f"<td data-name='{name}'>{cell}</td>" for name, cell in zip(_COLUMNS, cells, strict=True))
    return f"<tr>{shown}</tr>"
