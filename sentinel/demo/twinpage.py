"""The twins' page: the series that tells over the loss, the comparison, and what Sentinel said."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.subplots import make_subplots  # type: ignore[import-untyped]

from sentinel.demo import page, story, twinstory
from sentinel.demo.twinpicture import sides
from sentinel.demo.twins import FAULTY, HEALTHY, Side, Twins

_POWERS = {
    "type": "log",
    "tickvals": [2.0**power for power in range(-128, 33, 16)],
    "ticktext": [f"2<sup>{power}</sup>" for power in range(-128, 33, 16)],
}


def write(twins: Twins, alert_text: str, path: Path) -> None:
    """Write the page to `path`. `alert_text`: what the training terminal showed."""
    path.write_text(
        page.filled(
            title=twinstory.title(twins),
            setting=twinstory.setting(twins.fault, twins.seed, twins.steps),
            verdict=twinstory.verdict(twins),
            rows=twinstory.comparison(twins),
            columns=((FAULTY, story.ALONE_COLOUR), (HEALTHY, story.WATCHED_COLOUR)),
            alert=alert_text,
            chart=figure(twins),
            run=twins.faulty.run_id,
            versions=f"Python {twins.python}, torch {twins.torch}",
        ),
        encoding="utf-8",
    )


def figure(twins: Twins) -> go.Figure:
    """The series that tells above the loss, over the same steps."""
    chart = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.06)
    for side, colour in sides(twins):
        x, y = twins.telling(side)
        _line(chart, 1, side, x, y, colour, width=2.4)
        _line(chart, 2, side, twins.places(side), side.curve.smoothed(), colour, width=1.8)
    _marks(chart, twins)
    _layout(chart, twins)
    return chart


def _line(chart: go.Figure, row: int, side: Side, x: list[float], y: list[float], colour: str, width: float) -> None:
    chart.add_scatter(
        x=x, y=page.gaps(y), name=side.name, legendgroup=side.name, showlegend=row == 1, mode="lines",
        line={"color": colour, "width": width}, hovertemplate="%{y:.4g}", row=row, col=1,
    )  # fmt: skip


def _marks(chart: go.Figure, twins: Twins) -> None:
    marks = [(twins.begins_at, "the fault begins", story.MUTED, "right")] if twins.begins_at is not None else []
    if twins.alert is not None and twins.alert_at is not None:
        marks.append((twins.alert_at, f"<b>{twins.alert.alert}</b>, {twinstory.when(twins)}", story.INK, "left"))
    for x, text, colour, side in marks:
        chart.add_vline(x=x, line={"color": colour, "width": 1.1, "dash": "dash"})
        chart.add_annotation(
            x=x, y=twins.room, yref="y domain", text=text, showarrow=False,
            font={"color": colour, "size": 12.5},
            xanchor=side, xshift=6 if side == "left" else -6, yanchor="bottom",
        )  # fmt: skip


def _layout(chart: go.Figure, twins: Twins) -> None:
    page.lay_out(chart)
    chart.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    chart.update_xaxes(range=[-0.01 * twins.span, 1.01 * twins.span])
    chart.update_xaxes(title_text=twins.x_label, row=2, col=1)
    chart.update_yaxes(title_text=twins.kind.value, row=1, col=1, **(_POWERS if twins.kind.log else {}))
    chart.update_yaxes(title_text=story.LOSS_LABEL, row=2, col=1)
