"""Layer metrics for Prometheus, few enough for it: how many layers have which gradient norm, and the extremes by name.

A series per layer would be 25,600 for 64 ranks of 400 layers, 1.8 MB a scrape. The history has all of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import accumulate, islice
from statistics import median

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.engine.expressions.arithmetic import exact_sum
from sentinel.runs.steps import LayerStats

SHOWN = 10
"""Most layers of a run that are named in each metric."""
NAME_LIMIT = 120
"""Most characters of a layer's name."""
COMPARED = 15
"""Samples before the newest with whose median a layer's newest norm is compared."""
BOUNDS = tuple(10.0**power for power in range(-8, 5))

Row = tuple[str, str, tuple[str, ...], Sequence[tuple[tuple[str, ...], float]]]
"""A metric: name, help, labels, samples."""

_NORM = "layer_grad_norm"


def rows(watches: Iterable[WatchedRun]) -> Iterator[Row]:
    """Yield gauges of the layers of each run at its newest step that sampled them."""
    newest = [(w, w.run.attempt.recent_layers[-1][1]) for w in watches if w.run.attempt.recent_layers]
    norms = [(w.run.run_id, _column(stats, _NORM)) for w, stats in newest]
    finite = [(run, sorted(v for v in column.values() if math.isfinite(v))) for run, column in norms]
    of_run = ("run",)
    counted = [((run,), float(len(column))) for run, column in norms]
    yield "layers", "Parameter tensors that had a gradient at the newest sampled step.", of_run, counted
    for name, text, chosen in (
        ("min", "Smallest", min),
        ("median", "Median of the", median),
        ("max", "Largest", max),
    ):
        told = [((run,), float(chosen(values))) for run, values in finite if values]
        yield f"layers_grad_norm_{name}", f"{text} gradient norm (L2) of a layer, unscaled.", of_run, told
    broken = [(w.run.run_id, _column(stats, "layer_nonfinite")) for w, stats in newest]
    all_bad = [((run,), float(sum(map(bool, column.values())))) for run, column in broken]
    yield "layers_nonfinite", "Parameter tensors whose gradient has NaN or infinite elements.", of_run, all_bad
    bad = [(run, _largest(column, above=0)) for run, column in broken]
    top = [(run, _largest(column)) for run, column in norms]
    grown = [(w.run.run_id, _largest(_growth(w, stats))) for w, stats in newest]
    texts = (
        ("layer_grad_norm", "Gradient norm (L2) of the layers that have the largest, unscaled.", top),
        ("layer_grad_growth_ratio", "Gradient norm over its own median of 15 samples, where it grew most.", grown),
        ("layer_nonfinite_elements", "Elements of a gradient that are NaN or infinite, where there are most.", bad),
    )
    for name, text, found in texts:
        yield name, text, ("run", "layer"), [((run, layer), value) for run, layers in found for layer, value in layers]


def histogram(watches: Iterable[WatchedRun]) -> Metric:
    """Return how many layers have which gradient norm, by decades: the data of a heat map."""
    text = "Layers by gradient norm (L2), unscaled, at the newest sampled step: a gauge, it falls too."
    family = HistogramMetricFamily("sentinel_layers_by_grad_norm", text, labels=("run",))
    for watch in watches:
        if watch.run.attempt.recent_layers:
            values = [v for v in _column(watch.run.attempt.recent_layers[-1][1], _NORM).values() if not math.isnan(v)]
            counts = [0] * (len(BOUNDS) + 1)
            for value in values:
                counts[bisect_left(BOUNDS, value)] += 1
            names = [*map(floatToGoString, BOUNDS), "+Inf"]
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric((watch.run.run_id,), buckets, exact_sum([v for v in values if math.isfinite(v)]))
    return family


def _column(stats: LayerStats, signal: str) -> dict[str, float]:
    values = stats.stats.get(signal)
    if values is None:
        return {}
    return {name: values[row] for row, name in enumerate(stats.names) if stats.present[row]}


def _growth(watch: WatchedRun, newest: LayerStats) -> dict[str, float]:
    """Return each layer's norm divided by its median over the samples before, for layers present in all of them."""
    past = [stats for _, stats in islice(reversed(watch.run.attempt.recent_layers), 1, 1 + COMPARED)]
    columns = [s.stats[_NORM] for s in past if s.names == newest.names and _NORM in s.stats]
    if not columns or _NORM not in newest.stats:
        return {}
    usual = [median(values) for values in zip(*columns, strict=True)]
    now = newest.stats[_NORM]
    rows = ((name, now[row], usual[row]) for row, name in enumerate(newest.names) if newest.present[row])
    return {name: value / base for name, value, base in rows if base > 0 and math.isfinite(base)}


def _largest(column: dict[str, float], above: float = -math.inf) -> list[tuple[str, float]]:
    """Return the layers with the largest values, NaN the largest of all. Of cut names that coincide, one stays."""
    chosen = ((name, value) for name, value in column.items() if not value <= above)
    found = nlargest(SHOWN, chosen, key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return list({name[-NAME_LIMIT:]: value for name, value in reversed(found)}.items())[::-1]
