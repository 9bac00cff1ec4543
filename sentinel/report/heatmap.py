"""Draws heat maps as inline SVG: rows down, steps across. Lightness is the logarithm of the number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from sentinel.report.chart import RIGHT, WIDTH, readable
from sentinel.report.markup import escape
from sentinel.report.ranks import Heat

_CELL = 13
_LABELS = 230
_STOPS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
"""Viridis, which rises in lightness, so that it can be read without colour."""
_LEVELS = 40
_NARROWEST = 0.3
"""Least decades that the colours span, a factor of two: the jitter of similar rows should not show."""
_BROKEN = -1


def heat_map(heat: Heat, label: str) -> str:
    """Return a heat map as a figure. `label`: what it shows, for screen readers. Crosses mark non-finite values."""
    finite = [math.log10(v) for row in heat.values for v in row if v is not None and math.isfinite(v) and v > 0]
    low = min(finite, default=0.0)
    high = max(max(finite, default=1.0), low + _NARROWEST)
    height = len(heat.rows) * _CELL + 24
    shapes: dict[int, list[str]] = {}
    texts = [
        _text(_LABELS, height - 6, f"step {heat.steps[0]:,}", "tick"),
        _text(WIDTH - RIGHT, height - 6, f"step {heat.steps[-1]:,}", "tick end"),
    ]
    for line, (name, row) in enumerate(zip(heat.rows, heat.values, strict=True)):
        shown = name if len(name) <= 34 else "…" + name[-33:]
        texts.append(_text(_LABELS - 6, line * _CELL + 10, shown, "tick end"))
        for level, shape in _shapes(row, line * _CELL, low, high):
            shapes.setdefault(level, []).append(shape)
    paths = "".join(_path(level, "".join(parts)) for level, parts in sorted(shapes.items()))
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{paths}{"".join(texts)}</svg>'
    return f"<figure class='rows'>{_key(low, high, heat.unit, _BROKEN in shapes)}{svg}</figure>"


def _key(low: float, high: float, unit: str, broken: bool) -> str:
    swatches = "".join(f'<i style="background:{stop}"></i>' for stop in _STOPS)
    first, last = (escape(readable(10**power, unit)) for power in (low, high))
    crosses = '<span><b class="alarm">&times;</b> not finite</span>' if broken else ""
    return (
        f'<div class="legend heat" style="padding-left:{100 * _LABELS / WIDTH:g}%">'
        f'<span>{first} <span class="ramp">{swatches}</span> {last}, log scale</span>{crosses}</div>'
    )


def _shapes(row: Sequence[float | None], y: int, low: float, high: float) -> Iterator[tuple[int, str]]:
    """Yield (level, outline) of the cells of a row; neighbours of one level are joined."""
    width = (WIDTH - _LABELS - RIGHT) / len(row)
    at = 0
    for level, cells in groupby(_level(value, low, high) for value in row):
        count = len(list(cells))
        x, wide = _LABELS + at * width, count * width
        at += count
        if level == _BROKEN:
            yield level, "".join(_cross(x + (n + 0.5) * width, y + _CELL / 2) for n in range(count))
        elif level is not None:
            yield level, f"M{x:.1f} {y}h{wide + 0.3:.1f}v{_CELL - 1}h-{wide + 0.3:.1f}z"


def _cross(x: float, y: float) -> str:
    return f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"


def _level(value: float | None, low: float, high: float) -> int | None:
    if value is None:
        return None
    if not math.isfinite(value):
        return _BROKEN
    share = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
    return round(min(max(share, 0.0), 1.0) * _LEVELS)


def _path(level: int, outlines: str) -> str:
    if level == _BROKEN:
        return f'<path d="{outlines}" class="broken"><title>not finite</title></path>'
    return f'<path d="{outlines}" fill="{_colour(level / _LEVELS)}"/>'


def _colour(share: float) -> str:
    at = share * (len(_STOPS) - 1)
    left = min(int(at), len(_STOPS) - 2)
    a, b = (bytes.fromhex(stop[1:]) for stop in _STOPS[left : left + 2])
    mixed = bytes(round(p + (q - p) * (at - left)) for p, q in zip(a, b, strict=True))
    return f"#{mixed.hex()}"


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" class="{style}">{escape(words)}</text>'
