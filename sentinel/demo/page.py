"""The demo's page: one HTML file that works offline, with both losses, the gradient norm and what Sentinel said.

`filled` and `lay_out` are what all pages have in common; `twinpage` is the other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.subplots import make_subplots  # type: ignore[import-untyped]

from sentinel.demo import story
from sentinel.demo.record import Curve, Record

HEIGHT = 720
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def write(record: Record, alert_text: str, path: Path) -> None:
    """Write the page of `record`, a saved run, to `path`. `alert_text`: what the training terminal showed."""
    path.write_text(
        filled(
            title=story.title(record),
            setting=story.setting(record),
            verdict=story.verdict(record),
            rows=story.comparison(record),
            columns=((story.WATCHED, story.WATCHED_COLOUR), (story.ALONE, story.ALONE_COLOUR)),
            alert=alert_text,
            chart=figure(record),
            run=record.run_id,
            versions=f"Python {record.python}, torch {record.torch}",
        ),
        encoding="utf-8",
    )


def filled(
    *,
    rows: Sequence[tuple[str, str, str]],
    columns: Sequence[tuple[str, str]],
    chart: go.Figure,
    **texts: str,
) -> str:
    """The page: `columns` are (name, colour) of the two runs, `texts` its title, setting, verdict, alert, run and
    versions, which are escaped."""
    # The JavaScript is in the file: 5 MB, and no network.
    drawn = chart.to_html(
        full_html=False, include_plotlyjs=True, div_id="chart", config={"displayModeBar": False, "responsive": True}
    )
    (left, left_colour), (right, right_colour) = columns
    return _PAGE.substitute(
        {name: escape(text) for name, text in texts.items()},
        rows="\n".join(_row(*cells) for cells in rows),
        left=escape(left),
        right=escape(right),
        left_colour=left_colour,
        right_colour=right_colour,
        chart=drawn,
        font=_FONT,
        ink=story.INK,
        muted=story.MUTED,
        grey=story.RULE_GREY,
    )


def figure(record: Record) -> go.Figure:
    """Loss of both runs above the gradient norm of the watched one, over the same steps."""
    chart = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.06)
    for curve, colour, name in story.runs(record):
        _loss(chart, curve, colour, name)
        _nan_lane(chart, record, curve, colour, name)
    _grad_norm(chart, record)
    _marks(chart, record)
    _layout(chart, record)
    return chart


def _loss(chart: go.Figure, curve: Curve, colour: str, name: str) -> None:
    line = {"color": colour, "width": 2.4}
    faint = {"color": colour, "width": 0.9}
    chart.add_scatter(
        x=curve.steps, y=gaps(curve.losses), name=f"{name}, each step", line=faint, opacity=0.38, mode="lines",
        legendgroup=name, hovertemplate="%{y:.3f}", row=1, col=1,
    )  # fmt: skip
    chart.add_scatter(
        x=curve.steps, y=gaps(curve.smoothed()), name=f"{name}, median of 20 steps", line=line, mode="lines",
        legendgroup=name, hoverinfo="skip", row=1, col=1,
    )  # fmt: skip


def _nan_lane(chart: go.Figure, record: Record, curve: Curve, colour: str, name: str) -> None:
    """Steps without a number, at the top: a gap would look like a run that ended."""
    lost = [step for step, loss in zip(curve.steps, curve.losses, strict=True) if not math.isfinite(loss)]
    if lost:
        chart.add_scatter(
            x=lost, y=[_top(record)] * len(lost), name=f"{name}, NaN", mode="markers", legendgroup=name,
            marker={"symbol": "x-thin", "size": 6, "line": {"color": colour, "width": 1.2}},
            hovertemplate="NaN", row=1, col=1,
        )  # fmt: skip


def _grad_norm(chart: go.Figure, record: Record) -> None:
    chart.add_scatter(
        x=record.grad_norm.steps, y=gaps(record.grad_norm.values), name=f"gradient norm, {story.WATCHED}",
        line={"color": story.WATCHED_COLOUR, "width": 1.0}, mode="lines+markers", marker={"size": 3}, showlegend=False,
        hovertemplate="%{y:.3g}", row=2, col=1,
    )  # fmt: skip


def _marks(chart: go.Figure, record: Record) -> None:
    damage, alert, rollback = record.damage, record.alert, record.rollback
    chart.add_vrect(
        x0=damage.first - 0.5, x1=damage.last + 0.5, fillcolor=story.DAMAGED, opacity=0.75, layer="below", line_width=0
    )
    marks = [(damage.first + damage.batches / 2, 1.0, f"bad batches: {damage.description}", story.MUTED, "bottom", 0)]
    if alert is not None:
        _line(chart, alert.step, story.INK)
        marks.append((alert.step, 0.93, f"<b>{alert.alert}</b>, step {alert.step}", story.INK, "top", -1))
    if rollback is not None:
        _line(chart, rollback.at, story.WATCHED_COLOUR)
        text = f"<b>rolled back</b> at step {rollback.at}, to the state of step {rollback.to}"
        marks.append((damage.last + 1, 0.93, text, story.WATCHED_COLOUR, "top", 1))
    for x, y, text, colour, side, shift in marks:
        chart.add_annotation(
            x=x, y=y, yref="paper", text=text, showarrow=False, font={"color": colour, "size": 12.5}, yanchor=side,
            xanchor={0: "center", -1: "right", 1: "left"}[shift], xshift=6 * shift,
        )  # fmt: skip


def _line(chart: go.Figure, step: int, colour: str) -> None:
    chart.add_vline(x=step, line={"color": colour, "width": 1.1, "dash": "dash"})


def lay_out(chart: go.Figure) -> None:
    """Fonts, colours and margins of every chart."""
    chart.update_layout(
        height=HEIGHT, template="none", font={"family": _FONT, "size": 13, "color": story.INK}, hovermode="x unified",
        margin={"l": 64, "r": 16, "t": 84, "b": 52}, paper_bgcolor="white", plot_bgcolor="white",
    )  # fmt: skip
    axis = {"gridcolor": story.RULE_GREY, "zeroline": False, "linecolor": story.RULE_GREY}
    chart.update_xaxes(**axis)
    chart.update_yaxes(**axis)


def _layout(chart: go.Figure, record: Record) -> None:
    lay_out(chart)
    chart.update_layout(
        legend={"orientation": "h", "y": 1.07, "yanchor": "bottom", "x": 0, "traceorder": "reversed"},
        updatemenus=[_views(record)],
    )
    chart.update_xaxes(range=[-5, record.steps + 5])
    chart.update_xaxes(title_text=story.STEP_LABEL, row=2, col=1)
    ticks = {"tickvals": [1, 1.5, 2, 3, 4, 6, 9, 14], "type": "log"}
    chart.update_yaxes(**ticks, title_text=story.LOSS_LABEL, row=1, col=1)
    norms = {"tickvals": [0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 5, 10, 30, 100, 1000], "type": "log"}
    chart.update_yaxes(**norms, title_text="gradient norm (L2)", row=2, col=1)


def _views(record: Record) -> dict[str, Any]:
    """Two buttons: the whole run, and the incident from near."""
    first = record.damage.first
    ranges = {"whole run": [-5, record.steps + 5], "incident": [first - 30, first + 60]}
    buttons = [{"label": name, "method": "relayout", "args": [{"xaxis.range": span}]} for name, span in ranges.items()]
    return {
        "type": "buttons", "direction": "left", "buttons": buttons, "showactive": True, "bgcolor": "white",
        "bordercolor": story.RULE_GREY, "x": 1, "xanchor": "right", "y": 1.01, "yanchor": "bottom", "pad": {"r": 0},
    }  # fmt: skip


def _top(record: Record) -> float:
    losses = [loss for curve in (record.watched, record.alone) for loss in curve.losses if math.isfinite(loss)]
    return max(losses) * 1.08


def gaps(values: list[float]) -> list[Any]:
    """JSON has no NaN: None breaks the line."""
    return [value if math.isfinite(value) else None for value in values]


def _row(what: str, left: str, right: str) -> str:
    return f"<tr><th>{escape(what)}</th><td>{escape(left)}</td><td>{escape(right)}</td></tr>"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Sentinel demo: $title</title>
<style>
  :root { color-scheme: light; }
  body { margin: 0 auto; max-width: 68rem; padding: 2.2rem 1.4rem 3rem; color: $ink; background: #fff;
         font: 16px/1.55 $font; }
  h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; letter-spacing: -.01em; }
  h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
  p { margin: .3rem 0; max-width: 52rem; }
  .muted { color: $muted; }
  table { border-collapse: collapse; margin: 1.4rem 0 1.6rem; font-variant-numeric: tabular-nums; }
  th, td { padding: .3rem 1.4rem .3rem 0; border-bottom: 1px solid $grey; text-align: right; }
  th:first-child { text-align: left; font-weight: 400; }
  thead th { font-weight: 600; border-bottom-width: 2px; }
  .left { color: $left_colour; }  .right { color: $right_colour; }
  pre { background: #F6F8FA; border: 1px solid $grey; border-radius: 6px; padding: .9rem 1rem; overflow-x: auto;
        font: 12.5px/1.45 ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace; }
  code { font: .9em ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="muted">$setting</p>
<p>$verdict</p>
<table>
<thead><tr><th></th><th class="left">$left</th><th class="right">$right</th></tr></thead>
<tbody>
$rows
</tbody>
</table>
$chart
<h2>What the training terminal showed</h2>
<pre>$alert</pre>
<p class="muted">Run <code>$run</code>, $versions. The whole case: <code>sentinel incidents show</code>.</p>
</body>
</html>
""")
