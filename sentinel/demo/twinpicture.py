"""The twins' picture: the series that tells beside the loss, which does not."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import pyplot as plt
from matplotlib.ticker import LogFormatterMathtext, LogLocator, NullLocator

from sentinel.demo import story, twinstory
from sentinel.demo.picture import DPI, SIZE, STYLE
from sentinel.demo.record import SMOOTH_STEPS
from sentinel.demo.twins import Side, Twins

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = 150
"""Columns of the words under the title."""


def draw(twins: Twins, path: Path) -> None:
    """Write the picture to `path`, as PNG."""
    with plt.rc_context(STYLE):
        figure, (telling, loss) = plt.subplots(
            1, 2, figsize=SIZE, dpi=DPI, gridspec_kw={"width_ratios": (1.5, 1), "wspace": 0.16}
        )
        figure.subplots_adjust(left=0.075, right=0.985, top=0.76, bottom=0.115)
        figure.text(0.065, 0.945, twinstory.title(twins), fontsize=13.5, fontweight="bold")
        words = textwrap.fill(twinstory.setting(twins.fault, twins.seed, twins.steps), WORDS)
        figure.text(0.065, 0.925, words, fontsize=9, color=story.MUTED, va="top", linespacing=1.35)
        _telling(telling, twins)
        _loss(loss, twins)
        figure.savefig(path)
        plt.close(figure)


def _telling(axes: Axes, twins: Twins) -> None:
    _axes(axes, twins, twins.kind.value)
    if twins.kind.log:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=2.0**16))
        axes.yaxis.set_major_formatter(LogFormatterMathtext(base=2))
        axes.yaxis.set_minor_locator(NullLocator())
    for side, colour in reversed(sides(twins)):
        x, y = twins.telling(side)
        axes.plot(x, y, color=colour, linewidth=2.0, solid_capstyle="round")
        # The lower end is named below it, the upper above: the words do not meet.
        above = y[-1] >= max(twins.telling(other)[1][-1] for other, _ in sides(twins))
        axes.annotate(
            side.name, (x[-1], y[-1]), xytext=(-2, 7 if above else -7), textcoords="offset points", color=colour,
            fontweight="bold", ha="right", va="bottom" if above else "top",
        )  # fmt: skip
    low, high = axes.get_ylim()
    axes.set_ylim(low * (2.0**-6 if twins.kind.log else 0.92), high * (2.0**6 if twins.kind.log else 1.06))
    _mark(axes, twins, words=True)


def _loss(axes: Axes, twins: Twins) -> None:
    _axes(axes, twins, story.LOSS_LABEL)
    axes.set_title(f"The loss (median of {SMOOTH_STEPS} steps)", loc="left", fontsize=10, color=story.MUTED)
    for width, (side, colour) in zip((1.6, 3.2), reversed(sides(twins)), strict=True):
        axes.plot(
            twins.places(side), side.curve.smoothed(), color=colour, linewidth=width, alpha=0.85, zorder=4 - width
        )
    _mark(axes, twins, words=False)


def _axes(axes: Axes, twins: Twins, label: str) -> None:
    axes.grid(axis="y", color=story.RULE_GREY, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set_xlabel(twins.x_label)
    axes.set_ylabel(label)
    axes.set_xlim(-0.01 * twins.span, 1.01 * twins.span)


def _mark(axes: Axes, twins: Twins, *, words: bool) -> None:
    marks = [(twins.begins_at, "the fault begins", story.MUTED, -1)] if twins.begins_at is not None else []
    if twins.alert is not None and twins.alert_at is not None:
        marks.append((twins.alert_at, f"{twins.alert.alert}\n{twinstory.when(twins)}", story.INK, 1))
    for x, text, colour, side in marks:
        axes.axvline(x, color=colour, linewidth=0.9, linestyle=(0, (4, 3)))
        if words:
            axes.annotate(
                text, (x, twins.room), xycoords=("data", "axes fraction"),
                xytext=(5 * side, 0), textcoords="offset points", color=colour, fontsize=8.5,
                ha="left" if side > 0 else "right", linespacing=1.3,
            )  # fmt: skip


def sides(twins: Twins) -> tuple[tuple[Side, str], ...]:
    """(run, colour), the faulty one first."""
    return (twins.faulty, story.ALONE_COLOUR), (twins.healthy, story.WATCHED_COLOUR)
