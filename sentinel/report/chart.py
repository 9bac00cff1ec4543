"""Draws curves as SVG: inside a page, or as a still picture.

Colours are names of CSS variables, so that the page decides on light and dark.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, groupby, islice, pairwise
from operator import lt

import msgspec

from sentinel.report.content import ChartLine
from sentinel.report.markup import escape
from sentinel.web.charts import STYLE

WIDTH, HEIGHT = 920, 204
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 28, 32
_LETTER = 8
"""Greatest width of a letter of a title or a number."""
_LINE = 12
"""Distance of two lines of text: two are above the curves."""
_WORDS = 140
"""Most letters of a line of words below a picture's title."""


class Mark(msgspec.Struct, frozen=True):
    """An incident on the curves."""

    step: float
    label: str
    """On a page the number of the incident in the list below; in a picture, words."""
    severity: str
    title: str = ""
    linked: bool = True
    """Whether the label leads to the incident of that number."""


class Band(msgspec.Struct, frozen=True):
    """A range of steps shaded behind the curves."""

    first: float
    last: float
    title: str


class Drawn(msgspec.Struct, frozen=True):
    """A line with its place in the legend."""

    line: ChartLine
    label: str
    """Its name in the legend; empty: it is not there."""
    style: int
    """Number of its style: colour and dashes."""
    weight: str = ""
    """`faint` or `bold`; empty: neither."""


class Plot(msgspec.Struct, frozen=True):
    """Curves over a `span` of steps; the y-axis is logarithmic if the values span two decades or more."""

    title: str
    unit: str
    lines: Sequence[Drawn]
    span: tuple[float, float]
    marks: Sequence[Mark] = ()
    bands: Sequence[Band] = ()
    x_name: str = "step"
    width: int = WIDTH


def chart(plot: Plot) -> str:
    """Return a figure for a page, with a legend if it has several lines; "" without a finite value."""
    scale = fit_scale(plot)
    if scale is None:
        return ""
    label = escape(f"{plot.title} over steps {plot.span[0]:.0f} to {plot.span[1]:.0f}")
    items = "".join(
        f'<span><svg viewBox="0 0 24 8" class="key"><path d="M0 4L24 4" class="{_name_classes(drawn)}"/></svg>'
        f"{escape(drawn.label)}</span>"
        for drawn in plot.lines
        if drawn.label
    )
    legend = f'<div class="legend">{items}</div>' if len(plot.lines) > 1 else ""
    size = f'viewBox="0 0 {plot.width} {HEIGHT}"'
    svg = f'<svg {size} role="img" aria-label="{label}">{_body(plot, scale)}</svg>'
    return f"<figure>{svg}{legend}</figure>"


def picture(title: str, words: str, plots: Sequence[Plot]) -> str:
    """Return an SVG file: `title` and `words`, the plots below each other, and one legend of all their lines."""
    texts = [
        f'<text x="{LEFT}" y="{26 + 17 * row}" class="{"said" if row else "headline"}">{escape(line)}</text>'
        for row, line in enumerate([title, *textwrap.wrap(words, _WORDS)])
    ]
    top = 17 * len(texts) + 20
    keys = {drawn.label: drawn.style for plot in plots for drawn in plot.lines if drawn.label}
    x = LEFT
    for label, style in keys.items() if len(keys) > 1 else ():
        texts.append(f'<path d="M{x} {top + 8}h24" class="curve bold s{style}"/>')
        texts.append(f'<text x="{x + 30}" y="{top + 12}" class="said">{escape(label)}</text>')
        x += 50 + _LETTER * len(label)
    top += 26 if len(keys) > 1 else 0
    bodies = [_body(plot, scale) for plot in plots if (scale := fit_scale(plot)) is not None]
    groups = (f'<g transform="translate(0 {top + HEIGHT * row})">{body}</g>' for row, body in enumerate(bodies))
    height = top + HEIGHT * len(bodies) + _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}"><style>{escape(STYLE, quote=False)}</style>'
        f'<rect width="100%" height="100%" class="paper"/>{"".join(texts)}{"".join(groups)}</svg>\n'
    )


