"""The picture of a backtest: what the rules looked at, and where they would have fired."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sentinel.errors import ConfigError
from sentinel.node import small_files
from sentinel.report.chart import Drawn, Mark, Plot, picture
from sentinel.report.content import ChartLine

if TYPE_CHECKING:
    from sentinel.toolkit.backtest import Result

METRIC_LIMIT, RUN_LIMIT, LABEL_LIMIT = 4, 12, 6
TITLE_LIMIT = 48
"""Most characters of a run's name above its plot."""


def draw(results: Sequence[Result], path: Path) -> None:
    """Write a picture: of one run a plot per metric; of several runs one plot each, those with an alert first."""
    shown = sorted((result for result in results if result.curves), key=lambda result: not result.alerts)
    if not shown:
        raise ConfigError(f"{path}: there is nothing to draw")
    text = _draw_run(shown[0]) if len(shown) == 1 else _draw_runs(shown)
    small_files.write_whole(path, text)


def _draw_run(result: Result) -> str:
    told = {metric for alert in result.alerts for metric in alert.values}
    metrics = sorted(result.curves, key=lambda name: (name != "loss", name not in told))[:METRIC_LIMIT]
    alerts = f"{len(result.alerts)} alerts" if result.alerts else "no alert"
    plots = [_plot(result, metric, metric) for metric in metrics]
    return picture(f"{result.run}: {alerts} in {result.rows:,} rows", "", plots)


def _draw_runs(results: Sequence[Result]) -> str:
    plots = []
    for result in results[:RUN_LIMIT]:
        metric = "loss" if "loss" in result.curves else next(iter(result.curves))
        name = result.run if len(result.run) <= TITLE_LIMIT else f"{result.run[: TITLE_LIMIT - 1]}…"
        plots.append(_plot(result, metric, f"{name}: {metric}"))
    return picture(f"{len(plots)} of {len(results)} runs, those with an alert first", "", plots)


def _plot(result: Result, metric: str, title: str) -> Plot:
    curve = result.curves[metric]
    marks = [
        Mark(alert.step, f"{alert.alert} {alert.step}" if at < LABEL_LIMIT else "", alert.severity, linked=False)
        for at, alert in enumerate(result.alerts)
    ]
    line = Drawn(ChartLine(metric, curve.steps, curve.values), "", 0)
    return Plot(title, "1", [line], (min(curve.steps), max(curve.steps)), marks)
