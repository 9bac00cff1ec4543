"""The picture of a backtest: what the rules looked at, and where they would have fired."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from sentinel.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sentinel.backtesting import Curve, Result
    from sentinel.engine.backtest import Alert

METRIC_LIMIT, RUN_LIMIT, LABEL_LIMIT = 4, 12, 6
LABEL_SHARE, TITLE_LIMIT = 0.3, 48
"""Of a panel's width that a label takes; characters of a run's name."""
LOG_RATIO = 30.0
"""Of the largest to the smallest value, from which on a logarithmic axis shows more."""
DPI = 120

INK, CURVE_BLUE, GREY = "#1B1F24", "#0072B2", "#D9DEE4"
SEVERITY = {"critical": "#D55E00", "warning": "#B8860B", "info": "#5B6470"}
_STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GREY,
}


def draw(results: Sequence[Result], path: Path) -> None:
    """Write one run with a panel a metric; of several, one panel each, those with an alert first."""
    shown = sorted((result for result in results if result.curves), key=lambda result: not result.alerts)
    if not shown:
        raise ConfigError(f"{path}: there is nothing to draw")
    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        if len(shown) == 1:
            _one(shown[0])
        else:
            _many(shown[:RUN_LIMIT], len(shown))
        try:
            plt.savefig(path, dpi=DPI)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        finally:
            plt.close("all")


def _one(result: Result) -> None:
    metrics = sorted(result.curves, key=lambda name: (name != "loss", _quiet(result, name)))[:METRIC_LIMIT]
    figure, panels = plt.subplots(
        len(metrics), 1, figsize=(10, 1.3 + 2.1 * len(metrics)), sharex=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(_title(result), x=0.01, ha="left", fontweight="bold")
    for axes, metric in zip(panels[:, 0], metrics, strict=True):
        _panel(axes, result.curves[metric], result.alerts, named=metric == metrics[0])
        axes.set_ylabel(metric)
    panels[-1, 0].set_xlabel("step")


def _quiet(result: Result, metric: str) -> bool:
    return not any(metric in alert.values for alert in result.alerts)


def _many(results: Sequence[Result], total: int) -> None:
    columns = 2 if len(results) <= 4 else 3
    rows = math.ceil(len(results) / columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(4.4 * columns, 2.4 * rows + 0.4), squeeze=False, layout="constrained"
    )
    if total > len(results):
        figure.suptitle(
            f"{len(results)} of {total} runs, those with an alert first", x=0.01, ha="left", fontweight="bold"
        )
    for axes, result in zip(panels.flat, results, strict=False):
        metric = "loss" if "loss" in result.curves else next(iter(result.curves))
        _panel(axes, result.curves[metric], result.alerts, named=True)
        axes.set_title(_short(result.run), loc="left", fontsize=8, pad=24 if result.alerts else 4)
        axes.set_ylabel(metric)
    for axes in list(panels.flat)[len(results) :]:
        axes.remove()


def _title(result: Result) -> str:
    return (
        f"{result.run}: "
        + (f"{len(result.alerts)} alerts" if result.alerts else "no alert")
        + f" in {result.rows:,} rows"
    )


def _panel(axes: Axes, curve: Curve, alerts: Sequence[Alert], *, named: bool) -> None:
    finite = [value for value in curve.values if math.isfinite(value)]
    axes.plot(curve.steps, curve.values, color=CURVE_BLUE, linewidth=0.9)
    if finite and min(finite) > 0 and max(finite) > LOG_RATIO * min(finite):
        axes.set_yscale("log")
    bad = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
    if bad:
        axes.plot(bad, [0.02] * len(bad), "x", color=SEVERITY["critical"], markersize=4,
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
    axes.grid(axis="y", color=GREY, linewidth=0.5)
    for alert in alerts:
        axes.axvline(
            alert.step,
            color=SEVERITY[alert.severity],
            linewidth=1,
            linestyle="--" if alert.severity != "critical" else "-",
        )
    if named:
        _labels(axes, alerts[:LABEL_LIMIT])


def _labels(axes: Axes, alerts: Sequence[Alert]) -> None:
    """Above the panel; one that would run into its neighbour goes a line higher."""
    low, high = axes.get_xlim()
    line, last = 0, -math.inf
    for alert in alerts:
        at = (alert.step - low) / max(high - low, 1)
        line = line + 1 if at - last < LABEL_SHARE else 0
        last = at
        axes.annotate(
            f"{alert.alert} {alert.step}",
            (at, 1.01),
            xycoords="axes fraction",
            xytext=(0, 8 * line),
            textcoords="offset points",
            color=SEVERITY[alert.severity],
            fontsize=7,
            ha="left" if at < 0.8 else "right",
            va="bottom",
        )


def _short(name: str) -> str:
    return name if len(name) <= TITLE_LIMIT else f"{name[: TITLE_LIMIT - 1]}…"