def fit_scale(plot: Plot) -> AxisScale | None:
    """Return the scale of a plot's y-axis; None without a finite value."""
    ends = [
        end(stretch)
        for drawn in plot.lines
        for finite, stretch in _stretches(drawn.line.values)
        if finite and stretch
        for end in (min, max)
    ]
    return AxisScale.fit_values(ends) if ends else None


def _body(plot: Plot, scale: AxisScale) -> str:
    axis = _Steps(*plot.span, plot.width - RIGHT)
    parts = [_frame(plot, scale, axis)]
    parts += [_band(axis, band) for band in plot.bands]
    parts += [_curve(drawn, scale, axis, plot.bands) for drawn in plot.lines]
    parts += [_draw_gaps(drawn, axis) for drawn in plot.lines]
    parts += _marks(plot.marks, axis, LEFT + _LETTER * len(_write_title(plot, scale)))
    return "".join(parts)


class _Steps(msgspec.Struct, frozen=True):
    first: float
    last: float
    right: int
    """The x of step `last`."""

    def x(self, step: float) -> float:
        share = (step - self.first) / ((self.last - self.first) or 1)
        return LEFT + share * (self.right - LEFT)

    def pixel(self, step: float) -> int:
        """Return the whole pixels from the left end to a step."""
        return int((step - self.first) * (self.right - LEFT) // ((self.last - self.first) or 1))


_FARTHEST = 1e307
"""Largest end of a scale: no float can hold the distance of larger ones."""


class AxisScale(msgspec.Struct, frozen=True):
    """The scale of a y-axis; if it is logarithmic, its ends are powers of ten."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def fit_values(cls, values: Sequence[float]) -> AxisScale:
        low, high = (max(-_FARTHEST, min(value, _FARTHEST)) for value in (min(values), max(values)))
        if low > 0 and high / low >= 100:
            return cls(math.log10(low), math.log10(high), True)
        if low >= 0 and low < high / 2:
            low = 0.0
        margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        return cls(low - (margin if low else 0.0), high + margin, False)

    def y(self, value: float) -> float:
        at = math.log10(value) if self.logarithmic and value > 0 else self.low if self.logarithmic else value
        at = max(self.low, min(at, self.high))
        return HEIGHT - BOTTOM - (at - self.low) / ((self.high - self.low) or 1.0) * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            return _round_ticks(self.low, self.high)
        decades = range(math.ceil(self.low), math.floor(self.high) + 1)
        return [10.0**decade for decade in list(decades)[:: max(1, -(-len(decades) // 5))]]


def _round_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def readable(value: float, unit: str) -> str:
    """Return the label of a tick."""
    if unit == "bytes":
        for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
    if unit == "hertz":
        return f"{value / 1e9:.3g} GHz"
    if unit in ("celsius", "watts"):
        return f"{value:.4g} {'°C' if unit == 'celsius' else 'W'}"
    if unit == "seconds" and 0 < abs(value) < 1:
        return f"{value * 1e3:.4g} ms"
    if abs(value) >= 1e5 or 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _frame(plot: Plot, scale: AxisScale, axis: _Steps) -> str:
    bottom, right = HEIGHT - BOTTOM, axis.right
    parts = [f'<text x="{LEFT}" y="{_LINE}" class="title">{escape(_write_title(plot, scale))}</text>']
    for tick in scale.ticks():
        y, words = scale.y(tick), escape(readable(tick, plot.unit))
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="tick end">{words}</text>')
    for tick in _round_ticks(axis.first, axis.last):
        if axis.first <= tick <= axis.last:
            parts.append(f'<text x="{axis.x(tick):.1f}" y="{bottom + 15}" class="tick middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 4}" class="tick end">{escape(plot.x_name)}</text>')
    return "".join(parts)


def caption(plot: Plot) -> str:
    """Return a plot's title, with its unit if the ticks do not show it."""
    return plot.title if plot.unit in ("1", "ratio", "bytes", "seconds") else f"{plot.title} ({plot.unit})"


def _write_title(plot: Plot, scale: AxisScale) -> str:
    return caption(plot) + (", log scale" if scale.logarithmic else "")


def _curve(drawn: Drawn, scale: AxisScale, axis: _Steps, bands: Sequence[Band]) -> str:
    """Return the path of a line, of any number of steps: at most the lowest and the highest value of each pixel.

    Across steps that were rolled back and are no longer known there is no line: nothing is known there.
    """
    pieces: list[list[str]] = [[]]
    edges = [(axis.x(band.first), axis.x(band.last)) for band in bands]
    before = math.inf
    for x, values in _pixels(drawn.line, axis):
        if any(before <= first + 1 and last <= x + 1 for first, last in edges if first < x):
            pieces.append([])
        before = x
        for finite, stretch in _stretches(values):
            if not finite:
                pieces.append([])
                continue
            ends = {round(scale.y(min(stretch)), 2), round(scale.y(max(stretch)), 2)}
            pieces[-1].extend(f"{x} {y}" for y in sorted(ends))
    path = "".join("M" + "L".join(piece if len(piece) > 1 else piece * 2) for piece in pieces if piece)
    return f'<path d="{path}" class="{_name_classes(drawn)}"/>'


def _name_classes(drawn: Drawn) -> str:
    return f"curve s{drawn.style} {drawn.weight}".rstrip()


def _pixels(line: ChartLine, axis: _Steps) -> Iterator[tuple[int, Sequence[float]]]:
    """Yield (x, values of the steps there), in the order of the line. At another attempt, x may go back."""
    steps = line.steps
    falls = compress(count(1), map(lt, islice(steps, 1, None), steps))
    for begin, end in pairwise([0, *falls, len(steps)]):
        at = begin
        while at < end:
            pixel = axis.pixel(steps[at])
            after = bisect_left(steps, pixel + 1, at, end, key=axis.pixel)
            yield LEFT + pixel, line.values[at:after]
            at = after


def _stretches(values: Sequence[float]) -> Iterable[tuple[bool, Sequence[float]]]:
    """Return (finite, values) of each run of values that are all finite, or all not."""
    if math.isfinite(sum(values)):
        return [(True, values)]
    return [(finite, list(stretch)) for finite, stretch in groupby(values, math.isfinite)]


def _draw_gaps(drawn: Drawn, axis: _Steps) -> str:
    """Return crosses at the top for steps whose value is not finite: a gap would look like the end of the run."""
    if math.isfinite(sum(drawn.line.values)):
        return ""
    pixels = {x for x, values in _pixels(drawn.line, axis) if not all(finite for finite, _ in _stretches(values))}
    crosses = "".join(f"M{x - 3} {TOP}l6 6m0 -6l-6 6" for x in sorted(pixels))
    return f'<path d="{crosses}" class="lost s{drawn.style}"><title>not finite</title></path>' if crosses else ""


def _marks(marks: Sequence[Mark], axis: _Steps, title: float) -> Iterator[str]:
    """Yield the marks. Labels that would overlap each other, or the title, which ends at `title`, are placed lower."""
    ends = [title]
    for mark in sorted(marks, key=lambda mark: mark.step):
        x, half = axis.x(mark.step), _LETTER * len(mark.label) / 2
        middle = min(x, axis.right + RIGHT - half)
        row = next((row for row, end in enumerate(ends) if end <= middle - half), len(ends))
        ends[row : row + 1] = [middle + half]
        tag, link = ("a", f' href="#case-{escape(mark.label)}"') if mark.linked else ("g", "")
        yield (
            f'<{tag}{link} class="mark {escape(mark.severity)}">'
            f"<title>{escape(mark.title)}</title>"
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{middle:.1f}" y="{_LINE * (1 + row % 13)}" class="middle">{escape(mark.label)}</text></{tag}>'
        )


def _band(axis: _Steps, band: Band) -> str:
    x = axis.x(max(band.first, axis.first))
    width = max(1.5, axis.x(min(band.last, axis.last)) - x)
    return (
        f'<rect x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}" class="band">'
        f"<title>{escape(band.title)}</title></rect>"
    )
