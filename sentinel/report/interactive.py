"""Writes a chart as numbers into a page, which `sentinel/web/charts.js` draws: values on hover, zoom, smoothing."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import compress, count, islice, pairwise
from operator import le
from typing import Any

from sentinel.report.chart import Band, Drawn, Mark, Plot, caption, fit_scale
from sentinel.report.markup import escape
from sentinel.text import spell_controls

POINTS = 2048
"""Most points of a line: of more, the lowest and the highest of each piece are kept, as no screen shows more."""


def figure(plot: Plot, zoom: tuple[float, float] | None = None) -> str:
    """Return a figure. `zoom`: first and last of steps that have `POINTS` by themselves."""
    scale = fit_scale(plot)
    low, high = zoom or plot.span
    content = {
        "title": spell_controls(plot.title),
        "caption": spell_controls(caption(plot)),
        "unit": plot.unit,
        "log": scale is not None and scale.logarithmic,
        "thinned": any(len(drawn.line.steps) > POINTS for drawn in plot.lines),
        "lines": [line for drawn in plot.lines for line in _lines(drawn, low, high)],
    }
    label = f"{plot.title} over steps {plot.span[0]:.0f} to {plot.span[1]:.0f}"
    return f'<figure aria-label="{escape(label)}" data-plot="{_attribute(content)}"></figure>'


def grid(span: tuple[float, float], marks: Sequence[Mark], bands: Sequence[Band]) -> str:
    """Return what all charts share, as an attribute of the element around them."""
    content = {
        "span": span,
        "marks": [
            {
                "step": m.step, "label": m.label, "severity": spell_controls(m.severity),
                "title": spell_controls(m.title), "linked": m.linked,
            }
            for m in sorted(marks, key=lambda mark: mark.step)
        ],
        "bands": [[band.first, band.last] for band in bands],
    }  # fmt: skip
    return f'data-grid="{_attribute(content)}"'


def _attribute(content: Any) -> str:
    return escape(json.dumps(content, separators=(",", ":"), allow_nan=False))


def _lines(drawn: Drawn, low: float, high: float) -> Iterator[dict[str, Any]]:
    """Yield the line; steps that a later attempt did again are a fainter line of their own."""
    steps, values = drawn.line.steps, drawn.line.values
    falls = compress(count(1), map(le, islice(steps, 1, None), steps))
    edges = list(pairwise([0, *falls, len(steps)]))
    for begin, end in edges:
        last = end == len(steps)
        inner = bisect_left(steps, low, begin, end), bisect_right(steps, high, begin, end)
        chosen = [at for one, other in pairwise((begin, *inner, end)) for at in _thin(values, one, other)]
        kept = [steps[at] for at in chosen]
        label = spell_controls(drawn.label or drawn.line.name)
        yield {
            "label": label if last else f"{label}, earlier attempt",
            "style": drawn.style,
            "faint": not last,
            "steps": [kept[0], *(after - before for before, after in pairwise(kept))],
            "values": [float(f"{values[at]:.6g}") if math.isfinite(values[at]) else None for at in chosen],
        }


def _thin(values: Sequence[float], begin: int, end: int) -> Iterator[int]:
    """Yield the indices of about `POINTS` values: of each piece the lowest, the highest, and one non-finite value."""
    if end - begin <= POINTS:
        yield from range(begin, end)
        return
    width = -(-(end - begin) * 2 // POINTS)
    for first in range(begin, end, width):
        stretch = values[first : min(first + width, end)]
        finite = stretch if math.isfinite(sum(stretch)) else [value for value in stretch if math.isfinite(value)]
        found = {stretch.index(end_of(finite)) for end_of in (min, max) if finite}
        if len(finite) < len(stretch):
            found.add(next(at for at, value in enumerate(stretch) if not math.isfinite(value)))
        yield from (first + at for at in sorted(found))
