"""Comparison of ranks: a row of medians each, and each rank's own time over steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from sentinel.store import Series

NAMES = ("loss", "step_seconds", "data_seconds", "backward_seconds", "rss_bytes")
"""Signals of each rank that are needed."""
COLUMNS = 120
"""Most columns of a heat map."""
_ROWS = 64
"""Most ranks of the matrix: the ones furthest from the rest."""
_SAMPLES = 4096
"""Least number of samples for the median of a long run."""

Columns = Mapping[str, Series]


class RankRow(msgspec.Struct, frozen=True):
    """The medians of one rank over its steps; NaN for a signal without finite samples."""

    rank: int
    samples: int
    """Steps from which the medians are: of a long run not all, of a live one the last."""
    loss: float | None
    """None: it reported no loss."""
    step_seconds: float
    data_seconds: float
    rss_bytes: float


class Heat(msgspec.Struct, frozen=True):
    """A number over rows and steps; None in cells without one."""

    rows: tuple[str, ...]
    steps: tuple[int, ...]
    """The first step of each column."""
    values: tuple[tuple[float | None, ...], ...]
    hidden: int
    """Number of rows that are left out."""
    unit: str = "1"


def rows(ranks: Mapping[int, Columns]) -> tuple[RankRow, ...]:
    """Return the medians of each rank that took a step."""
    return tuple(_row(rank, columns) for rank, columns in sorted(ranks.items()) if columns)


def _row(rank: int, columns: Columns) -> RankRow:
    def middle(name: str) -> float:
        return spread_median(columns[name].values if name in columns else ())

    samples = max(len(series.seqs) for series in columns.values())
    loss = middle("loss") if "loss" in columns else None
    return RankRow(rank, samples, loss, *(middle(name) for name in ("step_seconds", "data_seconds", "rss_bytes")))


def matrix(ranks: Mapping[int, Columns], offset: int) -> Heat | None:
    """Return each rank's own time, as the mean over the steps of a column.

    A rank's own time is that of the step minus its backward passes: in those all wait for the slowest, so that the
    whole step takes every rank equally long.
    """
    timed = {rank: columns for rank, columns in sorted(ranks.items()) if "step_seconds" in columns}
    if len(timed) < 2:
        return None
    ends = [columns["step_seconds"].seqs[end] for columns in timed.values() for end in (0, -1)]
    first, last = min(ends), max(ends)
    edges = range(first, last + 1, -(-(last - first + 1) // COLUMNS))
    cells = {rank: _own_times(columns, edges) for rank, columns in timed.items()}
    means = {rank: _mean([value for value in row if value is not None]) for rank, row in cells.items()}
    middle = median(list(means.values()))
    kept = set(sorted(means, key=lambda rank: abs(means[rank] - middle), reverse=True)[:_ROWS])
    return Heat(
        rows=tuple(f"rank {rank}" for rank in cells if rank in kept),
        steps=tuple(edge + offset for edge in edges),
        values=tuple(row for rank, row in cells.items() if rank in kept),
        hidden=len(cells) - len(kept),
        unit="seconds",
    )


def _own_times(columns: Columns, edges: range) -> tuple[float | None, ...]:
    whole = _sums(columns["step_seconds"], edges)
    waited = _sums(columns["backward_seconds"], edges) if "backward_seconds" in columns else [(0.0, 0)] * len(whole)
    return tuple(
        (seconds - in_backward) / count if count else None
        for (seconds, count), (in_backward, _) in zip(whole, waited, strict=True)
    )


def _sums(series: Series, edges: range) -> list[tuple[float, int]]:
    """Return (sum, number of values) between each edge and the next."""
    at = [bisect_left(series.seqs, edge) for edge in edges] + [len(series.seqs)]
    return [(sum(series.values[a:b]), b - a) for a, b in pairwise(at)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def spread_median(values: Sequence[float]) -> float:
    """Return the median of the finite values; of a long run, of every n-th step."""
    return median(values[:: max(1, len(values) // _SAMPLES)])


def median(values: Sequence[float]) -> float:
    """Return the median of the finite values; NaN if there is none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else math.nan
