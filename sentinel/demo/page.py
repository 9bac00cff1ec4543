"""The demo's page: one HTML file that works offline, with the curves of both runs and what Sentinel said."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from sentinel.demo import picture, story, twinstory
from sentinel.demo.record import DemoRecord
from sentinel.demo.twins import FAULTY, HEALTHY, Twins
from sentinel.report.chart import STYLE, Plot, chart


def write_run(record: DemoRecord, alert_text: str, path: Path) -> None:
    """Write the page of `record` to `path`. `alert_text`: what the training terminal showed."""
    path.write_text(
        _fill_page(
            title=story.title(record),
            setting=story.setting(record),
            verdict=story.verdict(record),
            rows=story.comparison(record),
            columns=(story.WATCHED, story.ALONE),
            alert=alert_text,
            plots=picture.run_plots(record),
            run=record.run_id,
            versions=f"Python {record.python}, torch {record.torch}",
        ),
        encoding="utf-8",
    )


def write_twins(twins: Twins, alert_text: str, path: Path) -> None:
    """The same of a fault and its healthy twin."""
    path.write_text(
        _fill_page(
            title=twinstory.title(twins),
            setting=twinstory.setting(twins.fault, twins.seed, twins.steps),
            verdict=twinstory.verdict(twins),
            rows=twinstory.comparison(twins),
            columns=(FAULTY, HEALTHY),
            alert=alert_text,
            plots=picture.twin_plots(twins),
            run=twins.faulty.run_id,
            versions=f"Python {twins.python}, torch {twins.torch}",
        ),
        encoding="utf-8",
    )


def _fill_page(
    *, rows: Sequence[tuple[str, str, str]], columns: tuple[str, str], plots: Sequence[Plot], **texts: str
) -> str:
    """`texts`: title, setting, verdict, alert, run and versions, which are escaped."""
    return _PAGE.substitute(
        {name: escape(text) for name, text in texts.items()},
        head=_write_row("th", "", *columns),
        rows="\n".join(_write_row("td", *cells) for cells in rows),
        charts="\n".join(map(chart, plots)),
        style=STYLE,
    )


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
<p class="muted">Run <code>$run</code>, $versions. The whole incident: <code>sentinel incidents show</code>.</p>
</body>
</html>
""")
