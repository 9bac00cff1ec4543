"""Curves as inline SVG. Colours are names of CSS variables, so that the page decides on light and dark."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import compress, count, groupby, islice, pairwise
from operator import lt

import msgspec

from sentinel.report.content import Line

WIDTH, HEIGHT = 920, 204
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 28, 32
_ROOM = WIDTH - LEFT - RIGHT
_LETTER = 8
"""Width of a letter of a title or a number, at most."""
_LINE = 12
"""Between two lines of text: two are above the curves."""


class Mark(msgspec.Struct, frozen=True):
    """An incident on the curves."""

    step: int
    label: str
    """A number: the case's in the list below."""
    severity: str
    title: str


class Drawn(msgspec.Struct, frozen=True):
    """A line with its place in the legend."""

    line: Line
    label: str
    style: int
    """Colour and dashes."""


def chart(
    title: str,
    unit: str,
    lines: Sequence[Drawn],
    span: tuple[int, int],
    marks: Sequence[Mark] = (),
    bands: Sequence[tuple[int, int]] = (),
) -> str:
    """Curves over `span` of steps; logarithmic where the values span two decades or more."""
    ends = [
        end(stretch)
        for drawn in lines
        for finite, stretch in _stretches(drawn.line.values)
        if finite and stretch
        for end in (min, max)
    ]
    if not ends:
        return ""
    scale = _Scale.of(ends)
    axis = _Steps(*span)
    parts = [_frame(title, unit, scale, axis)]
    parts += [_band(axis, *band) for band in bands]
    parts += [_curve(drawn, scale, axis, bands) for drawn in lines]
    parts += [_lost(drawn, axis) for drawn in lines]
    parts += _marks(marks, axis, LEFT + _LETTER * len(_titled(title, unit, scale)))
    label = escape(f"{title} over steps {span[0]} to {span[1]}")
    legend = _legend(lines) if len(lines) > 1 else ""
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{svg}{legend}</figure>"


class _Steps(msgspec.Struct, frozen=True):
    first: int
    last: int

    def x(self, step: float) -> float:
        share = (step - self.first) / max(1, self.last - self.first)
        return LEFT + share * _ROOM

    def pixel(self, step: int) -> int:
        """Whole pixels from the left end."""
        return (step - self.first) * _ROOM // max(1, self.last - self.first)

    def first_of(self, pixel: int) -> int:
        """The first step of a pixel."""
        return self.first - (-pixel * max(1, self.last - self.first) // _ROOM)


class _Scale(msgspec.Struct, frozen=True):
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        low, high = min(values), max(values)
        if low > 0 and high / low >= 100:
            return cls(math.log10(low), math.log10(high), True)
        if low >= 0 and low < high / 2:
            low = 0.0
        margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        return cls(low - (margin if low else 0.0), high + margin, False)

    def y(self, value: float) -> float:
        at = math.log10(value) if self.logarithmic and value > 0 else self.low if self.logarithmic else value
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
    """A tick's words."""
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


def _frame(title: str, unit: str, scale: _Scale, axis: _Steps) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<text x="{LEFT}" y="{_LINE}" class="title">{escape(_titled(title, unit, scale))}</text>']
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="tick end">{escape(readable(tick, unit))}</text>')
    for tick in _round_ticks(axis.first, axis.last):
        if axis.first <= tick <= axis.last:
            parts.append(f'<text x="{axis.x(tick):.1f}" y="{bottom + 15}" class="tick middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 4}" class="tick end">step</text>')
    return "".join(parts)


def _titled(title: str, unit: str, scale: _Scale) -> str:
    named = "" if unit in ("1", "ratio", "bytes", "seconds") else f" ({unit})"
    return title + named + (", log scale" if scale.logarithmic else "")


def _curve(drawn: Drawn, scale: _Scale, axis: _Steps, bands: Sequence[tuple[int, int]]) -> str:
    """At most the lowest and the highest value of each pixel: what an eye can tell, of any number of steps. Where steps
    that were rolled back are no longer known, there is no line: nothing was measured on its way."""
    pieces: list[list[str]] = [[]]
    edges = [(axis.x(first), axis.x(last)) for first, last in bands]
    before = math.inf
    for x, values in _pixels(drawn.line, axis):
        if any(before <= first + 1 and last <= x + 1 for first, last in edges if first < x):
            pieces.append([])
        before = x
        for finite, stretch in _stretches(values):
            if not finite:
                pieces.append([])
                continue
            ends = {round(scale.y(min(stretch)), 1), round(scale.y(max(stretch)), 1)}
            pieces[-1].extend(f"{x} {y}" for y in sorted(ends))
    path = "".join("M" + "L".join(piece if len(piece) > 1 else piece * 2) for piece in pieces if piece)
    return f'<path d="{path}" class="curve s{drawn.style}"/>'


def _pixels(line: Line, axis: _Steps) -> Iterator[tuple[int, Sequence[float]]]:
    """(x, values of the steps there), in the order of the line. Another attempt may go back."""
    steps = line.steps
    falls = compress(count(1), map(lt, islice(steps, 1, None), steps))
    for begin, end in pairwise([0, *falls, len(steps)]):
        at = begin
        while at < end:
            pixel = axis.pixel(steps[at])
            after = bisect_left(steps, axis.first_of(pixel + 1), at, end)
            yield LEFT + pixel, line.values[at:after]
            at = after


def _stretches(values: Sequence[float]) -> Iterable[tuple[bool, Sequence[float]]]:
    """(finite, values) of stretches that are, or are not."""
    if math.isfinite(sum(values)):
        return [(True, values)]
    return [(finite, list(stretch)) for finite, stretch in groupby(values, math.isfinite)]


def _lost(drawn: Drawn, axis: _Steps) -> str:
    """Steps whose value is no number, at the top: a gap would look like a run that ended."""
    if math.isfinite(sum(drawn.line.values)):
        return ""
    pixels = {x for x, values in _pixels(drawn.line, axis) if not all(finite for finite, _ in _stretches(values))}
    crosses = "".join(f"M{x - 3} {TOP}l6 6m0 -6l-6 6" for x in sorted(pixels))
    return f'<path d="{crosses}" class="lost s{drawn.style}"><title>not finite</title></path>' if crosses else ""


def _marks(marks: Sequence[Mark], axis: _Steps, title: float) -> Iterator[str]:
    """Numbers that would lie on each other, or on the title, which ends at `title`, stand below each other."""
    ends = [title]
    for mark in sorted(marks, key=lambda mark: mark.step):
        x, half = axis.x(mark.step), _LETTER * len(mark.label) / 2
        row = next((row for row, end in enumerate(ends) if end <= x - half), len(ends))
        ends[row : row + 1] = [x + half]
        yield (
            f'<a href="#case-{escape(mark.label)}" class="mark {escape(mark.severity)}">'
            f"<title>{escape(mark.title)}</title>"
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x:.1f}" y="{_LINE * (1 + row % 13)}" class="middle">{escape(mark.label)}</text></a>'
        )


def _band(axis: _Steps, first: int, last: int) -> str:
    x, width = axis.x(first), max(1.5, axis.x(last) - axis.x(first))
    return (
        f'<rect x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}" class="band">'
        f"<title>rolled back from step {last} to step {first}</title></rect>"
    )


def _legend(lines: Sequence[Drawn]) -> str:
    items = "".join(
        f'<span><svg viewBox="0 0 24 8" class="key"><path d="M0 4L24 4" class="curve s{drawn.style}"/></svg>'
        f"{escape(drawn.label)}</span>"
        for drawn in lines
    )
    return f'<div class="legend">{items}</div>'
