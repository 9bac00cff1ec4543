"""Expand the short form of a series in a rule test: `2.5 2.4 nan _ inf 3-0.1x10 noise(2.5, 0.01, 200)`.

    2.5  -1e-3  nan  inf  -inf    a sample
    _                             no sample at this step;  _x20: at 20 steps
    2.5x10  nanx10                2.5, and 10 times more, as promtool counts
    3-0.1x10  1+0.5x20            3, and 10 more, each 0.1 less (more) than the one before
    noise(2.5, 0.01, 200)         200 samples around 2.5 with a standard deviation of 0.01
    noise(2.5-0.001, 0.01, 200)   the same on a slope

Noise is pseudo-random, and the same in every run: it is seeded with the text of the series.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from sentinel.engine.source import Text

LENGTH_LIMIT = 100_000
"""Steps in a series, at most."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SPECIAL = re.compile(r"([-+]?inf|nan)(?:x(\d{1,6}))?")
_GAP = re.compile(r"_(?:x(\d{1,6}))?")
_RUN = re.compile(rf"({_NUMBER})(?:([-+])({_NUMBER.removeprefix('[-+]?')}))?(?:x(\d{{1,6}}))?")
_NOISE = re.compile(
    rf"noise\(\s*({_NUMBER})([-+]{_NUMBER.removeprefix('[-+]?')})?\s*,\s*({_NUMBER})\s*,\s*(\d{{1,6}})\s*\)"
)
_TOKEN = re.compile(r"noise\([^)]*\)?|\S+")


def expand(text: Text) -> list[float | None]:
    """Return all samples of a series, None where there is none. Raises RuleError at the piece that is wrong."""
    generator = random.Random(text.value)
    values: list[float | None] = []
    for token in _TOKEN.finditer(text.value):
        piece = _piece(token[0], generator)
        if piece is None:
            raise text.error(f"{token[0]!r} is no sample; write 2.5, nan, inf, _, 2.5x10, 3-0.1x10 or "
                             "noise(2.5, 0.01, 200)", token.start())  # fmt: skip
        values += piece
        if len(values) > LENGTH_LIMIT:
            raise text.error(f"over {LENGTH_LIMIT} steps", token.start())
    return values


def _piece(token: str, generator: random.Random) -> list[float | None] | None:
    if special := _SPECIAL.fullmatch(token):
        return [float(special[1])] * (int(special[2] or 0) + 1)
    if gap := _GAP.fullmatch(token):
        return [None] * int(gap[1] or 1)
    if run := _RUN.fullmatch(token):
        if run[2] and not run[4]:
            return None
        start, slope = float(run[1]), float(run[2] + run[3]) if run[2] else 0.0
        return [start + slope * i for i in range(int(run[4] or 0) + 1)]
    if noise := _NOISE.fullmatch(token):
        return list(_noise(float(noise[1]), float(noise[2] or 0), float(noise[3]), int(noise[4]), generator))
    return None


def _noise(start: float, slope: float, spread: float, count: int, generator: random.Random) -> Iterator[float]:
    for i in range(count):
        yield start + slope * i + generator.gauss(0.0, spread)
