"""The demo's picture: both losses over the whole run, and the incident from near."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from sentinel.demo import story
from sentinel.demo.record import SMOOTH_STEPS, Curve, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE, DPI = (11.0, 5.0), 130
TICKS = (1.5, 2, 3, 4, 6, 9, 14)
BEFORE, AFTER = 14, 26
"""Steps around the first bad batch that the near view shows."""

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": story.INK,
    "axes.edgecolor": story.RULE_GREY,
    "axes.labelcolor": story.MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.color": story.MUTED,
    "ytick.color": story.MUTED,
}


def draw(record: Record, path: Path) -> None:
    """Write the picture of `record` to `path`, as PNG."""
    with plt.rc_context(STYLE):
        figure, (whole, near) = plt.subplots(
            1, 2, figsize=SIZE, dpi=DPI, sharey=True, gridspec_kw={"width_ratios": (1.75, 1), "wspace": 0.06}
        )
        figure.subplots_adjust(left=0.065, right=0.985, top=0.80, bottom=0.115)
        figure.text(0.065, 0.945, story.title(record), fontsize=13.5, fontweight="bold")
        figure.text(0.065, 0.895, story.setting(record), fontsize=9.5, color=story.MUTED)
        _axes(whole, record)
        _axes(near, record)
        _whole(whole, record)
        _near(near, record)
        figure.savefig(path)
        plt.close(figure)


def _axes(axes: Axes, record: Record) -> None:
    low, high = _range(record)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(axis="y", color=story.RULE_GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set_xlabel(story.STEP_LABEL)
    axes.axvspan(record.damage.first - 0.5, record.damage.last + 0.5, color=story.DAMAGED, linewidth=0, zorder=0.5)


def _whole(axes: Axes, record: Record) -> None:
    axes.set_ylabel(story.LOSS_LABEL)
    axes.set_xlim(-5, record.steps * 1.23)
    title = f"The whole run (thin: each step, bold: median of {SMOOTH_STEPS} steps)"
    axes.set_title(title, loc="left", fontsize=10, color=story.MUTED)
    if record.rollback is not None and record.parted == record.rollback.at + 1:
        axes.annotate(
            "the same to the bit\nuntil the rollback", (record.damage.first, _range(record)[0] * 1.04), xytext=(-5, 0),
            textcoords="offset points", color=story.MUTED, fontsize=8.5, ha="right", va="bottom", linespacing=1.3,
        )  # fmt: skip
    for curve, colour, name in story.runs(record):
        axes.plot(curve.steps, curve.losses, color=colour, linewidth=0.5, alpha=0.28)
        axes.plot(curve.steps, curve.smoothed(), color=colour, linewidth=2.0, solid_capstyle="round")
        end = curve.level()
        height = end if math.isfinite(end) else _lane(record)
        axes.annotate(
            f"{name}\n{story.number(end)}", (record.steps, height), xytext=(6, 0), textcoords="offset points",
            color=colour, fontweight="bold", va="center", linespacing=1.25,
        )  # fmt: skip
        _nan_lane(axes, curve, record, colour)


def _near(axes: Axes, record: Record) -> None:
    first = record.damage.first
    axes.set_xlim(first - BEFORE, first + AFTER)
    axes.set_title("The incident, step by step", loc="left", fontsize=10, color=story.MUTED)
    for curve, colour, _ in story.runs(record):
        axes.plot(curve.steps, curve.losses, color=colour, linewidth=1.6, marker="o", markersize=3.2)
        _nan_lane(axes, curve, record, colour)
    damage = f"batches from {first} on:\n{textwrap.fill(record.damage.description, 20)}"
    axes.text(
        first + AFTER - 0.6, _lane(record) * 0.96, damage, ha="right", va="top", fontsize=8.5,
        color=story.MUTED, linespacing=1.3,
    )  # fmt: skip
    _mark_alert(axes, record)
    _mark_rollback(axes, record)


def _mark_alert(axes: Axes, record: Record) -> None:
    alert = record.alert
    if alert is None:
        return
    axes.axvline(alert.step, color=story.INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{alert.alert}\nstep {alert.step}", (alert.step, _range(record)[0] * 1.04), xytext=(-5, 0), fontsize=8.5,
        textcoords="offset points", ha="right", va="bottom", linespacing=1.3,
    )  # fmt: skip


def _mark_rollback(axes: Axes, record: Record) -> None:
    rollback = record.rollback
    if rollback is None:
        return
    low, _ = _range(record)
    axes.axvline(rollback.at, color=story.WATCHED_COLOUR, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"rolled back at step {rollback.at}\nto the state of step {rollback.to}", (rollback.at, low * 1.04),
        xytext=(5, 0), textcoords="offset points", color=story.WATCHED_COLOUR, fontsize=8.5, va="bottom",
        linespacing=1.3,
    )  # fmt: skip


def _nan_lane(axes: Axes, curve: Curve, record: Record, colour: str) -> None:
    """Steps without a number, as dots on a lane at the top: a gap would look like a run that ended."""
    lost = [step for step, loss in zip(curve.steps, curve.losses, strict=True) if not math.isfinite(loss)]
    axes.plot(lost, [_lane(record)] * len(lost), color=colour, linestyle="none", marker="x", markersize=3.5)


def _lane(record: Record) -> float:
    return _range(record)[1] * 0.9


def _range(record: Record) -> tuple[float, float]:
    """Limits of the loss axis, with room for the words at the bottom and the lane of NaN at the top."""
    losses = [loss for curve in (record.watched, record.alone) for loss in curve.losses if math.isfinite(loss)]
    return min(losses) * 0.72, max(losses) * 1.25
