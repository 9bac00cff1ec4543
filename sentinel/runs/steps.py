"""One closed step: the ranks' values, and the run's, which are combined from them by each signal's `combine`.

Pure arithmetic, without collectives: the daemon has all ranks' reports.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from sentinel import wire
from sentinel.engine.expressions.arithmetic import exact_sum
from sentinel.signals import SIGNALS

_SHARDS = {signal.part_of: name for name, signal in SIGNALS.items() if signal.part_of}
"""Norm -> the signal for the part of it that comes from a rank's own shards."""


class LayerStats(msgspec.Struct, frozen=True, gc=False):
    """Statistics of all layers at one step, combined over ranks, with one value per layer. A layer without values has
    NaN, and 0 in `present`."""

    names: tuple[str, ...]
    stats: dict[str, array[float]]
    present: bytes

    def items(self) -> Iterable[tuple[str, dict[str, float]]]:
        """Yield (layer, signal -> value) for the layers that have values."""
        signals = tuple(self.stats)
        rows = zip(*self.stats.values(), strict=True) if signals else itertools.repeat((), len(self.names))
        for name, there, row in zip(self.names, self.present, rows, strict=True):
            if there:
                yield name, dict(zip(signals, row, strict=True))


class RunStep(msgspec.Struct, frozen=True, gc=False):
    """One closed step. A daemon keeps 2,000 of each run; as they are part of no cycle, the garbage collector need not
    track them."""

    seq: int
    time: float
    """Unix seconds at the exit of the step, the latest of the ranks."""
    ranks: Mapping[int, Mapping[str, float]]
    run: Mapping[str, float]
    layers: LayerStats | None = None


def combine_ranks(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the values of the ranks into the run's values, each signal in its own way (`signals.Combine`)."""
    samples = list(ranks)
    if len(samples) == 1 and samples[0].keys().isdisjoint(_SHARDS.values()):
        return dict(samples[0])
    run: dict[str, float] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(samples)):
        signal = SIGNALS.get(name)
        values = [sample[name] for sample in samples if name in sample]
        if signal is not None and signal.combine == "norm" and not signal.part_of:
            part = _SHARDS.get(name, "")
            if not any(part in sample for sample in samples):
                run[name] = next((value for value in values if not math.isfinite(value)), values[0])
            elif len(values) == len(samples):  # else a rank did not sample this step: without its shards, too small
                run[name] = _norm(values, [sample.get(part, 0.0) for sample in samples])
        else:
            run[name] = _COMBINE[signal.combine if signal else "mean"](values)
    return run


def combine_layers(blocks: list[tuple[wire.LayerTable, wire.LayerBlock]]) -> LayerStats:
    """Combine all layers of a step: shards are put together; of replicas the first is taken. No collective is
    needed."""
    table, block = blocks[0]
    if not block.layers and all(other is table for other, _ in blocks) and not table.sharded:
        # Whole replicas: taken as they came.
        columns = {signal: wire.unpack_column("f", values) for signal, values in block.stats.items()}
        return LayerStats(table.names, columns, b"\x01" * len(table.names))
    merged: dict[str, dict[str, dict[tuple[int, ...], float]]] = {}
    for table, block in blocks:
        columns = {signal: wire.unpack_column("f", values) for signal, values in block.stats.items()}
        rows = wire.unpack_column("I", block.layers) if block.layers else range(len(table.layers))
        for row, index in enumerate(rows):
            layer = table.layers[index]
            part = layer.part if layer.placement else ()
            into = merged.setdefault(layer.name, {})
            for signal, values in columns.items():
                into.setdefault(signal, {}).setdefault(part, values[row])
    names = tuple(dict.fromkeys(layer.name for table, _ in blocks for layer in table.layers))
    signals = list(dict.fromkeys(signal for _, block in blocks for signal in block.stats))
    stats = {signal: array("f", [math.nan]) * len(names) for signal in signals}
    for index, name in enumerate(names):
        for signal, parts in merged.get(name, {}).items():
            stats[signal][index] = _layer_value(signal, list(parts.values()))
    return LayerStats(names, stats, bytes(name in merged for name in names))


def _layer_value(signal: str, values: Sequence[float]) -> float:
    """Combine the values of a layer's parts, each part once."""
    if len(values) == 1:
        return values[0]
    known = SIGNALS.get(signal)
    return _COMBINE[known.combine if known else "mean"](values)


def _norm(values: Sequence[float], shards: Sequence[float]) -> float:
    """Return the norm of replicas and shards: the replicated part is the same on every rank and counts once, shards add
    up.

    A rank whose shards another rank holds too reports 0 for them: then they count neither in the sum of its shards nor
    in the replicated part.
    """
    pairs = zip(values, shards, strict=True)
    rests = [max(value * value - shard * shard, 0.0) for value, shard in pairs if math.isfinite(shard)]
    replicated = next((rest for rest in rests if not math.isfinite(rest)), min(rests, default=0.0))
    return math.sqrt(replicated + sum(shard * shard for shard in shards))


def _lowest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _highest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


_COMBINE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": lambda values: exact_sum(values) if all(map(math.isfinite, values)) else sum(values),
    "min": _lowest,
    "max": _highest,
    "any": lambda values: values[0],
    "norm": lambda values: math.hypot(*values),  # of different parts
}
