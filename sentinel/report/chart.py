"""Charts as inline SVG. Colours are names of CSS variables, so that the page decides on light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

from sentinel.report.content import Heat, Line

WIDTH, HEIGHT = 920, 190
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 20, 26
_CELL = 13
_LABELS = 230
_STOPS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
"""Viridis: rises in lightness, so it reads without colour."""


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
    values = [v for drawn in lines for v in drawn.line.values if math.isfinite(v)]
    if not values:
        return ""
    scale = _Scale.of(values)
    axis = _Steps(*span)
    parts = [_frame(title, unit, scale, axis)]
    parts += [_band(axis, *band) for band in bands]
    parts += [_curve(drawn, scale, axis) for drawn in lines]
    parts += [_lost(drawn, axis) for drawn in lines]
    parts += [_mark(mark, axis) for mark in marks]
    label = escape(f"{title} over steps {span[0]} to {span[1]}")
    legend = _legend(lines) if len(lines) > 1 else ""
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{svg}{legend}</figure>"


class _Steps(msgspec.Struct, frozen=True):
    first: int
    last: int

    def x(self, step: float) -> float:
        share = (step - self.first) / max(1, self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)


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
    if unit == "seconds" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    if abs(value) >= 1e5 or 0 < abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:.4g}"


def _frame(title: str, unit: str, scale: _Scale, axis: _Steps) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    named = {"1": "", "ratio": ""}.get(unit, "" if unit in ("bytes", "seconds") else f" ({unit})")
    kind = ", log scale" if scale.logarithmic else ""
    parts = [f'<text x="{LEFT}" y="12" class="title">{escape(title + named + kind)}</text>']
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="tick end">{escape(readable(tick, unit))}</text>')
    for tick in _round_ticks(axis.first, axis.last):
        if axis.first <= tick <= axis.last:
            parts.append(f'<text x="{axis.x(tick):.1f}" y="{bottom + 15}" class="tick middle">{tick:,.0f}</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 1}" class="tick end">step</text>')
    return "".join(parts)


def _curve(drawn: Drawn, scale: _Scale, axis: _Steps) -> str:
    """At most the lowest and the highest value of each pixel: what an eye can tell, of any number of steps."""
    pieces: list[list[str]] = [[]]
    column, low, high = -1, math.inf, -math.inf

    def flush() -> None:
        if low <= high:
            x = LEFT + column
            ends = {round(scale.y(low), 1), round(scale.y(high), 1)}
            pieces[-1].extend(f"{x} {y}" for y in sorted(ends))

    for step, value in zip(drawn.line.steps, drawn.line.values, strict=True):
        at = round(axis.x(step) - LEFT)
        if at != column or not math.isfinite(value):
            flush()
            column, low, high = at, math.inf, -math.inf
        if math.isfinite(value):
            low, high = min(low, value), max(high, value)
        elif pieces[-1]:
            pieces.append([])
    flush()
    path = "".join("M" + "L".join(piece if len(piece) > 1 else piece * 2) for piece in pieces if piece)
    return f'<path d="{path}" class="curve s{drawn.style}"/>'


def _lost(drawn: Drawn, axis: _Steps) -> str:
    """Steps whose value is no number, at the top: a gap would look like a run that ended."""
    pixels = {
        round(axis.x(step))
        for step, value in zip(drawn.line.steps, drawn.line.values, strict=True)
        if not math.isfinite(value)
    }
    crosses = "".join(f"M{x - 3} {TOP - 3}l6 6m0 -6l-6 6" for x in sorted(pixels))
    return f'<path d="{crosses}" class="lost s{drawn.style}"><title>not finite</title></path>' if crosses else ""


def _mark(mark: Mark, axis: _Steps) -> str:
    x = axis.x(mark.step)
    return (
        f'<g class="mark {escape(mark.severity)}"><title>{escape(mark.title)}</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{x + 3:.1f}" y="{TOP + 9}">{escape(mark.label)}</text></g>'
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


def heat_map(heat: Heat) -> str:
    """Layers down, steps across; lightness is the logarithm of the gradient norm, crosses are not finite."""
    finite = [math.log10(v) for row in heat.values for v in row if v is not None and math.isfinite(v) and v > 0]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    width = (WIDTH - _LABELS - RIGHT) / len(heat.steps)
    height = len(heat.layers) * _CELL + 24
    parts = []
    for line, (name, row) in enumerate(zip(heat.layers, heat.values, strict=True)):
        y = line * _CELL
        shown = name if len(name) <= 34 else "…" + name[-33:]
        parts.append(f'<text x="{_LABELS - 6}" y="{y + 10}" class="tick end">{escape(shown)}</text>')
        parts += [
            _cell(_LABELS + at * width, y, width, value, low, high) for at, value in enumerate(row) if value is not None
        ]
    parts.append(f'<text x="{_LABELS}" y="{height - 6}" class="tick">step {heat.steps[0]:,}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 6}" class="tick end">step {heat.steps[-1]:,}</text>')
    swatches = "".join(f'<i style="background:{stop}"></i>' for stop in _STOPS)
    ramp = f'<span class="ramp">{swatches}</span>'
    key = f'<div class="legend">{10**low:.2g} {ramp} {10**high:.2g}, &times; not finite</div>'
    label = "gradient norm of layers over steps"
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{key}{svg}</figure>"


def _cell(x: float, y: float, width: float, value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return f'<text x="{x:.1f}" y="{y + 10}" class="cross">&times;</text>'
    share = (math.log10(value) - low) / ((high - low) or 1.0) if value > 0 else 0.0
    return f'<rect x="{x:.1f}" y="{y}" width="{width + 0.3:.1f}" height="{_CELL - 1}" fill="{_colour(share)}"/>'


def _colour(share: float) -> str:
    at = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    left = min(int(at), len(_STOPS) - 2)
    a, b = (bytes.fromhex(stop[1:]) for stop in _STOPS[left : left + 2])
    mixed = bytes(round(p + (q - p) * (at - left)) for p, q in zip(a, b, strict=True))
    return f"#{mixed.hex()}"
