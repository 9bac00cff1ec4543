"""Writes the demo's files: a picture of the curves, and an offline page with the curves and Sentinel's output."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from sentinel.demo.outcome import DemoOutcome
from sentinel.report.chart import chart, picture
from sentinel.web.charts import STYLE


def draw_picture(outcome: DemoOutcome, path: Path) -> None:
    """Write an SVG file with all curves below each other."""
    path.write_text(picture(outcome.title, outcome.setting, outcome.plots), encoding="utf-8")


def write_page(outcome: DemoOutcome, alert_text: str, path: Path) -> None:
    """Write an HTML file. `alert_text`: what the training terminal showed."""
    texts = {
        "title": outcome.title, "setting": outcome.setting, "verdict": outcome.verdict, "alert": alert_text,
        "run": outcome.run_id, "versions": outcome.versions, "show": outcome.show,
    }  # fmt: skip
    text = _PAGE.substitute(
        {name: escape(text) for name, text in texts.items()},
        head=_write_row("th", "", *(name for name, _ in outcome.columns)),
        rows="\n".join(_write_row("td", *cells) for cells in outcome.rows),
        charts="\n".join(map(chart, outcome.plots)),
        style=STYLE,
    )
    path.write_text(text, encoding="utf-8")


def _write_row(tag: str, what: str, *cells: str) -> str:
    return f"<tr><th>{escape(what)}</th>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Sentinel demo: $title</title>
<style>
$style</style>
</head>
<body>
<h1>$title</h1>
<p class="muted">$setting</p>
<p>$verdict</p>
<table>
<thead>$head</thead>
<tbody>
$rows
</tbody>
</table>
$charts
<h2>What the training terminal showed</h2>
<pre>$alert</pre>
<p class="muted">Run <code>$run</code>, $versions. The whole incident: <code>$show</code>.</p>
</body>
</html>
""")
